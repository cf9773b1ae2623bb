"""Offloaded optimizers against plain PyTorch, and checkpoints that every tier can read."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.offload import OffloadedOptimizer
from engine.parallel import dist, dtensors
from tests.engine.weights import full_weights
from tests.ranks import run_ranks

WIDTH, ROWS, STEPS = 37, 4, 3
OPTIMIZER = OptimizerConfig(lr=0.02, weight_decay=0.1, max_grad_norm=0.5, betas=(0.9, 0.95))
SUB_GROUP = 1024  # divides the larger matrices
TIERS: list[dict[str, Any]] = [
    {"offload_optimizer": "cpu"},
    {"offload_optimizer": "nvme"},
    {"offload_optimizer": "cpu", "offload_ratio": 0.5},
    {"offload_optimizer": "nvme", "offload_ratio": 0.4},
    {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    {"offload_optimizer": "nvme", "offload_parameters": "nvme", "activation_checkpointing": True},
]
CHECKPOINT_TIERS: list[dict[str, Any]] = [{}, *TIERS[:3]]
STAGES = ((0, 0), (0, 1), (1, 2), (2, 2), (3, 3), (4, 2), (4, 3), (5, 3))  # a tier and a ZeRO stage


class Net(nn.Module):
    """A net with sizes that neither two ranks nor sub-groups divide, and a parameter without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 3)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def net(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)


def squared_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float | Tensor]]:
    return (module(batch[0]) - batch[1]).square().sum(), {}


def advance(engine: Engine, first: int, last: int, micro: int = 1) -> list[tuple[float, float]]:
    """Run steps `first` to `last` on this rank's rows in `micro` micro-batches. Return losses and gradient norms."""
    world, actual = dist.world(), []
    for step in range(first, last + 1):
        x, y = (full[world.rank :: world.size].chunk(micro) for full in data(step))
        update = engine.update(list(zip(x, y, strict=True)), squared_error, ROWS)
        actual.append((update.loss, update.grad_norm))
    return actual


