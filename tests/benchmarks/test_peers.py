"""The peers bench: the work is the same each time, and a child's figures come back."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.measure import BenchFailed
from benchmarks.peers import CASES, environments, work
from benchmarks.peers.children import measure
from benchmarks.peers.dpo import require_same
from benchmarks.peers.ratio import spread
from benchmarks.peers.weights import fill


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


def test_dpo_is_compared_only_where_both_sides_come_to_the_same() -> None:
    """Log-probabilities of all steps and losses, the first one's tightly: there the policy is the reference."""
    steps = [[0.693147, -1237.0255, -546.6372], [0.695906, -529.5052, -839.5346]]

    def differs(step: int, figure: int, by: float) -> list[list[float]]:
        changed = [list(row) for row in steps]
        changed[step][figure] += by
        return changed

    require_same(steps, differs(0, 1, 0.01), "fp32")
    require_same(steps, differs(1, 0, 0.005), "bf16")
    for step, figure, by, precision in [
        (0, 0, 0.003, "bf16"), (1, 0, 0.005, "fp32"), (0, 1, 0.05, "fp32"), (1, 2, 1.0, "bf16"),
        (1, 1, math.nan, "bf16"),
    ]:  # fmt: skip
        with pytest.raises(BenchFailed, match=f"step {step + 1} in {precision}"):
            require_same(steps, differs(step, figure, by), precision)
    with pytest.raises(ValueError, match="shorter"):
        require_same(steps, steps[:1], "fp32")


def test_weights_are_those_of_the_name_and_not_of_the_order() -> None:
    wide, narrow = nn.Linear(3, 5), nn.LayerNorm(4)
    first, other = nn.ModuleDict({"a": wide, "b": narrow}), nn.ModuleDict({"b": nn.LayerNorm(4), "a": nn.Linear(3, 5)})
    for model in (first, other):
        fill(model)
    assert torch.equal(first["a"].weight, other["a"].weight) and 0.005 < first["a"].weight.std() < 0.04
    assert narrow.weight.tolist() == [1.0] * 4


def test_every_case_has_a_module() -> None:
    from importlib import import_module

    for case in CASES:
        assert callable(import_module(f"benchmarks.peers.{case}").run)
