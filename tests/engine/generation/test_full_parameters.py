"""Merged LoRA weights against W + alpha / r * B A in float64. The live weights do not change."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.generation.weight_sync import full_parameters

NAMES = [f"{layer}.{leaf}" for layer in ("linear", "conv", "plain") for leaf in ("weight", "bias")]


class Net(nn.Module):
    """A linear layer, GPT-2's transposed layer, and a linear layer without adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.conv = Conv1D(7, 5)
        self.plain = nn.Linear(7, 3)


def adapted(rank: int = 2, alpha: int = 3) -> Net:
    torch.manual_seed(2)
    module = Net()
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=alpha, target_modules=["linear", "conv"]), module)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter)
    return module


def by_hand(layer: Any, scale: float, *, transposed: bool) -> torch.Tensor:
    base = layer.base_layer.weight.detach().double()
    up, down = layer.lora_B["default"].weight.double(), layer.lora_A["default"].weight.double()
    merged = base.clone()
    for out in range(up.shape[0]):
        for inner in range(down.shape[1]):
            step = scale * sum(up[out, r].item() * down[r, inner].item() for r in range(up.shape[1]))
            merged[(inner, out) if transposed else (out, inner)] += step
    return merged


@pytest.mark.parametrize(("rank", "alpha"), [(2, 3), (4, 4)])
def test_merged_weights(rank: int, alpha: int) -> None:
    module = adapted(rank, alpha)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    results = dict(full_parameters(module))
    assert list(results) == NAMES
    scale = alpha / rank
    expected = {
        "linear.weight": by_hand(module.linear, scale, transposed=False),
        "conv.weight": by_hand(module.conv, scale, transposed=True),
    }
    for name, value in expected.items():
        torch.testing.assert_close(results[name].double(), value, atol=1e-5, rtol=1e-5)
    assert torch.equal(results["plain.weight"], module.plain.weight)
    assert torch.equal(results["linear.bias"], before["linear.base_layer.bias"])
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_precision_is_kept() -> None:
    module = adapted().bfloat16()
    results = dict(full_parameters(module))
    assert {t.dtype for t in results.values()} == {torch.bfloat16}
    expected = by_hand(module.linear, 1.5, transposed=False)
    assert torch.equal(results["linear.weight"], expected.to(torch.bfloat16))  # rounded once, at the end


def test_merged_adapters_are_refused() -> None:
    module = adapted()
    layer: Any = module.linear
    layer.merge()
    with pytest.raises(
        ValueError, match=r"the adapter of linear cannot be merged: .* not adapters that peft has merged"
    ):
        dict(full_parameters(module))
