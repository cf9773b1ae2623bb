"""The loss scale of fp16 step by step, and the precisions of computation and storage."""

import random

import pytest
import torch
from torch import nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.config import LossScale, Precision
from engine.optimizer_step import LossScaler
from engine.parallel import dist
from engine.sharding import precision_policy

T, F = True, False
STEPS: list[tuple[LossScale, list[tuple[bool, float]]]] = [  # (overflow, scale after the step)
    # Hysteresis 2: the first overflow changes nothing, the second halves, and only a doubling resets the count.
    (LossScale(initial_power=4, window=2), [(T, 16), (T, 8), (T, 4), (F, 4), (F, 4), (F, 8), (T, 8), (T, 4)]),
    # The scale doubles at a good step after a full window of good steps.
    (
        LossScale(initial_power=4, window=3, hysteresis=1),
        [*3 * [(F, 16.0)], (F, 32), (F, 32), (T, 16), (F, 16), (T, 8)],
    ),
    # With `refill`, each good step resets the count.
    (LossScale(initial_power=4, refill=True), [(T, 16), (F, 16), (T, 16), (T, 8)]),
]


@pytest.mark.parametrize(("config", "steps"), STEPS)
def test_loss_scale_by_the_table(config: LossScale, steps: list[tuple[bool, float]]) -> None:
    scaler = LossScaler(config, enabled=True)
    for overflow, scale in steps:
        scaler.update(overflow)
        assert scaler.scale == scale
    assert scaler.skipped == sum(overflow for overflow, _ in steps)


def test_overflow_at_the_smallest_scale_is_an_error_with_a_remedy() -> None:
    scaler = LossScaler(LossScale(initial_power=1, hysteresis=1), enabled=True)
    scaler.update(True)
    assert scaler.scale == 1.0
    with pytest.raises(FloatingPointError, match="dtype=bf16"):
        scaler.update(True)


def test_scaler_resumes_exactly() -> None:
    config = LossScale(initial_power=16, window=3)
    source = random.Random(3)
    overflows = [source.random() < 0.2 for _ in range(40)]
    through, first, second = (LossScaler(config, enabled=True) for _ in range(3))
    for overflow in overflows[:20]:
        through.update(overflow), first.update(overflow)
    second.restore(first.state())
    for overflow in overflows[20:]:
        through.update(overflow), second.update(overflow)
    assert second.state() == through.state()


def test_gradients_are_reduced_in_fp32() -> None:
    bf16, fp16 = precision_policy("bf16"), precision_policy("fp16")
    assert bf16.param_dtype == torch.bfloat16 and bf16.reduce_dtype == torch.float32
    assert fp16.param_dtype == torch.float16 and fp16.reduce_dtype == torch.float32
    assert precision_policy("fp32").param_dtype is None


class Buffered(nn.Module):
    """A block, and a buffer with values that bf16 cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("frequency", torch.tensor([1.0 + 2**-12]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_frozen_engines_store_their_precision_and_trained_ones_fp32(dtype: str) -> None:
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    still = Engine(Buffered(), EngineConfig(dtype=dtype))  # type: ignore[arg-type]
    learns = Engine(Buffered(), EngineConfig(dtype=dtype), optimizer=OptimizerConfig(lr=1.0, total_steps=1))  # type: ignore[arg-type]
    assert {p.dtype for p in still.module.parameters()} == {expected}
    assert {p.dtype for p in learns.module.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in still.module.parameters()) and not still.module.training
    x = torch.ones(2, 4, device=dist.world().device)
    assert still(x).dtype == learns(x).dtype == expected  # both cast the inputs
    for engine in (still, learns):  # buffers are not cast, because rotary frequencies in bf16 have errors of radians
        assert engine.module.get_buffer("frequency").item() == 1.0 + 2**-12


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("before", [torch.bfloat16, torch.float64])
def test_a_module_in_another_precision_gets_fp32_masters(before: torch.dtype, dtype: Precision, trained: bool) -> None:
    """With fp32, all parameters have fp32 masters. In 16 bits, frozen parameters have 16 bits."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(before)
    model[0].requires_grad_(trained)
    full = model[1].weight.detach().float()
    engine = Engine(model, EngineConfig(dtype=dtype), optimizer=OptimizerConfig(lr=1e-4, schedule="constant"))
    assert torch.equal(engine.module[1].weight.detach().cpu(), full)  # type: ignore[index, union-attr]
    for _ in range(2):
        engine.backward(engine(torch.ones(3, 4, device=engine.device)).float().sum())
        engine.step()
    for parameter in engine.module.parameters():
        short = dtype == "bf16" and not parameter.requires_grad
        assert parameter.dtype == (torch.bfloat16 if short else torch.float32)
    moved = engine.module[1].weight.detach().cpu() - full  # type: ignore[index, union-attr]
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 2e-4), atol=2e-6, rtol=0)  # too small for bf16
