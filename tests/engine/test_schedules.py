"""DeepSpeed's schedules against values by hand from its formulas. Step 0 is before its first iteration."""

import math

import pytest

from engine.schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR


def test_warm_up_is_logarithmic() -> None:
    """gamma = ln(iteration + 1) / ln(warm-up); iteration 0 gives ln 1 = 0, iteration 3 of 4 gives 1."""
    schedule = WarmupLR(warmup_max_lr=3.0, warmup_min_lr=1.0, warmup_num_steps=4)
    rates = [schedule.lr(step) for step in range(7)]
    assert rates == pytest.approx([1.0, 1.0, 2.0, 1.0 + 2 * math.log(3) / math.log(4), 3.0, 3.0, 3.0])
    assert WarmupLR(warmup_max_lr=1e-3).lr(501) == pytest.approx(1e-3 * math.log(501) / math.log(1000))


def test_linear_warm_up() -> None:
    schedule = WarmupLR(warmup_max_lr=4.0, warmup_num_steps=4, warmup_type="linear")
    assert [schedule.lr(step) for step in range(7)] == pytest.approx([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 4.0])
    at_least_two_steps = WarmupLR(warmup_max_lr=4.0, warmup_num_steps=1, warmup_type="linear")
    assert at_least_two_steps.lr(1) == 0.0


def test_warm_up_and_decay() -> None:
    schedule = WarmupDecayLR(total_num_steps=6, warmup_max_lr=8.0, warmup_num_steps=2, warmup_type="linear")
    assert [schedule.lr(step) for step in range(10)] == pytest.approx(
        [0.0, 0.0, 4.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0]
    )
    raised = WarmupDecayLR(total_num_steps=6, warmup_max_lr=8.0, warmup_min_lr=4.0, warmup_num_steps=2)
    assert raised.lr(5) == pytest.approx(4.0 + 4.0 * 2 / 4)


def test_warm_up_and_cosine() -> None:
    """After the warm-up the cosine is one iteration ahead: (iteration - warm-up + 1) / (total - warm-up)."""
    schedule = WarmupCosineLR(
        total_num_steps=6, warmup_num_steps=2, warmup_min_ratio=0.5, cos_min_ratio=0.1, optimizer_lr=2.0
    )

    def falling(done: float) -> float:
        return 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

    rates = [schedule.lr(step) for step in range(9)]
    assert rates[:3] == pytest.approx([0.0, 1.0, 2.0])  # 0 first, then 0.5 of the peak, then ln 2 / ln 2
    assert rates[3:7] == pytest.approx([falling(0.25), falling(0.5), falling(0.75), 0.2])
    assert rates[7:] == pytest.approx([0.2, 0.2])
