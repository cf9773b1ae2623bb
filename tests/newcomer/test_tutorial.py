"""The tutorial: its files are Python, its data are as printed. `python -m tests.newcomer` executes all of it."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.newcomer.__main__ import TUTORIAL
from tests.newcomer.page import first_difference, read_blocks, run_block


def test_an_output_matches_by_its_words() -> None:
    printed = (
        "ppo (stage 3 of 3) 2/16  score 1.5  kl -0.25  01:23 left\nverdict RLHF helped: +0.36,\n  ends Mon 15:30\n"
    )
    assert (
        first_difference(printed, "ppo (stage 1 of 3) 7/9  score 2 ...\nverdict RLHF helped: −1,\nends Tue 1:30")
        is None
    )
    assert first_difference(printed, "kl 3  00:12 left") is None
    assert first_difference(printed, "verdict RLHF ... score") == "score"
    assert first_difference(printed, "verdict No clear difference") == "verdict No clear difference"


def test_the_tutorial_prints_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = read_blocks(TUTORIAL)
    for block in blocks:
        if block.language == "python":
            compile(block.text, block.file_name, "exec")
            run_block(block, tmp_path, os.environ)
    commands = next(index for index, block in enumerate(blocks) if block.language == "sh")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    assert run_block(blocks[commands], tmp_path, {**os.environ, "PATH": path}) == blocks[commands + 1].text
    monkeypatch.chdir(tmp_path)
    grade = runpy.run_path("judge.py")["grade"]
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == 1000
    assert all(grade(row["chosen"], row) > grade(row["rejected"], row) for row in rows)
    best = "Hello! You can pay for it by card. Can I help you with anything else?"
    assert grade(best, {"prompt": "How do I pay for my red lamp?"}) == 1
