"""The fastest setting that fits, kept for a stage that goes on; seconds against sums worked out by hand."""

from pathlib import Path

import pytest

from engine.memory import Workload
from engine.memory.shapes import measured
from engine.planning import Pace, Probe, step_seconds
from pipeline.errors import UserError
from pipeline.planning import choose, table
from pipeline.planning.choose import announce, candidates, fastest
from pipeline.planning.fit import GIB, plan, task
from pipeline.planning.ladder import Room
from tests.pipeline.planning.test_fit import source
from tests.tiny import tiny_config

PROBE = Probe(
    forward=1e-5, backward=2e-5, decode=1e-3, head=1e-4, adam=1e-9, host_adam=4e-9, wire=1e-9, copy=1e-10, disk=1e-9,
    draw=1e-2,
)  # fmt: skip


def test_seconds_by_hand() -> None:
    shape = measured("small", source().config)
    pace = Pace(sequences=8, length=100, passes=2, critic=True, policies=2, scorers=2, answer=10, together=2)
    work = Workload(ranks=2, stage=1, dtype="fp32", micro_batch_tokens=200, checkpointing=True)
    found = step_seconds(shape, work, pace, PROBE, on_gpu=False)
    ahead = 8 * 1e-5 * 400
    head = 1e-4 * 40  # of the tokens of answers
    compute = 3 * ahead + 8 * 2e-5 * 400 - ahead + head  # recomputing is a second forward
    on_wire = (2 * shape.parameters + 2 * shape.parameters) * 1e-9
    assert found == pytest.approx({
        "generate": 2 * 10 * (8 * 1e-3 + 1e-2) + 0.9 * ahead, "score": 4 * ahead + 2 / 3 * head,
        "train": 4 * (compute + on_wire), "step": 4 * shape.parameters / 2 * 1e-9,
    })  # fmt: skip
    streamed = Workload(
        ranks=1, stage=3, dtype="bf16", micro_batch_tokens=400, offload_optimizer="nvme", offload_parameters="nvme"
    )
    there = step_seconds(shape, streamed, Pace(4, 100), PROBE, on_gpu=True)
    assert there["train"] == pytest.approx(max(8 * 3e-5 * 400 + 1e-4 * 400, 2 * 2 * shape.parameters * 1e-9))
    assert there["step"] == pytest.approx(shape.parameters * 24 * 1e-9)


def test_less_room_goes_down_the_ladder() -> None:
    found = task(tiny_config(sft={"micro_batch_tokens": 4096, "batch_size": 128}), "sft", policy=source(), ranks=4)
    pace = Pace(64, 160)
    chosen = []
    for size in (80 * GIB, 3 * GIB, 2 * GIB, GIB):
        best = fastest(candidates(found, Room(size, 10 * GIB, 10 * GIB, on_gpu=True), pace, PROBE))
        assert best is not None and best.demand.peak <= 0.92 * size
        chosen.append(best)
    assert chosen[0].setting.tokens == 4096 and chosen[0].setting.engine["offload_optimizer"] == "none"
    assert [c.total for c in chosen] == sorted(c.total for c in chosen)
    assert chosen[-1].setting != chosen[0].setting
    assert fastest(candidates(found, Room(GIB // 100, GIB, GIB, on_gpu=True), pace, PROBE)) is None


def test_auto_is_chosen_once_for_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(engine={"auto": True, "zero_stage": 3})
    monkeypatch.setattr(choose, "measure", lambda *_: PROBE)
    settled, predicted = announce(config, "sft", tmp_path, policy=source())
    assert settled.engine.zero_stage == 0 and not settled.engine.auto and predicted["train"]
    assert "engine=auto: engine.zero_stage=0" in capsys.readouterr().out

    def again(*_: object) -> Probe:
        raise AssertionError("measured again")

    monkeypatch.setattr(choose, "measure", again)
    assert announce(config, "sft", tmp_path, policy=source())[0] == settled
    assert "as this stage was begun" in capsys.readouterr().out
    monkeypatch.setattr(choose, "measure", lambda *_: PROBE)
    monkeypatch.setattr(choose, "this_room", lambda *_: Room(1000, 1000, 1000, on_gpu=False))
    with pytest.raises(UserError, match="no setting fits"):
        announce(config, "reward", tmp_path / "other", policy=source())


def test_the_prediction_tells_of_host_and_files() -> None:
    there = {"zero_stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}
    config = tiny_config(engine=there)
    _, predicted = announce(config, "sft", Path(), policy=source())
    wanted = plan(config, "sft", policy=source(), ranks=1).demand
    assert wanted.host > 0 and wanted.nvme > 14 * measured("small", source().config).parameters - 1
    assert (predicted["train"]["host"], predicted["train"]["nvme"]) == (wanted.host, wanted.nvme)
    gradients = 4 * measured("small", source().config).parameters
    assert predicted["generate"]["host"] == pytest.approx(wanted.host - gradients, abs=4)
    assert all("host" not in owners for owners in wanted.phases.values())  # a device's bytes are added up


def test_the_table_names_owners_phases_and_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "measure", lambda *_: PROBE)
    lines = "\n".join(table.describe(tiny_config(), "ppo", policy=source(), reward=source()))
    for word in ("train critic", "reference", "cache", "generate", "recomputing", "the fastest that fits", "it fits"):
        assert word in lines
    assert plan(tiny_config(), "ppo", policy=source(), ranks=1).fits


def test_a_reward_model_that_is_not_there_is_not_planned_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "measure", lambda *_: PROBE)
    monkeypatch.setattr(table, "base_source", lambda _: source())
    counts = []
    for words in ({}, {"reward_model": False, "reward_function": "mine.py:score"}):
        config = tiny_config(ppo=words)
        table.run(config, Path())
        told = capsys.readouterr().out
        assert ("\nreward: " in told) == ("    reward " in told) == (not words)
        found = task(config, "ppo", policy=source(), ranks=1)
        counts.append(choose.pace_of(config, "ppo", found).scorers)
        assert ("reward" in found.demand(Room(GIB, GIB, GIB, on_gpu=False)).phases["score"]) == (not words)
    for keys in ({}, {"lora": {"rank": 2}}, {"reference": True}):
        config = tiny_config(ppo={"kl_target": None, "kl_coef": 0.0, **keys})
        counts.append(choose.pace_of(config, "ppo", task(config, "ppo", policy=source(), ranks=1)).policies)
    assert counts == [2, 1, 1, 1, 2]
