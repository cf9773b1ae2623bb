"""Communication hooks: sent bytes against counts by hand, and training with 8-bit against bf16 communication."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig
from engine.config import Compress
from engine.engine import Engine
from engine.parallel import comm_hooks, dist, dtensors, meshes
from engine.parallel.collectives import SentBytes
from tests.ranks import run_ranks

WIDTH, BLOCKS, ROWS, STEPS = 48, 3, 16, 10
ROOT_NUMBERS, BLOCK_NUMBERS = WIDTH * WIDTH, WIDTH * WIDTH + 3 * WIDTH
NUMBERS = ROOT_NUMBERS + BLOCKS * BLOCK_NUMBERS


class Net(nn.Module):
    """Residual blocks in a ModuleList, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def squared_error(module: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, float | Tensor]]:
    return (module(batch[0]).float() - batch[1]).square().sum(), {}


def train(stage: int, dtype: str, compress: Compress, steps: int) -> tuple[list[float], SentBytes, Tensor]:
    """Train a regression. Return the losses, the bytes that the last step sent, and all final weights as one vector."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = EngineConfig(zero_stage=stage, dtype=dtype, compress=compress)  # type: ignore[arg-type]
    engine = Engine(Net(), config, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0, max_grad_norm=0.0))
    generator = torch.Generator().manual_seed(5)
    goal = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    world, losses = dist.world(), []
    for _ in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=generator)[world.rank :: world.size]
        update = engine.update([(x, x @ goal)], squared_error, ROWS * WIDTH)
        losses.append(update.loss)
    weights = [dtensors.full_tensor(p.detach()).flatten() for p in engine.module.parameters()]
    return losses, update.sent, torch.cat(weights)


@dataclass(frozen=True)
class Results:
    """The results of one of two ranks."""

    sent: list[SentBytes]
    compressed: list[tuple[list[float], SentBytes, Tensor]]
    exchanged: tuple[Tensor, Tensor]
    poisoned: tuple[list[bool], bool]


def on_a_rank() -> Results:
    return Results(sent_at_each_stage(), compressed(), exchanged(), poisoned())


@pytest.fixture(scope="module")
def found() -> list[Results]:
    return run_ranks(on_a_rank, 2)


def sent_at_each_stage() -> list[SentBytes]:
    return [train(stage, dtype, "none", 2)[1] for stage, dtype in ((0, "fp32"), (2, "fp32"), (2, "bf16"), (3, "bf16"))]


def test_sent_bytes_equal_counts_by_hand(found: list[Results]) -> None:
    for stage0, fp32, bf16, stage3 in (rank.sent for rank in found):
        half = NUMBERS // 2  # a rank's shard, which it also sends to the other rank
        assert stage0.gather == 0 and stage0.reduce == 2 * 4 * half  # reduce-scatter and all-gather
        assert (fp32.gather, fp32.reduce) == (4 * half, 4 * half)
        assert (bf16.gather, bf16.reduce) == (2 * half, 2 * half)
        assert stage3.gather == 2 * bf16.gather - ROOT_NUMBERS  # in forward and backward; the root is gathered once
        assert stage3.reduce == bf16.reduce
        assert 0 < fp32.other < 100  # the loss, and the norm


def compressed() -> list[tuple[list[float], SentBytes, Tensor]]:
    kinds: tuple[Compress, ...] = ("none", "gather8", "reduce8", "both")
    return [train(2, "bf16", compress, STEPS) for compress in kinds]


def test_eight_bits_halve_the_bytes_and_train_like_bf16(found: list[Results]) -> None:
    ranks = [rank.compressed for rank in found]
    row = encoded_size(ROOT_NUMBERS // 2) + BLOCKS * encoded_size(BLOCK_NUMBERS // 2)
    (plain, before, _), *others = ranks[0]
    assert before.gather / row > 1.85  # 5 blocks for a shard of 1,152 or 1,224 values
    for (losses, sent, _), (gather, reduce) in zip(others, ((row, NUMBERS), (NUMBERS, row), (row, row)), strict=True):
        assert (sent.gather, sent.reduce) == (gather, reduce)
        assert losses != plain
        assert losses == pytest.approx(plain, rel=0.03)
    assert plain[-1] < 0.5 * plain[0]
    for first, second in zip(*ranks, strict=True):
        assert torch.equal(first[2], second[2])


def exchanged() -> tuple[Tensor, Tensor]:
    """Return the mean of two ranks' bf16 gradients by the exchange, and the gradient of this rank."""
    rank, numbers = dist.world().rank, 1000
    mine = torch.randn(2 * numbers, generator=torch.Generator().manual_seed(rank)).bfloat16()
    exchange, cpu = comm_hooks.Exchange(2), torch.device("cpu")
    given = exchange.allocate((2 * numbers,), dtype=torch.bfloat16, device=cpu).copy_(mine)
    out = exchange.allocate((numbers,), dtype=torch.bfloat16, device=cpu)
    exchange(out, given, meshes.zero_mesh(stage=3).get_group("shard"), torch.distributed.ReduceOp.AVG)
    return out, mine


