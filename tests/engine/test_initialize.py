"""What `initialize` takes over from the caller, what it refuses, and what ranks must have in common."""

from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig, initialize
from engine.parallel import dist
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

SGD = OptimizerConfig(lr=0.1, name="sgd", max_grad_norm=0.0)


class FourierNet(nn.Module):
    """A linear layer on random features, which are a buffer. `mask` is a buffer whose rows share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(0.0))  # DCP would write the first buffer of rank 1: it has less to do
        self.register_buffer("features", torch.randn(2, 8))
        self.register_buffer("mask", torch.ones(1, 8, dtype=torch.bool).expand(3, 8), persistent=False)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.sum()
        return self.head(torch.cos(x @ self.features) * self.mask[0])


def initialize_on_own_group(stage: int, folder: str) -> dict[str, Any]:
    """Each rank draws a model of its own, and has initialized torch's process group before, as in a loop for FSDP2."""
    dist.stop()
    torch_dist.init_process_group("gloo")
    torch.manual_seed(torch_dist.get_rank())
    engine = initialize(FourierNet(), EngineConfig(zero_stage=stage, dtype="fp32"), optimizer=SGD)
    rows = torch.ones(4, 2) * (1 + torch_dist.get_rank())
    engine.backward(engine(rows).mean())
    engine.step()
    result = {"weights": full_weights(engine), "features": engine.module.features, "seen": engine.module.seen.clone()}
    engine.save(folder)
    engine.load(folder)
    dist.stop()
    total = torch.ones(())
    torch_dist.all_reduce(total)  # the group still exists
    torch_dist.destroy_process_group()
    return result | {"loaded": engine.module.seen, "ranks": total}


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_start_with_parameters_and_buffers_of_rank_0_in_the_callers_group(stage: int, tmp_path: Any) -> None:
    first, second = run_ranks(initialize_on_own_group, 2, stage, str(tmp_path / "saved"))
    torch.manual_seed(0)
    model = FourierNet()
    for each, rows in ((first, 1.0), (second, 2.0)):
        assert torch.equal(each["features"], model.features) and each["seen"] == 8 * rows
        assert each["loaded"] == 8.0, "a checkpoint has the buffers of rank 0"
        assert each["ranks"] == 2
    loss = (model(torch.ones(4, 2)).mean() + model(2 * torch.ones(4, 2)).mean()) / 2
    loss.backward()
    for name, parameter in model.named_parameters():
        expected = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(first["weights"][name], expected)
        torch.testing.assert_close(second["weights"][name], expected)


def hooked(register: str) -> nn.Module:
    module = nn.Linear(2, 1)
    getattr(module.weight, register)(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(2, 1, device="meta"), r"weight has no values.*initialize\(\.\.\., fill="),
        (hooked("register_hook"), "weight has a gradient hook, which would not run"),
        (hooked("register_post_accumulate_grad_hook"), "weight has a gradient hook, which would not run"),
    ],
)
def test_parameters_without_values_and_with_hooks_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        initialize(module, EngineConfig(dtype="bf16"), optimizer=SGD)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_forwards_may_precede_their_backwards(stage: int, dtype: Any) -> None:
    results = []
    for in_turn in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        engine = initialize(module, EngineConfig(zero_stage=stage, dtype=dtype), optimizer=SGD)
        for step in range(2):
            first, second = torch.ones(3, 2) + step, torch.ones(3, 2) - step
            if in_turn:
                engine.backward(engine(first).mean())
                engine.backward(engine(second).mean())
            else:
                losses = engine(first).mean(), engine(second).mean()
                for loss in losses:
                    engine.backward(loss)
            assert engine.step() is not None
        results.append(full_weights(engine))
    for name, weight in results[0].items():
        assert torch.equal(weight, results[1][name])


def update_with(difference: str) -> str:
    engine = initialize(nn.Linear(2, 1), EngineConfig(zero_stage=3, dtype="fp32"), optimizer=SGD)
    is_first = dist.is_rank_zero()
    names = {"other names": ["a"] if is_first else ["b"], "more names": ["a"] if is_first else ["a", "b"]}
    batches = [torch.ones(2, 2)] * (2 if difference == "count" and is_first else 1)
    try:
        engine.update(batches, lambda module, x: (module(x).sum(), dict.fromkeys(names.get(difference, []), 1.0)), 4.0)
    except ValueError as error:
        return str(error)
    return ""


def update_with_each() -> list[str]:
    return [update_with(difference) for difference in ("", "count", "other names", "more names")]


def test_ranks_whose_updates_differ_get_an_error() -> None:
    """Without it, other names add unrelated metrics, and other numbers of tensors wait for each other forever."""
    first, second = run_ranks(update_with_each, 2)
    assert first[0] == second[0] == ""
    assert "2 micro-batches on rank 0" in first[1] and "1 micro-batches on rank 1" in second[1]
    assert "metrics a, loss on rank 0" in first[2] and "metrics b, loss on rank 1" in second[2]
    assert "metrics a, loss on rank 0" in first[3] and "metrics a, b, loss on rank 1" in second[3]
