"""Scoring and learning from one forward: the numbers of two, however many ranks share, and whatever fails."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.parallel import dist, dtensors
from tests.engine.healing.test_healer import STEPS, WAYS, Block, Failing, Rows, batches, engine_of, loss, same
from tests.ranks import run_ranks


def rows_of(module: nn.Module, rows: Rows) -> list[Tensor]:
    scores = module(rows.x).square().sum(1)
    return list(scores) if rows.counted else []


def trained(stage: int, sizes: list[int], *, shares: bool, **others: Any) -> dict[str, Any]:
    """Each step scores its rows and learns from them; `shares` by one forward."""
    engine = engine_of(stage, **others)
    torch.manual_seed(5 + dist.world().rank)
    scores, updates, apart = list[float](), [], 0
    for step in range(STEPS):
        share = batches(step, sizes)
        found = engine.score_to_learn(share, rows_of) if shares else None
        if found is None:
            apart += 1
            found = engine.score(share, rows_of)
        scores += [score.item() for rows in found for score in rows]
        assert not any(score.requires_grad for rows in found for score in rows)
        updates.append(engine.update(share, loss, 16.0))
    weights = {name: dtensors.full_tensor(p.detach()).clone() for name, p in engine.module.named_parameters()}
    left = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return {
        "weights": weights, "losses": [u.loss for u in updates], "norms": [u.grad_norm for u in updates],
        "rows": [u.sums["rows"] for u in updates], "left": len(left), "scores": scores, "apart": apart,
        "seen": engine.module.seen.item(), "random": torch.rand(1).item(), "reduced": updates[-1].sent.reduce,
    }  # fmt: skip


def check(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    same(found, wanted, tolerance)
    assert found["scores"] == pytest.approx(wanted["scores"], rel=max(tolerance, 1e-6))
    assert found["seen"] == wanted["seen"] and found["random"] == wanted["random"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [[16], [7, 6, 2, 1]])
def test_one_rank(sizes: list[int], dtype: str) -> None:
    """The module's own count of what it saw in training says that one forward was made."""
    wanted = trained(2, sizes, shares=False, dtype=dtype)
    found = trained(2, sizes, shares=True, dtype=dtype)
    check(found, wanted, 0.0)
    assert found["apart"] == 0 and found["seen"] == 16 * STEPS and wanted["apart"] == STEPS


def test_where_memory_runs_out_the_two_are_done_apart(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [7, 6, 2, 1]
    wanted = trained(0, sizes, shares=False)
    for where, call in WAYS:
        with Failing(where, 5, call=call):
            healed = trained(0, sizes, shares=True)
        check(healed, wanted, 1e-5)
        assert healed["apart"] == STEPS - (where != "forward")
        assert capsys.readouterr().out.count("kept from scoring to learning") == 1


def test_a_backward_that_is_done_again_has_the_dropout_that_was_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, left = [4, 4, 4, 4], [5]

    def fails_once(where: str, _: int) -> bool:
        left[0] -= where == "backward"
        return where == "backward" and left[0] == 0

    planned, bare = trained(0, sizes, shares=True, drop=0.5), trained(0, sizes, shares=True)
    monkeypatch.setattr(Block, "fails", staticmethod(fails_once))
    healed = trained(0, sizes, shares=True, drop=0.5)
    assert (planned["apart"], healed["apart"]) == (0, STEPS - 1)
    assert healed["losses"][0] == planned["losses"][0] != bare["losses"][0]
    assert healed["seen"] == planned["seen"]


def on_two_ranks() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    torch.set_num_threads(1)
    gc.freeze()
    found = []
    for stage in range(4):
        for sizes in ([8], [3, 3, 1, 1]):
            wanted = trained(stage, sizes, shares=False)
            shared = trained(stage, sizes, shares=True)
            assert shared["reduced"] == wanted["reduced"] > 0  # once a step, or once a micro-batch
            found.append((f"stage {stage} {sizes}", shared, wanted))
            where, call = WAYS[(stage + len(sizes)) % len(WAYS)]
            with Failing(where, 2, call=call, ranks=(stage % 2,)):
                healed = trained(stage, sizes, shares=True)
            assert healed["apart"] == STEPS - (where != "forward")
            found.append((f"stage {stage} {sizes} {where} {call}", healed, wanted))
    return found


def test_two_ranks() -> None:
    for found in run_ranks(on_two_ranks, 2):
        for name, got, wanted in found:
            print(name)
            check(got, wanted, 1e-5)


def test_what_else_is_done_lets_go_of_forwards() -> None:
    """Scoring in between, other micro-batches: the update makes its own forwards, of the parameters as they are."""
    wanted, engine = trained(0, [16], shares=False, dtype="bf16"), engine_of(0, dtype="bf16")
    losses, forwards = [], list[bool]()
    engine.module.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    for step in range(STEPS):
        share = batches(step, [16])
        assert engine.score_to_learn(batches(9, [16]) if step == 1 else share, rows_of) is not None
        if step == 0:
            engine.score(share, rows_of)
        elif step == 2:
            assert engine.score_to_learn(share, rows_of) is not None
        losses.append(engine.update(share, loss, 16.0).loss)
    assert losses == wanted["losses"] and engine.module.seen.item() == wanted["seen"]
    assert forwards == [True, False, True, True, True, True, True]  # of the third step two that were kept, none else