def test_bf16_gradients_are_exchanged_without_loss(found: list[Results]) -> None:
    (first, mine), (second, theirs) = (rank.exchanged for rank in found)
    assert first.dtype == torch.float32
    assert torch.equal(torch.cat([first, second]), (mine.float() + theirs.float()) / 2)


def test_non_finite_gradients_are_detected_with_eight_bits(found: list[Results]) -> None:
    for skipped, equal in (rank.poisoned for rank in found):
        assert skipped == [True, False] and equal


def poisoned() -> tuple[list[bool], bool]:
    """Run two updates, the first with an infinite loss on rank 1. Return whether it left the weights unchanged."""
    config = EngineConfig(zero_stage=2, dtype="bf16", compress="both")
    engine = Engine(Net(), config, optimizer=OptimizerConfig(lr=0.01))
    skipped, x = [], torch.ones(2, WIDTH)
    before = [dtensors.local(p.detach()).clone() for p in engine.module.parameters()]
    for worst in (float("inf"), 1.0):
        y = x * (worst if dist.world().rank == 1 else 1.0)
        skipped.append(engine.update([(x, y)], squared_error, 4).skipped)
        if len(skipped) == 1:
            after = [dtensors.local(p) for p in engine.module.parameters()]
            equal = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert engine.scaler.skipped == 1
    return skipped, equal


def encoded_size(count: int) -> int:
    """Return the bytes of `count` values: for each block, 4 for its scale and one for each of its values."""
    return (4 + comm_hooks.BLOCK) * -(-count // comm_hooks.BLOCK)


def round_trip(values: Tensor) -> Tensor:
    row = comm_hooks.encode(values)
    assert len(row) == encoded_size(len(values))
    return comm_hooks.decode(row, len(values))


@pytest.mark.parametrize("count", [1, 255, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_error_is_at_most_half_a_step_of_its_block(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    scales = 10.0 ** torch.randint(-6, 6, (-(-count // comm_hooks.BLOCK),), generator=generator)
    values = torch.randn(count, generator=generator) * scales.repeat_interleave(comm_hooks.BLOCK)[:count]
    values = values.to(dtype)
    error = (round_trip(values).double() - values.double()).abs()
    for block, errors in zip(values.double().split(comm_hooks.BLOCK), error.split(comm_hooks.BLOCK), strict=True):
        largest = block.abs().max()
        assert errors.max() <= largest / 127 / 2 + largest * 2.0**-22


def test_int8_is_exact_for_zeros_and_the_largest_value() -> None:
    values = torch.zeros(512)
    values[300] = -3.0
    assert torch.equal(round_trip(values), values)
    assert encoded_size(256 * 100) == 256 * 100 + 4 * 100 and encoded_size(1) == 260


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_int8_keeps_non_finite_values_in_their_block(bad: float) -> None:
    values = torch.ones(3 * comm_hooks.BLOCK)
    values[comm_hooks.BLOCK + 7] = bad
    first, second, third = round_trip(values).split(comm_hooks.BLOCK)
    assert not torch.isfinite(second).all()
    assert torch.equal(first, torch.ones(comm_hooks.BLOCK)) and torch.equal(third, torch.ones(comm_hooks.BLOCK))


def test_compression_needs_shards() -> None:
    with pytest.raises(ValueError, match="zero_stage=1, 2 or 3"):
        EngineConfig(compress="gather8")
