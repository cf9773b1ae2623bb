"""The peers benchmark: tasks are the same at each call, and a child process returns its figures."""

import math

import pytest
import torch
from torch import nn

from benchmarks.measure import BenchFailed
from benchmarks.peers import tasks
from benchmarks.peers.child_process import measure
from benchmarks.peers.dpo import require_same
from benchmarks.peers.ratio import rms_of_ratio
from benchmarks.peers.weights import fill


def test_tasks_are_the_same_at_each_call_and_within_their_bounds() -> None:
    conversations = tasks.conversations(200)
    assert conversations == tasks.conversations(200) and conversations[:50] == tasks.conversations(50)
    lengths = sorted(len(ids) for ids in conversations)
    assert lengths[0] >= tasks.SHORTEST and lengths[-1] == tasks.LONGEST
    assert lengths[100] < sum(lengths) / 200  # a long tail
    for chosen, rejected in tasks.pairs(50):
        assert tasks.SHORTEST <= min(len(chosen), len(rejected)) <= max(len(chosen), len(rejected)) <= tasks.LONGEST
        assert chosen[:10] == rejected[:10] and chosen != rejected
    tokens = {token for ids in conversations for token in ids}
    assert min(tokens) >= tasks.FIRST_TOKEN and max(tokens) < tasks.OPT_125M["vocab_size"]


def test_a_child_process_reads_its_task_and_reports() -> None:
    task = tasks.make("fp32", tokens=8, vocabulary=64, hidden=16, layout="ours") | {"threads": 1}
    figures = measure("benchmarks.peers.logprob_memory", task)
    assert len(figures.seconds) == 1 and figures.rate == pytest.approx(1 / figures.seconds[0])
    assert figures.peak_gib > 0 and figures.more["above_inputs"] >= 0


def test_the_error_of_a_failed_child_process_has_the_reason() -> None:
    with pytest.raises(BenchFailed, match="No module named"):
        measure("benchmarks.peers.unwritten", {"precision": "fp32"})


def test_the_spread_is_that_of_ratios_and_not_of_log_ratios() -> None:
    assert rms_of_ratio([math.log(1.5), math.log(0.5)]) == pytest.approx(0.5)


def test_dpo_sides_with_different_figures_raise() -> None:
    """Log-probabilities and losses are compared; the first loss has the tightest bound."""
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


def test_weights_depend_on_the_name_and_not_on_the_order() -> None:
    wide, narrow = nn.Linear(3, 5), nn.LayerNorm(4)
    first, other = nn.ModuleDict({"a": wide, "b": narrow}), nn.ModuleDict({"b": nn.LayerNorm(4), "a": nn.Linear(3, 5)})
    for model in (first, other):
        fill(model)
    assert torch.equal(first["a"].weight, other["a"].weight) and 0.005 < first["a"].weight.std() < 0.04
    assert narrow.weight.tolist() == [1.0] * 4
