"""Checkpoints of other models, optimizers and precisions are loaded if they fit, or refused before any change."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.config import LossScale, Precision, Tier
from tests.engine.test_checkpoint import (
    OPTIMIZER,
    WIDTH,
    Net,
    advance,
    assert_equal,
    engine_of,
    save_and_wait,
    state_of,
)

ADAMW, LION, NADAM = (OptimizerConfig(lr=0.1, name=name) for name in ("adamw", "lion", "nadam"))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False))


def sequence(out: int = WIDTH, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, out, bias=bias))


OTHERS: dict[str, tuple[Callable[[], nn.Module], OptimizerConfig, str]] = {
    "names": (lambda: nn.Linear(WIDTH, WIDTH), ADAMW, r"parameter.weight is absent there and \(6, 6\) here"),
    "shapes": (lambda: sequence(2), ADAMW, r"parameter.0.weight is \(6, 6\) there and \(2, 6\) here"),
    "fewer": (lambda: sequence(bias=False), ADAMW, r"parameter.0.bias is \(6,\) there and absent here"),
    "buffers": (normed, ADAMW, r"buffer.1.running_mean is absent there and \(6,\) here"),
    "optimizer": (sequence, LION, "its optimizer has the states exp_avg, exp_avg_sq, step; lion has exp_avg$"),
    "numbers": (sequence, NADAM, "nadam has .*mu_product"),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(other: str, tier: Tier, tmp_path: Path) -> None:
    config = EngineConfig(dtype="fp32", offload_optimizer=tier)
    saved = Engine(sequence(), config, optimizer=ADAMW)
    advance(saved, 1, 1)
    saved.save(tmp_path / "saved")
    make, optimizer, output = OTHERS[other]
    engine = Engine(make(), config, optimizer=optimizer)
    before = state_of(engine)
    with pytest.raises(ValueError, match=output):
        engine.load(tmp_path / "saved")
    assert_equal(state_of(engine), before)


def test_only_a_checkpoint_of_step_0_may_have_no_optimizer_states(tmp_path: Path) -> None:
    config, sgd = EngineConfig(dtype="fp32"), OptimizerConfig(lr=0.1, name="sgd")
    saved, engine = (Engine(sequence(), config, optimizer=optimizer) for optimizer in (sgd, ADAMW))
    saved.save(tmp_path / "start")
    engine.load(tmp_path / "start")
    assert_equal(state_of(engine), state_of(saved))
    advance(saved, 1, 1)
    saved.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="the states none; adamw has exp_avg, exp_avg_sq, step"):
        engine.load(tmp_path / "saved")


def test_a_checkpoint_of_other_engines_or_without_an_average_is_refused(tmp_path: Path) -> None:
    save_and_wait(engine_of(0), tmp_path / "net")
    with pytest.raises(ValueError, match="is a checkpoint of net, and has no engine"):
        engine_of(0).load(tmp_path / "net")
    Engine(Net(), EngineConfig(dtype="fp32"), optimizer=OPTIMIZER).save(tmp_path / "plain")
    with pytest.raises(ValueError, match="has no average of the weights"):
        engine_of(0).load(tmp_path / "plain")


def test_only_engines_with_dynamic_scale_load_the_loss_scale(tmp_path: Path) -> None:
    """An engine in another precision, or with a fixed scale, uses its own scale."""
    sixteen = engine_of(0, dtype="fp16")
    sixteen.scaler.scale, sixteen.scaler.skipped = 512.0, 3
    sixteen.save(tmp_path / "fp16")
    engine_of(0, dtype="bf16").save(tmp_path / "bf16")
    fixed = LossScale(static=8.0)
    cases: list[tuple[str, Precision, LossScale | None, float]] = [
        ("fp16", "fp16", None, 512.0), ("fp16", "bf16", None, 1.0), ("fp16", "fp16", fixed, 8.0),
        ("bf16", "fp16", None, 2.0**16), ("bf16", "fp16", fixed, 8.0),
    ]  # fmt: skip
    for folder, dtype, setting, scale in cases:
        engine = engine_of(0, dtype=dtype, loss_scale=setting)
        engine.load(tmp_path / folder)
        assert engine.scaler.scale == scale, (folder, dtype, setting)
        assert engine.scaler.skipped == (3 if folder == "fp16" else 0)