def plain(config: OptimizerConfig, optimizer: Any) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Run the same steps in one process with plain PyTorch: clipping, and no weight decay on vectors."""
    module, actual = net(), []
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    stepper = optimizer([{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors}])
    for step in range(1, STEPS + 1):
        loss = squared_error(module, data(step))[0] / ROWS
        stepper.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), config.max_grad_norm or float("inf"))
        stepper.step()
        actual.append((loss.item(), norm.item()))
    return actual, {name: p.detach() for name, p in module.named_parameters()}


def engine_of(tier: dict[str, Any], optimizer: OptimizerConfig = OPTIMIZER, *, seed: int = 1, **more: Any) -> Engine:
    chosen: dict[str, Any] = {"dtype": "fp32", "zero_stage": 2, "sub_group_size": SUB_GROUP} | tier | more
    return Engine(net(seed), EngineConfig(**chosen), optimizer=optimizer)


def run_all(micro: int) -> list[tuple[list[tuple[float, float]], dict[str, Tensor]]]:
    torch.set_num_threads(1)
    results = []
    for tier, stage in STAGES:
        engine = engine_of(TIERS[tier], zero_stage=stage)
        results.append((advance(engine, 1, STEPS, micro), full_weights(engine)))
    return results


def check(actual: tuple[list[tuple[float, float]], dict[str, Tensor]], expected: Any, tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(actual[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name, weight in expected[1].items():
        torch.testing.assert_close(actual[1][name], weight, atol=tolerance, rtol=tolerance)


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)


def test_each_tier_equals_plain_pytorch_on_one_and_two_ranks() -> None:
    expected = plain(OPTIMIZER, adamw)
    for results in [[run_all(2)], run_ranks(run_all, 2, 2)]:
        for actual in itertools.chain(*results):
            check(actual, expected, 3e-6)


OTHERS: list[tuple[str, dict[str, Any], Any]] = [
    ("sgd", {"momentum": 0.9}, lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9)),
    ("adagrad", {"lr_decay": 0.1}, lambda groups: torch.optim.Adagrad(groups, lr=0.01, lr_decay=0.1)),
    ("nadam", {}, lambda groups: torch.optim.NAdam(groups, lr=0.01)),
    ("rmsprop", {"centered": True}, lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True)),
]


@pytest.mark.parametrize(("name", "options", "optimizer"), OTHERS, ids=[other[0] for other in OTHERS])
@pytest.mark.parametrize("tier", TIERS[:3], ids=["cpu", "nvme", "half"])
def test_other_optimizers(name: str, options: dict[str, Any], optimizer: Any, tier: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=0.01, name=name, options=options, max_grad_norm=0.0)
    engine = engine_of(tier, config)
    check((advance(engine, 1, STEPS), full_weights(engine)), plain(config, optimizer))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_shards_and_fp32_masters(dtype: str) -> None:
    """The shards are the rounded masters. The losses equal those with masters on the device."""
    curves = []
    for tier in [{}, *TIERS[:3]]:
        engine = engine_of(tier, dtype=dtype)
        curves.append([loss for loss, _ in advance(engine, 1, STEPS)])
        if tier:
            for name, parameter in engine.module.named_parameters():
                master = masters(engine)[name]
                assert parameter.dtype == getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
                assert master.dtype == torch.float32
                kept = dtensors.local(parameter.detach())
                torch.testing.assert_close(kept, master.to(parameter.dtype), atol=0, rtol=0)
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=3e-3)


def masters(engine: Engine) -> dict[str, Tensor]:
    assert isinstance(engine.optimizer, OffloadedOptimizer)
    states = engine.optimizer.state
    return {name: states[p]["parameter"].clone() for name, p in engine.module.named_parameters()}


def test_masters_start_with_the_unrounded_parameters() -> None:
    given = dict(net().named_parameters())
    for tier in TIERS[:3]:
        engine = engine_of(tier, dtype="bf16")
        for name, master in masters(engine).items():
            assert torch.equal(master, given[name].detach())


def test_an_overflow_in_fp16_changes_no_state() -> None:
    for tier in TIERS[:2]:
        engine = engine_of(tier, dtype="fp16")
        advance(engine, 1, 1)
        before, scale = masters(engine), engine.scaler.scale
        big = (torch.full((ROWS, WIDTH), 6e4), torch.zeros(ROWS, 3))
        skipped = [engine.update([big], squared_error, 1).skipped for _ in range(2)]
        assert skipped == [True, True] and engine.scaler.scale < scale
        assert all(torch.equal(master, before[name]) for name, master in masters(engine).items())
        while engine.update([data(2)], squared_error, ROWS).skipped:
            pass
        assert any(not torch.equal(master, before[name]) for name, master in masters(engine).items())


def resume(checkpoints: list[Path], shift: int) -> list[dict[str, Tensor]]:
    """Resume from each checkpoint in the tier `shift` after its own, save a checkpoint, and train."""
    torch.set_num_threads(1)
    results = []
    for number, folder in enumerate(checkpoints):
        engine = engine_of(CHECKPOINT_TIERS[(number + shift) % len(CHECKPOINT_TIERS)], seed=9, zero_stage=3)
        engine.start_averaging(0.7)
        engine.load(folder)
        engine.save(folder.with_name(f"again-{number}"))
        advance(engine, 3, STEPS)
        results.append(weights_and_averages(engine))
        assert all(torch.equal(full_weights(engine)[name], results[-1][name]) for name in full_weights(engine))
    return results


def weights_and_averages(engine: Engine) -> dict[str, Tensor]:
    last = full_weights(engine)
    with engine.averaged():
        return last | {f"average.{name}": mean for name, mean in full_weights(engine).items()}


def test_checkpoints_resume_in_any_tier_and_number_of_ranks(tmp_path: Path) -> None:
    first, again = ([tmp_path / f"{name}-{number}" for number in range(4)] for name in ("first", "again"))
    for folder, tier in zip(first, CHECKPOINT_TIERS, strict=True):
        engine = engine_of(tier)
        engine.start_averaging(0.7)
        advance(engine, 1, 2)
        engine.save(folder)
    advance(engine, 3, STEPS)
    through = weights_and_averages(engine)
    for results in [*run_ranks(resume, 2, first, 1), resume(again, 2)]:
        for actual in results:
            assert actual.keys() == through.keys()
            for name, tensor in through.items():
                torch.testing.assert_close(actual[name], tensor, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resumed_training_is_bit_exact(tmp_path: Path, dtype: str) -> None:
    for number, tier in enumerate(TIERS[:2]):
        engine = engine_of(tier, dtype=dtype)
        advance(engine, 1, 2)
        engine.save(tmp_path / str(number))
        advance(engine, 3, STEPS)
        again = engine_of(tier, dtype=dtype, seed=9)
        again.load(tmp_path / str(number))
        advance(again, 3, STEPS)
        for name, master in masters(engine).items():
            assert torch.equal(masters(again)[name], master)


@pytest.mark.parametrize("name", ["adamw", "onebitadam"])
def test_a_tier_without_states_yet_resumes_in_optimizers_that_begin_with_states(tmp_path: Path, name: str) -> None:
    """A parameter without a gradient has no states in a tier."""
    states = "bf16" if name == "adamw" else "fp32"
    config = EngineConfig(dtype="bf16", states=states)  # type: ignore[arg-type]
    for step in (0, 1):
        saved = engine_of(TIERS[0], dtype="bf16")
        advance(saved, 1, step)
        saved.save(tmp_path / str(step))
        engine, again = (Engine(net(9), config, optimizer=OptimizerConfig(lr=0.02, name=name)) for _ in range(2))
        advance(engine, 1, 2)
        for each in (engine, again):
            each.load(tmp_path / str(step))
            advance(each, step + 1, STEPS)
        assert all(torch.equal(full_weights(engine)[name], weight) for name, weight in full_weights(again).items())
