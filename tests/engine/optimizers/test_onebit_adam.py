"""1-bit Adam against Algorithm 1 of the paper in plain Python, and against Adam on a small regression."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, OptimizerConfig
from engine.engine import Engine
from engine.optimizers.onebit_adam import pack, scale_of, unpack
from engine.parallel import dist, dtensors
from engine.parallel.collectives import SentBytes
from tests.engine.parallel.test_comm_hooks import NUMBERS, ROWS, WIDTH, Net, squared_error
from tests.ranks import run_ranks

STEPS, FREEZE, LR, BETAS, EPS = 12, 5, 0.01, (0.9, 0.99), 1e-8


def test_signs_survive_packing_and_the_scale_keeps_the_norm() -> None:
    values = torch.tensor([[0.0, -1.0, 2.0, -3.0, 1e-9, -0.0, 5.0, -6.0], [1.0] * 8])
    signs = unpack(pack(values))
    assert signs.tolist() == [[1, -1, 1, -1, 1, 1, 1, -1], [1] * 8]
    scaled = signs[0] * scale_of(values[0], 8)
    assert scaled.norm() == pytest.approx(values[0].norm().item())


def gradient(rank: int, step: int, size: int) -> torch.Tensor:
    """Return a gradient whose second number is zero during the warm-up, so that its variance is zero."""
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)
    drawn[1] *= step > FREEZE
    return drawn


def reference(size: int, ranks: int) -> list[float]:
    """Run Algorithm 1 for one vector in float64, with Adam's bias correction of the momentum."""
    part = -(-size // (8 * ranks)) * 8
    weights, momentum, variance = [1.0] * size, [0.0] * size, [0.0] * size
    worker = [[0.0] * size for _ in range(ranks)]
    server = [0.0] * size

    def compress(values: list[float]) -> list[float]:
        scale = math.sqrt(sum(v * v for v in values) / max(len(values), 1))
        return [scale if v >= 0 else -scale for v in values]

    for step in range(1, STEPS + 1):
        gradients = [gradient(rank, step, size).tolist() for rank in range(ranks)]
        if step <= FREEZE:
            mean = [sum(g[i] for g in gradients) / ranks for i in range(size)]
            momentum = [BETAS[0] * m + (1 - BETAS[0]) * g for m, g in zip(momentum, mean, strict=True)]
            variance = [BETAS[1] * v + (1 - BETAS[1]) * g * g for v, g in zip(variance, mean, strict=True)]
        else:
            sent = []
            for rank in range(ranks):
                own = [BETAS[0] * m + (1 - BETAS[0]) * g + e
                       for m, g, e in zip(momentum, gradients[rank], worker[rank], strict=True)]  # fmt: skip
                sent.append(compress(own))
                worker[rank] = [a - b for a, b in zip(own, sent[rank], strict=True)]
            averaged = [sum(c[i] for c in sent) / ranks + server[i] for i in range(size)]
            momentum = [m for r in range(ranks) for m in compress(averaged[r * part : (r + 1) * part])]
            server = [a - m for a, m in zip(averaged, momentum, strict=True)]
        for i in (i for i in range(size) if variance[i]):
            root = math.sqrt(variance[i] / (1 - BETAS[1] ** min(step, FREEZE))) + EPS
            weights[i] -= LR * momentum[i] / (1 - BETAS[0] ** step) / root
    return weights


def optimize(size: int) -> list[float]:
    config = OptimizerConfig(
        lr=LR, betas=BETAS, eps=EPS, max_grad_norm=0.0, name="OneBitAdam", options={"freeze_step": FREEZE}
    )
    module = torch.nn.Linear(size, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    engine = Engine(module, EngineConfig(dtype="fp32"), optimizer=config)
    for step in range(1, STEPS + 1):
        slope = gradient(dist.world().rank, step, size).float()
        engine.backward(engine(slope[None]).mean())
        engine.step()
    return dtensors.local(module.weight.detach()).view(-1).tolist()


SIZES = (3, 40)


def on_a_rank(folder: str) -> tuple[list[list[float]], list[tuple[list[float], torch.Tensor, SentBytes]]]:
    return [optimize(size) for size in SIZES], train_both(folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onebit") / "kept"


@pytest.fixture(scope="module")
def found(kept: Path) -> list[tuple[list[list[float]], list[tuple[list[float], torch.Tensor, SentBytes]]]]:
    return run_ranks(on_a_rank, 2, str(kept))


@pytest.mark.parametrize("which", range(len(SIZES)))
def test_two_ranks_equal_the_papers_algorithm(found: Any, which: int) -> None:
    first, second = (optimized[which] for optimized, _ in found)
    assert first == second == pytest.approx(reference(SIZES[which], 2), rel=1e-5)


def test_before_the_freeze_step_it_equals_adam() -> None:
    config = OptimizerConfig(lr=LR, betas=BETAS, weight_decay=0.1, options={"freeze_step": 100}, name="onebitadam")
    plain = OptimizerConfig(lr=LR, betas=BETAS, weight_decay=0.1)
    one, other = (regression(c, 6, None)[1] for c in (config, plain))
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def regression(config: OptimizerConfig, steps: int, keep: str | None) -> tuple[list[float], torch.Tensor, SentBytes]:
    """Return losses, final weights and the bytes of the last step. With `keep`, a new engine resumes half way."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    engine = Engine(Net(), EngineConfig(dtype="fp32"), optimizer=config)
    generator = torch.Generator().manual_seed(5)
    goal = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    world, losses = dist.world(), []
    for step in range(steps):
        if keep is not None and step == steps // 2:
            engine.save(keep)
            engine = Engine(Net(), EngineConfig(dtype="fp32"), optimizer=config)
            engine.load(keep)
        x = torch.randn(ROWS, WIDTH, generator=generator)[world.rank :: world.size]
        update = engine.update([(x, x @ goal)], squared_error, ROWS * WIDTH)
        losses.append(update.loss)
    weights = torch.cat([dtensors.local(p.detach()).flatten() for p in engine.module.parameters()])
    return losses, weights, update.sent


def train_both(folder: str) -> list[tuple[list[float], torch.Tensor, SentBytes]]:
    adam = OptimizerConfig(lr=0.01, betas=BETAS, max_grad_norm=1.0)
    one_bit = OptimizerConfig(lr=0.01, betas=BETAS, max_grad_norm=1.0, name="onebitadam", options={"freeze_step": 8})
    return [regression(adam, 28, None), regression(one_bit, 28, None), regression(one_bit, 28, folder)]


def test_it_trains_like_adam_with_a_thirtieth_of_the_bytes(found: Any, kept: Path) -> None:
    ranks = [beside for _, beside in found]
    (adam, _, full), (one_bit, weights, little), (_, resumed, _) = ranks[0]
    assert torch.equal(weights, ranks[1][1][1]), "the ranks' weights differ"
    assert torch.equal(weights, resumed), "the resumed run differs"
    assert one_bit[:8] == pytest.approx(adam[:8], rel=1e-4)
    assert one_bit[-1] == pytest.approx(adam[-1], rel=0.25)
    assert adam[-1] < 0.2 * adam[0]
    assert full.reduce == 4 * NUMBERS
    assert little.reduce < 1.1 * NUMBERS / 8
    assert full.reduce / little.reduce > 28
    config = OptimizerConfig(lr=LR, name="onebitadam", options={"freeze_step": 8})
    single = Engine(Net(), EngineConfig(dtype="fp32"), optimizer=config)
    single.load(kept)  # with another number of ranks
    assert single.step_count == 14


def test_unsupported_layouts_are_refused() -> None:
    config = OptimizerConfig(lr=LR, name="onebitadam")
    with pytest.raises(ValueError, match="zero_stage=0"):
        Engine(Net(), EngineConfig(zero_stage=2), optimizer=config)
