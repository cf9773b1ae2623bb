"""Stochastic rounding is unbiased, and AdamW with bf16 states trains where rounding to nearest stalls."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig
from engine.engine import Engine
from engine.optimizer_step import average_weight
from engine.optimizers.bf16_adamw import BFloat16AdamW, round_stochastically
from engine.parallel import dist, dtensors
from tests.ranks import run_ranks

ADAM = OptimizerConfig(lr=1e-4, betas=(0.9, 0.99), max_grad_norm=0.0)


def test_values_go_to_a_neighbour_and_keep_their_mean() -> None:
    generator = torch.Generator().manual_seed(1)
    for value in (1.001, -1.001, 3.14159, 1e-20, 1e30):
        exact = torch.full((40000,), value)
        actual = round_stochastically(exact, generator).double()
        low, high = actual.min().item(), actual.max().item()
        step = abs(value) * 2.0**-7
        assert low <= exact[0].item() <= high and high - low <= step
        # The mean of n draws from two neighbours is within 5 standard errors; one is at most step / 2 / sqrt(n).
        assert abs(actual.mean().item() - exact[0].item()) < 5 * step / 2 / 200


def test_bf16_values_and_non_finite_values_are_unchanged() -> None:
    held = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan")])
    actual = round_stochastically(held, torch.Generator().manual_seed(2)).float()
    assert torch.equal(actual[:-1], held[:-1]) and actual[-1].isnan()


def distance(kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> float:
    """Return the distance of a weight of 1 from 1.2 after 400 steps that are below half the bf16 spacing at 1."""
    weight = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = kind([weight], lr=5e-4, weight_decay=0.0)  # type: ignore[call-arg]
    for _ in range(400):
        weight.grad = (weight.detach().float() - 1.2).to(dtype)
        optimizer.step()
    return (weight.float().mean() - 1.2).abs().item()


def test_it_trains_where_rounding_to_nearest_stalls() -> None:
    assert distance(torch.optim.AdamW, torch.bfloat16) == pytest.approx(0.2, abs=0.001)
    exact = distance(torch.optim.AdamW, torch.float32)
    assert exact < 0.06
    assert distance(BFloat16AdamW, torch.bfloat16) == pytest.approx(exact, abs=0.02)


def test_states_and_weights_are_those_of_adamw() -> None:
    """Each of three steps rounds a value to a neighbour in bf16, whose spacing is at most 1/128 of the value."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(1000, generator=generator).bfloat16()
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizer = BFloat16AdamW([ours], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    exact = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(3):
        ours.grad = torch.randn(1000, generator=generator).bfloat16()
        theirs.grad = ours.grad.float()
        optimizer.step()
        exact.step()
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            optimizer.state[ours][name].float(), exact.state[theirs][name], atol=4e-3, rtol=3 / 128
        )
    torch.testing.assert_close(ours.detach().float(), theirs.detach(), atol=4e-3, rtol=3 / 128)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squared_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float | Tensor]]:
    return (module(batch[0]).float() - batch[1]).square().sum(), {}


def weights_after(stage: int, keep: str | None) -> Tensor:
    """Return the weights after eight updates. With `keep`, a new engine resumes from a checkpoint after four."""
    torch.set_num_threads(1)
    layout = EngineConfig(zero_stage=stage, states="bf16")
    engine = Engine(Net(), layout, optimizer=ADAM)
    generator = torch.Generator().manual_seed(8)
    for step in range(8):
        if keep is not None and step == 4:
            engine.save(keep)
            engine = Engine(Net(), layout, optimizer=ADAM)
            engine.load(keep)
        x = torch.randn(8, 16, generator=generator)[dist.world().rank :: dist.world().size]
        engine.update([(x, x.flip(1))], squared_error, 128)
    assert all(p.dtype == torch.bfloat16 for p in engine.module.parameters())
    return torch.cat([dtensors.full_tensor(p.detach()).flatten().float() for p in engine.module.parameters()])


def on_each_rank(folder: str) -> list[Tensor]:
    return [weights_after(0, None), weights_after(3, None), weights_after(3, folder)]


def test_ranks_agree_and_resumed_runs_are_equal(tmp_path: Path) -> None:
    (replicated, sharded, resumed), others = run_ranks(on_each_rank, 2, str(tmp_path / "kept"))
    for mine, other in zip((replicated, sharded, resumed), others, strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(sharded, resumed)


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype=bf16"):
        EngineConfig(states="bf16", dtype="fp32")
    with pytest.raises(ValueError, match="adamw"):
        Engine(Net(), EngineConfig(states="bf16"), optimizer=OptimizerConfig(lr=0.1, name="sgd"))


def test_the_average_of_bf16_parameters_is_fp32() -> None:
    """A bf16 average would lose every change below 1/512 of a weight."""
    engine = Engine(Net(), EngineConfig(states="bf16"), optimizer=ADAM)
    engine.start_averaging(0.99)
    x = torch.ones(2, 16, dtype=torch.bfloat16, device=dist.world().device)
    mean = torch.zeros(())
    for step in range(1, 101):
        engine.update([x], lambda module, rows: (module(rows).float().sum(), {}), 1.0)
        weight = engine.module.get_parameter("blocks.0.weight")
        live = dtensors.local(weight.detach()).float()
        mean = mean + average_weight(0.99, step) * (live - mean)
    for _ in range(2):
        torch.testing.assert_close(dtensors.local(engine.average.tensors["blocks.0.weight"]), mean)
        assert torch.equal(dtensors.local(engine.module.get_parameter("blocks.0.weight").detach()).float(), live)
        with engine.averaged():
            shown = dtensors.local(engine.module.get_parameter("blocks.0.weight").detach())
            torch.testing.assert_close(shown, mean.bfloat16())
