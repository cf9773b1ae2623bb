"""Pipelines with dropout and in fp16: masks that come back, and a loss scale that all pieces agree on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig, initialize
from engine.checkpoint import random_state, restore_random_state
from engine.config import LossScale
from engine.parallel import dist
from tests.engine.parallel.test_pipeline import COUNT, SGD, batches, loss_of, made, weights
from tests.ranks import run_ranks

STEPS = 3


def with_dropout(**layout: Any) -> Engine:
    torch.manual_seed(11)
    model = made("opt", dropout=0.3)
    torch.manual_seed(100 + dist.world().rank)
    return initialize(model, EngineConfig(**({"dtype": "fp32"} | layout)), optimizer=SGD)


def curve(engine: Engine, first: int = 0) -> list[tuple[float, float]]:
    updates = [engine.update(batches(step), loss_of, COUNT) for step in range(first, STEPS)]
    return [(update.loss, update.grad_norm) for update in updates]


def by_shape(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout with masks that go with the shape alone, so that any number of processes draws the same."""
    if not training or p == 0.0:
        return x
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(sum(x.shape))) >= p
    return x * kept / (1 - p)


def alike(pieces: int) -> dict[str, Any]:
    before, nn.functional.dropout = nn.functional.dropout, by_shape
    try:
        engine = with_dropout(pipeline_parallel=pieces)
        return {"curve": curve(engine), "weights": weights(engine)}
    finally:
        nn.functional.dropout = before


def drawn(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"alike": alike(2)}
    ways: list[dict[str, Any]] = [{}, {"pipeline_schedule": "gpipe"}, {"activation_checkpointing": True}]
    found["ways"] = [curve(with_dropout(pipeline_parallel=2, **way)) for way in ways]
    engine = with_dropout(pipeline_parallel=2)
    engine.update(batches(0), loss_of, COUNT)
    engine.save(folder / "one")
    random = random_state()  # as a stage keeps it, of each rank
    curve(engine, 1)
    again = with_dropout(pipeline_parallel=2)
    again.load(folder / "one")
    restore_random_state(random)
    curve(again, 1)
    found["left alone"], found["resumed"] = weights(engine), weights(again)
    none = with_dropout(pipeline_parallel=2)
    none.module.eval()
    found["without"] = curve(none)
    return found


def test_dropout(tmp_path: Path) -> None:
    alone = alike(1)
    for found in run_ranks(drawn, 2, tmp_path):
        for mine, wanted in zip(found["alike"]["curve"], alone["curve"], strict=True):
            assert mine == pytest.approx(wanted, rel=1e-5)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(found["alike"]["weights"][name], weight, atol=1e-5, rtol=1e-5, msg=name)
        in_turn, others = found["ways"][0], found["ways"][1:]
        for other in others:
            assert [each[0] for each in other] == pytest.approx([each[0] for each in in_turn], rel=1e-5)
        # A single loss may come out alike by chance: of masks, which another PyTorch draws otherwise.
        apart = [abs(one - other) for one, other in zip(sum(in_turn, ()), sum(found["without"], ()), strict=True)]
        assert max(apart) > 1e-3, "nothing was dropped"
        for name, weight in found["left alone"].items():
            assert torch.equal(found["resumed"][name], weight), name


def overflowing(engine: Engine, path: str, at: int) -> list[int]:
    """The gradient of what the module at `path` puts out overflows in one step; the box says which step it is."""
    steps = [0]

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        if out.requires_grad and steps[0] == at:
            out.register_hook(lambda gradient: gradient * torch.inf)

    engine.module.get_submodule(path).register_forward_hook(watch)
    return steps


def halves(pieces: int) -> list[dict[str, Any]]:
    """fp16: a scale that is too large at first; then an overflow on one piece alone."""
    torch.set_num_threads(1)
    found = []
    for path in (None, "model.embed_tokens", "model.norm"):
        power = 24 if path is None else 12
        config = EngineConfig(
            dtype="fp16", pipeline_parallel=pieces, loss_scale=LossScale(initial_power=power, hysteresis=1, window=2)
        )
        engine = initialize(made("llama"), config, optimizer=SGD)
        steps = [0] if path is None else overflowing(engine, path, at=1)
        told = []
        for step in range(12 if path is None else 4):
            update = engine.update(batches(step), loss_of, COUNT)
            steps[0] += 1
            told.append((update.loss, update.skipped, engine.scaler.scale))
        found.append({"told": told, "weights": weights(engine), "skipped": engine.scaler.skipped})
    return found


def test_half_precision() -> None:
    alone = halves(1)
    assert 0 < alone[0]["skipped"] < 11 and alone[1]["skipped"] == alone[2]["skipped"] == 1
    for ranks in run_ranks(halves, 2, 2):
        for mine, wanted in zip(ranks, alone, strict=True):
            for (loss, skipped, scale), (its_loss, its_skipped, its_scale) in zip(
                mine["told"], wanted["told"], strict=True
            ):
                assert (skipped, scale) == (its_skipped, its_scale)
                assert loss == pytest.approx(its_loss, rel=2e-3)
            for name, weight in wanted["weights"].items():
                torch.testing.assert_close(mine["weights"][name], weight, atol=5e-3, rtol=5e-3, msg=name)
