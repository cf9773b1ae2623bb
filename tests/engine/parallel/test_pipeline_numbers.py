"""Pipelines with dropout, whose masks are restored by a resume, and in fp16, with one loss scale for all stages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import Engine, EngineConfig, initialize
from engine.checkpoint import random_state, restore_random_state
from engine.config import LossScale
from engine.parallel import dist
from tests.engine.parallel.test_pipeline import COUNT, SGD, build_model, full_weights, loss_of, make_batches
from tests.ranks import run_ranks

STEPS = 2


def make_dropout_engine(**layout: Any) -> Engine:
    torch.manual_seed(11)
    model = build_model("opt", dropout=0.3)
    torch.manual_seed(100 + dist.world().rank)
    return initialize(model, EngineConfig(**({"dtype": "fp32"} | layout)), optimizer=SGD)


def loss_curve(engine: Engine, first: int = 0) -> list[tuple[float, float]]:
    updates = [engine.update(make_batches(step), loss_of, COUNT) for step in range(first, STEPS)]
    return [(update.loss, update.grad_norm) for update in updates]


def dropout_by_shape(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply dropout with a mask that depends on the shape only, so that any number of ranks has equal masks."""
    if not training or p == 0.0:
        return x
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(sum(x.shape))) >= p
    return x * mask / (1 - p)


def train_with_equal_masks(stages: int) -> dict[str, Any]:
    before, nn.functional.dropout = nn.functional.dropout, dropout_by_shape
    try:
        engine = make_dropout_engine(pipeline_parallel=stages)
        return {"curve": loss_curve(engine), "weights": full_weights(engine)}
    finally:
        nn.functional.dropout = before


def run_with_dropout(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {"alike": train_with_equal_masks(2)}
    layouts: list[dict[str, Any]] = [{}, {"activation_checkpointing": True}]
    results["layouts"] = [loss_curve(make_dropout_engine(pipeline_parallel=2, **layout)) for layout in layouts]
    engine = make_dropout_engine(pipeline_parallel=2)
    engine.update(make_batches(0), loss_of, COUNT)
    engine.save(folder / "one")
    random = random_state()  # the state of each rank, as a stage saves it
    loss_curve(engine, 1)
    again = make_dropout_engine(pipeline_parallel=2)
    again.load(folder / "one")
    restore_random_state(random)
    loss_curve(again, 1)
    results["undisturbed"], results["resumed"] = full_weights(engine), full_weights(again)
    none = make_dropout_engine(pipeline_parallel=2)
    none.module.eval()
    results["without"] = loss_curve(none)
    return results


def test_dropout(tmp_path: Path) -> None:
    expected = train_with_equal_masks(1)
    for result in run_ranks(run_with_dropout, 2, tmp_path):
        for actual, reference in zip(result["alike"]["curve"], expected["curve"], strict=True):
            assert actual == pytest.approx(reference, rel=1e-5)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["alike"]["weights"][name], weight, atol=1e-5, rtol=1e-5, msg=name)
        in_turn, others = result["layouts"][0], result["layouts"][1:]
        for other in others:
            assert [each[0] for each in other] == pytest.approx([each[0] for each in in_turn], rel=1e-5)
        # A single loss may be equal by chance, because the masks depend on the version of PyTorch.
        separate = [abs(one - other) for one, other in zip(sum(in_turn, ()), sum(result["without"], ()), strict=True)]
        assert max(separate) > 1e-3, "nothing was dropped"
        for name, weight in result["undisturbed"].items():
            assert torch.equal(result["resumed"][name], weight), name


def overflow_once(engine: Engine, path: str, at: int) -> list[int]:
    """Make the gradient of a module's output overflow in step `at`. Return a list with the current step."""
    steps = [0]

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        if out.requires_grad and steps[0] == at:
            out.register_hook(lambda gradient: gradient * torch.inf)

    engine.module.get_submodule(path).register_forward_hook(watch)
    return steps


def train_in_fp16(stages: int) -> list[dict[str, Any]]:
    """Train in fp16: with a scale that is too large at first, then with an overflow on one stage only."""
    torch.set_num_threads(1)
    results = []
    for path in (None, "model.embed_tokens", "model.norm"):
        power = 19 if path is None else 12
        config = EngineConfig(
            dtype="fp16", pipeline_parallel=stages, loss_scale=LossScale(initial_power=power, hysteresis=1, window=2)
        )
        engine = initialize(build_model("llama"), config, optimizer=SGD)
        steps = [0] if path is None else overflow_once(engine, path, at=1)
        steps_taken = []
        for step in range(5 if path is None else 3):
            update = engine.update(make_batches(step), loss_of, COUNT)
            steps[0] += 1
            steps_taken.append((update.loss, update.skipped, engine.scaler.scale))
        results.append({"steps": steps_taken, "weights": full_weights(engine), "skipped": engine.scaler.skipped})
    return results


def test_half_precision() -> None:
    expected = train_in_fp16(1)
    assert 0 < expected[0]["skipped"] < 4 and expected[1]["skipped"] == expected[2]["skipped"] == 1
    for ranks in run_ranks(train_in_fp16, 2, 2):
        for actual, reference in zip(ranks, expected, strict=True):
            for (loss, skipped, scale), (its_loss, its_skipped, its_scale) in zip(
                actual["steps"], reference["steps"], strict=True
            ):
                assert (skipped, scale) == (its_skipped, its_scale)
                assert loss == pytest.approx(its_loss, rel=2e-3)
            for name, weight in reference["weights"].items():
                torch.testing.assert_close(actual["weights"][name], weight, atol=5e-3, rtol=5e-3, msg=name)
