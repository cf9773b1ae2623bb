"""One rank without FSDP2 gives the outputs and gradients of one rank with FSDP2."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close as close

from engine import Engine, EngineConfig, OptimizerConfig, sharding
from engine.parallel import dist, dtensors, zero


class Tied(nn.Module):
    """Blocks between an embedding and a tied head, and one frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[0][0].bias.requires_grad_(False)

    def forward(self, ids: Tensor, shift: Tensor) -> Any:
        hidden = self.embedding(ids) + shift
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build_module(dtype: Any, *, without_fsdp: bool) -> nn.Module:
    dist.start("test", device="cpu")
    torch.manual_seed(3)
    module = Tied()
    if without_fsdp:
        zero.ComputeCopies(module, sharding.precision_policy(dtype).param_dtype)
    else:
        zero.shard(module, EngineConfig(), sharding.precision_policy(dtype))
    return module


def two_micro_batches(module: nn.Module) -> list[Tensor]:
    """Return outputs and gradients of two micro-batches. Check that the parameters are the masters afterwards."""
    outputs = []
    for number, last in ((1, False), (2, True)):
        source = torch.Generator().manual_seed(number)
        zero.before_backward(module, stage=0, last=last)
        out = module(torch.randint(11, (3, 5), generator=source), torch.randn(8, generator=source))
        (out.float() * torch.randn(out.shape, generator=source)).sum().backward()
        outputs.append(out.detach())
    zero.release(module)
    masters = dict(module.named_parameters())
    assert all(master.dtype == torch.float32 for master in masters.values())
    assert masters["blocks.0.0.bias"].grad is None
    return outputs + [dtensors.full_tensor(m.grad) for m in masters.values() if m.grad is not None]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_outputs_and_gradients_equal_fsdp(dtype: Any) -> None:
    ours, theirs = (two_micro_batches(build_module(dtype, without_fsdp=without_fsdp)) for without_fsdp in (True, False))
    assert len(ours) == len(theirs) > 4
    # Since torch 2.15, FSDP2 adds the gradients of a tied weight's uses in fp32 in the micro-batches before the last.
    tied, rounding = theirs[2], torch.finfo(theirs[0].dtype).eps * float(theirs[2].abs().max())
    for actual, expected in zip(ours, theirs, strict=True):
        close(actual, expected, rtol=0, atol=rounding if expected is tied else 0)


def test_compute_copies_follow_their_masters() -> None:
    module = build_module("bf16", without_fsdp=True)
    ids, shift = torch.arange(4)[None], torch.zeros(8)
    with torch.no_grad():
        before = module(ids, shift)
        assert module.head.weight is module.embedding.weight and module.head.weight.dtype == torch.bfloat16
        zero.release(module)
        assert module.head.weight is module.embedding.weight and module.head.weight.dtype == torch.float32
        module.head.weight *= 2
        after = module(ids, shift)
        zero.release(module)
    assert not torch.equal(before, after)


def test_discard_drops_gradients_of_an_interrupted_pass() -> None:
    module = build_module("bf16", without_fsdp=True)
    zero.before_backward(module, stage=0, last=False)
    module(torch.arange(4)[None], torch.zeros(8)).sum().backward()
    zero.before_backward(module, stage=0, last=True)
    module(torch.arange(4)[None], torch.zeros(8))
    zero.discard(module)
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())
    fresh = build_module("bf16", without_fsdp=True)
    for actual, expected in zip(two_micro_batches(module), two_micro_batches(fresh), strict=True):
        assert torch.equal(actual, expected)


def test_a_forward_between_backward_and_step_changes_nothing() -> None:
    weights = []
    for looks in (False, True):
        torch.manual_seed(3)
        engine = Engine(Tied(), EngineConfig(dtype="bf16"), optimizer=OptimizerConfig(lr=0.1, max_grad_norm=0.1))
        for _ in range(2):
            engine.backward(engine(torch.arange(4)[None], torch.ones(8)).float().square().sum())
            if looks:
                engine(torch.arange(4)[None], torch.ones(8))
            done = engine.step()
            assert done is not None and done.grad_norm > 0
        weights.append([parameter.detach().clone() for parameter in engine.module.parameters()])
        dtypes = {name: p.dtype for name, p in engine.module.named_parameters()}
        assert dtypes.pop("blocks.0.0.bias") == torch.bfloat16, "a frozen parameter has no master"
        assert set(dtypes.values()) == {torch.float32}
    assert all(torch.equal(actual, expected) for actual, expected in zip(*weights, strict=True))


def test_a_meta_module_keeps_its_tied_weights() -> None:
    with torch.device("meta"):
        blueprint = Tied()
    engine = Engine(blueprint, EngineConfig(dtype="bf16"), optimizer=OptimizerConfig(lr=0.1), fill=ones)
    assert engine.module.head.weight is engine.module.embedding.weight
    assert isinstance(engine.module.head.weight, nn.Parameter) and not engine.module.head.weight.is_meta
    before = dict(engine.module.named_parameters())
    engine.backward(engine(torch.arange(4)[None], torch.randn(8)).float().square().sum())
    engine.step()
    assert dict(engine.module.named_parameters()).keys() == before.keys() and "head.weight" not in before
    assert engine.module.head.weight is engine.module.embedding.weight


@torch.no_grad()
def ones(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.fill_(1.0)
