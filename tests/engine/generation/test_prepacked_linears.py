"""Prepacked linear layers: each product gives the layer's numbers, and is used for the weights that it supports."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.generation import prepacked_linears as linear
from engine.generation.prepacked_linears import PrepackedLinears, copies_weights
from tests.engine.generation.families import can_prepack

BF16 = torch.bfloat16


@pytest.fixture(params=["our kernel", "oneDNN"])
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the C kernel reads the weights in place."""
    if request.param == "oneDNN":
        monkeypatch.setattr(linear, "has_in_place_kernel", lambda: False)
        if not can_prepack(BF16):
            pytest.skip("this PyTorch cannot pack bf16 weights here")
    elif not linear.has_in_place_kernel():
        pytest.skip("no C compiler, or a processor that uses oneDNN")
    return request.param == "our kernel"


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    made = [nn.Linear(256, 128), nn.Linear(256, 96, bias=False), Conv1D(80, 256), nn.Linear(256, 64)]
    nn.init.normal_(made[2].bias)
    return nn.ModuleList(made).to(BF16)


@torch.no_grad()
def test_products_of_all_layers(in_place: bool) -> None:
    module, x = layers(), torch.randn(2, 3, 256).to(BF16)
    expected = [layer.double()(x.double()) for layer in layers()]
    prepacked = PrepackedLinears(module)
    with prepacked.applied():
        assert len(prepacked._products or {}) == 4
        for layer, right in zip(module, expected, strict=True):
            assert isinstance(layer.forward, linear.LinearRows) is in_place
            torch.testing.assert_close(layer(x).double(), right, atol=1e-5, rtol=2**-8)
    assert not any("forward" in layer.__dict__ for layer in module)


@torch.no_grad()
def test_weights_are_copied_only_where_necessary(in_place: bool) -> None:
    module, x = layers(), torch.randn(4, 256).to(BF16)
    prepacked = PrepackedLinears(module)

    def products() -> list[torch.Tensor]:
        with prepacked.applied():
            return [layer(x) for layer in module]

    def differ(before: list[torch.Tensor]) -> list[bool]:
        return [not torch.equal(one, other) for one, other in zip(products(), before, strict=True)]

    before = products()
    copied = [2] if in_place else [0, 1, 2, 3]
    assert prepacked.bytes == sum(module[index].weight.nbytes for index in copied)
    for layer in module:
        layer.weight.mul_(2)
    assert differ(before) == ([True, True, False, True] if in_place else [False] * 4)
    assert copies_weights(BF16) is not in_place and copies_weights(torch.float32)
    prepacked.refresh()
    assert all(differ(before))
    prepacked.release()
    assert prepacked.bytes == 0


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_fp32_weights_are_packed(rows: int) -> None:
    if not can_prepack(torch.float32):
        pytest.skip("this PyTorch cannot pack fp32 weights here")
    module, x = nn.ModuleList([nn.Linear(1024, 512)]), torch.randn(rows, 1024)
    plain, prepacked = module[0](x), PrepackedLinears(module)
    prepacked.refresh()
    module[0].weight.zero_()
    with prepacked.applied():
        torch.testing.assert_close(module[0](x), plain)


@torch.no_grad()
def test_parameters_on_huge_pages_have_their_values_and_stay_tied(in_place: bool) -> None:
    torch.manual_seed(0)
    module = nn.ModuleList([nn.Embedding(2**14, 96), nn.Linear(96, 2**14, bias=False), nn.LayerNorm(7)]).to(BF16)
    module[2].float()
    module[1].weight = module[0].weight
    module[2].bias = None
    before = {
        name: (parameter, parameter.data_ptr(), parameter.clone()) for name, parameter in module.named_parameters()
    }
    linear.move_to_huge_pages(module)
    assert module[1].weight is module[0].weight
    for name, parameter in module.named_parameters():
        same, address, values = before[name]
        assert parameter is same and torch.equal(parameter, values) and parameter.data_ptr() % 64 == 0
        assert (parameter.data_ptr() != address) is (in_place and parameter.dtype == BF16)
