"""DeepSpeed's schedules at steps worked out by hand from its formulas; step 0 is before its first iteration."""

import math

import pytest

from engine import schedules


def test_warm_up_is_logarithmic() -> None:
    """gamma = ln(iteration + 1) / ln(warm-up); iteration 0 gives ln 1 = 0, iteration 3 of 4 gives 1."""
    found = [schedules.warmup_lr(step, warmup_max_lr=3.0, warmup_min_lr=1.0, warmup_num_steps=4) for step in range(7)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 1.0 + 2 * math.log(3) / math.log(4), 3.0, 3.0, 3.0])
    assert schedules.warmup_lr(501, warmup_max_lr=1e-3) == pytest.approx(1e-3 * math.log(501) / math.log(1000))


def test_warm_up_in_a_line() -> None:
    found = [
        schedules.warmup_lr(step, warmup_max_lr=4.0, warmup_num_steps=4, warmup_type="linear") for step in range(7)
    ]
    assert found == pytest.approx([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 4.0])
    assert (
        schedules.warmup_lr(1, warmup_max_lr=4.0, warmup_num_steps=1, warmup_type="linear") == 0.0
    )  # at least two steps


def test_warm_up_and_fall() -> None:
    keys = {"total_num_steps": 6, "warmup_max_lr": 8.0, "warmup_num_steps": 2}
    found = [schedules.warmup_decay_lr(step, warmup_type="linear", **keys) for step in range(10)]
    assert found == pytest.approx([0.0, 0.0, 4.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0])
    raised = schedules.warmup_decay_lr(5, total_num_steps=6, warmup_max_lr=8.0, warmup_min_lr=4.0, warmup_num_steps=2)
    assert raised == pytest.approx(4.0 + 4.0 * 2 / 4)


def test_warm_up_and_cosine() -> None:
    """After the warm-up the cosine is one iteration ahead: (iteration - warm-up + 1) / (total - warm-up)."""

    def rate(step: int) -> float:
        keys = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.1}
        return schedules.warmup_cosine_lr(step, lr=2.0, **keys)

    def falling(done: float) -> float:
        return 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

    found = [rate(step) for step in range(9)]
    assert found[:3] == pytest.approx([0.0, 1.0, 2.0])  # 0 first, then 0.5 of the peak, then ln 2 / ln 2
    assert found[3:7] == pytest.approx([falling(0.25), falling(0.5), falling(0.75), 0.2])
    assert found[7:] == pytest.approx([0.2, 0.2])


def test_range_test() -> None:
    keys = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    smooth = [schedules.range_test_lr(step, **keys) for step in (0, 1, 4, 10)]
    assert smooth == pytest.approx([0.1, 0.15, 0.3, 0.6])
    stairs = [schedules.range_test_lr(step, lr_range_test_staircase=True, **keys) for step in (0, 3, 4, 10)]
    assert stairs == pytest.approx([0.1, 0.1, 0.3, 0.5])


def test_one_cycle_up_down_and_decay() -> None:
    keys = {"cycle_first_step_size": 2, "cycle_second_step_size": 4, "decay_step_size": 2}
    found = [
        schedules.one_cycle_lr(step, cycle_min_lr=1.0, cycle_max_lr=5.0, decay_lr_rate=0.5, **keys)
        for step in range(11)
    ]
    assert found[:6] == pytest.approx([1.0, 3.0, 5.0, 4.0, 3.0, 2.0])
    assert found[6:] == pytest.approx([1.0, 1 / 1.25, 1 / 1.5, 1 / 1.75, 1 / 2.0])
    betas = [schedules.one_cycle_betas(step, decay_mom_rate=-0.2, **keys) for step in (0, 1, 2, 4, 8)]
    assert [second for _, second in betas] == [0.99] * 5
    assert [first for first, _ in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9 * (1 - 0.2)])


def test_one_cycle_in_stairs() -> None:
    found = [
        schedules.one_cycle_lr(
            step, cycle_min_lr=0.0, cycle_max_lr=4.0, cycle_first_step_size=4, cycle_first_stair_count=2
        )
        for step in range(9)
    ]
    assert found == pytest.approx([0.0, 0.0, 2.0, 2.0, 4.0, 2.0, 2.0, 0.0, 0.0])
    for rate in (0.0, 0.3):  # by steps of no size nothing decays
        assert (
            schedules.one_cycle_lr(30, cycle_min_lr=0.5, cycle_max_lr=4.0, cycle_first_step_size=4, decay_lr_rate=rate)
            == 0.5
        )
        assert schedules.one_cycle_betas(30, cycle_first_step_size=4, decay_mom_rate=rate) == (0.9, 0.99)
