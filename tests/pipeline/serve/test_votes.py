"""The file of votes: win rates by hand, killed writers, concurrent writers, and use as training data."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import DataConfig
from pipeline.data.load import load_stage
from pipeline.data.records import Message, Preference
from pipeline.serve.votes import Contestant, VoteFile, preference
from tests.forked_launch import launch
from tests.ranks import Worker
from tests.test_chat import save_model

PPO, SFT = Contestant("ppo", "aa"), Contestant("sft", "bb")


def row(vote: str, left: Contestant = PPO, right: Contestant = SFT, prompt: str = "hello") -> dict[str, Any]:
    """Return a vote on the answers "good" (left) and "bad"."""
    sides = {"left": left.cast("good"), "right": right.cast("bad")}
    messages = [{"role": "user", "content": prompt}]
    return {"prompt": messages, **preference(vote, "good", "bad"), "vote": vote, "comment": "", **sides}


def test_the_win_rate_counts_by_model_and_not_by_side(tmp_path: Path) -> None:
    """The first model has five wins, two losses and three ties: (5 + 1.5) / 10."""
    file = VoteFile(tmp_path / "votes.jsonl")
    assert file.tally(PPO, SFT)["rate"] is None
    for vote, left, right in [
        *[("left", PPO, SFT)] * 3, *[("right", SFT, PPO)] * 2, ("right", PPO, SFT), ("left", SFT, PPO),
        ("both", PPO, SFT), ("both", SFT, PPO), ("neither", SFT, PPO),
        ("left", Contestant("ppo", "another version"), SFT), ("left", PPO, Contestant("base")),
    ]:  # fmt: skip
        file.append(row(vote, left, right))
    actual = file.tally(PPO, SFT)
    assert (actual["wins"], actual["losses"], actual["both"], actual["neither"], actual["votes"]) == (5, 2, 2, 1, 10)
    # Wilson's interval of 6.5 of 10 by hand: (6.5 + z^2 / 2 -+ z sqrt(2.275 + z^2 / 4)) / (10 + z^2), z = 1.959964
    assert (actual["rate"], actual["low"], actual["high"]) == pytest.approx((0.65, 0.353672, 0.863070), abs=1e-5)
    assert file.tally(SFT, PPO)["rate"] == 0.35


def test_a_line_that_a_killed_process_left_incomplete_is_removed(tmp_path: Path) -> None:
    file = VoteFile(tmp_path / "votes.jsonl")
    file.append(row("left"))
    full = file.path.read_bytes()
    file.path.write_bytes(full + full[:40])
    assert len(list(file.rows())) == 1
    file.append(row("right", prompt="ünïcödé\u2028🙂"))
    lines = file.path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == "" and [json.loads(line)["vote"] for line in lines] == ["left", "right"]


def write_votes(path: Path) -> None:
    while True:
        VoteFile(path).append({"vote": "left", "comment": "x" * 20_000})


def test_killed_writers_leave_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    writers = [Worker(write_votes, path, environment={}) for _ in range(2)]
    try:
        while not path.exists() or path.stat().st_size < 500_000:
            assert all(writer.poll() is None for writer in writers)
            time.sleep(0.005)
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    VoteFile(path).append({"vote": "right"})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) > 20 and rows[-1] == {"vote": "right"}


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_votes_are_preference_pairs_for_training(tmp_path: Path, stage: str) -> None:
    file = VoteFile(tmp_path / "votes.jsonl")
    for number in range(8):
        file.append(row(("left", "right", "both", "neither")[number % 4], prompt=f"question {number}"))
    data = DataConfig(name="votes", path=str(file.path), eval_fraction=0.01, stage_shares={"reward": 1.0})
    actual = load_stage(data, stage, 0)
    assert actual.skipped == {"vote that prefers no answer": 4}
    records = [*actual.train, *actual.held_out]
    assert len(records) == 4 and all(isinstance(record, Preference) for record in records)
    pairs = {record.prompt: (record.chosen.content, record.rejected.content) for record in records}
    assert pairs[(Message("user", "question 0"),)] == ("good", "bad")
    assert pairs[(Message("user", "question 1"),)] == ("bad", "good")


def test_one_command_trains_on_votes(tmp_path: Path) -> None:
    save_model(tmp_path / "x" / "ppo" / "model", 0)
    file = VoteFile(tmp_path / "x" / "votes.jsonl")
    for number in range(6):
        file.append(row("both" if number == 5 else "left", prompt=f"question {number}"))
    command = [
        "stage=dpo", "model.path=x/ppo/model", "actor=x/ppo", "data.path=x/votes.jsonl", "run_dir=voted",
        "tracking=none", "dpo.steps=1", "dpo.batch_size=2", "dpo.max_length=64", "evaluation.prompts=2",
        "rollout.max_new_tokens=2", "rollout.max_prompt_tokens=64",
    ]  # fmt: skip
    worker = Worker(launch, tmp_path, command, {}, environment={"OMP_NUM_THREADS": "1"})
    output, _ = worker.communicate()
    assert worker.returncode == 0, output
    assert "dpo: skipped rows: 1 (vote that prefers no answer)" in output
    assert (tmp_path / "voted" / "dpo" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(("vote", "left", "right"), [("both", "a", "b"), ("left", "a", " "), ("right", "", "b")])
def test_a_vote_without_two_answers_is_skipped(vote: str, left: str, right: str) -> None:
    assert preference(vote, left, right) == {"chosen": None, "rejected": None}
