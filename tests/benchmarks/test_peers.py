"""The peers bench: the work is the same each time, and a child's figures come back."""

import math
from pathlib import Path

import pytest

from benchmarks.measure import BenchFailed
from benchmarks.peers import CASES, environments, work
from benchmarks.peers.children import measure
from benchmarks.peers.ratio import spread


def test_work_is_the_same_each_time_and_within_its_bounds() -> None:
    conversations = work.conversations(200)
    assert conversations == work.conversations(200) and conversations[:50] == work.conversations(50)
    lengths = sorted(len(ids) for ids in conversations)
    assert lengths[0] >= work.SHORTEST and lengths[-1] == work.LONGEST
    assert lengths[100] < sum(lengths) / 200  # a long tail
    for chosen, rejected in work.pairs(50):
        assert work.SHORTEST <= min(len(chosen), len(rejected)) <= max(len(chosen), len(rejected)) <= work.LONGEST
        assert chosen[:10] == rejected[:10] and chosen != rejected
    tokens = {token for ids in conversations for token in ids}
    assert min(tokens) >= work.FIRST_TOKEN and max(tokens) < work.OPT_125M["vocab_size"]


def test_a_child_is_told_its_work_and_reports() -> None:
    told = work.base("fp32", tokens=8, vocabulary=64, hidden=16, layout="ours") | {"threads": 1}
    figures = measure("benchmarks.peers.ours.logprob_memory", told)
    assert len(figures.seconds) == 1 and figures.rate == pytest.approx(1 / figures.seconds[0])
    assert figures.peak_gib > 0 and figures.more["above_inputs"] >= 0


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(BenchFailed, match="KeyError"):
        measure("benchmarks.peers.ours.logprob_memory", {"precision": "fp32"})


def test_an_environment_is_known_by_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []

    def make(folder: Path, python: Path, packages: list[str]) -> None:
        folder.mkdir(parents=True)
        (folder / "made").touch()
        made.append(packages)

    monkeypatch.setenv("ZEROCHAT_PEERS", str(tmp_path))
    monkeypatch.setattr(environments, "_make", make)
    first = environments.environment("one", ["a==1"])
    assert environments.environment("one", ["a==1"]) == first and len(made) == 1
    assert environments.environment("one", ["a==2"]) != first
    assert made == [[environments.TORCH, "a==1"], [environments.TORCH, "a==2"]]


def test_a_spread_of_ratios_is_theirs_and_not_their_logarithms() -> None:
    assert spread([math.log(1.5), math.log(0.5)]) == pytest.approx(0.5)


def test_every_case_has_a_module() -> None:
    from importlib import import_module

    for case in CASES:
        assert callable(import_module(f"benchmarks.peers.{case}").run)
