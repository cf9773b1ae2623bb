import math

import pytest

from pipeline.config.messages import format_bytes
from pipeline.report.axes import (
    axis,
    format_interval,
    format_number,
    format_signed,
    running_mean,
    step_axis,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1.00"), (0.5, "0.500"), (12.345, "12.3"), (999.4, "999"), (-3.14159, "\u22123.14"),
        (12_345, "12.3k"), (1_234_567, "1.23M"), (5e9, "5.00G"), (2.4e-7, "2.4e-07"), (9.99e-5, "0.0001"),
        (1e-6, "1e-06"), (math.nan, "nan"), (-math.inf, "\u2212inf"), (3e18, "3e+18"),
    ],
)  # fmt: skip
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text


def test_format_signed_shows_no_sign_for_what_rounds_to_zero() -> None:
    assert [format_signed(value) for value in (0.314, -0.314, -0.001)] == ["+0.31", "\u22120.31", "0.00"]


def test_an_interval_shows_on_which_side_of_zero_it_lies() -> None:
    cases = ((-0.06, -0.0012), (0.0004, 0.2), (-0.06, 0.0012), (0.0, 0.0), (-0.3, -0.1))
    assert [format_interval(*case) for case in cases] == [
        "\u22120.060 to \u22120.001", "+0.0004 to +0.2000", "\u22120.06 to 0.00", "0.00 to 0.00",
        "\u22120.30 to \u22120.10",
    ]  # fmt: skip


def test_sizes() -> None:
    assert [format_bytes(value) for value in (0, 5 * 2**20, 3 * 2**29)] == ["0 MiB", "5 MiB", "1.50 GiB"]


def test_axis_widens_to_round_ticks_and_keeps_given_bounds() -> None:
    assert axis([0.12, 0.83]).ticks == pytest.approx((0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
    fixed = axis([0.3, 0.9], bounds=(0, 1))
    assert (fixed.low, fixed.high) == (0, 1)
    assert fixed.labels() == ["0.00", "0.25", "0.50", "0.75", "1.00"]
    assert axis([-1.2, 1.9]).labels() == ["\u22122", "\u22121", "0", "1", "2"]


@pytest.mark.parametrize(
    "values", [[], [2.0], [0.0, 0.0], [-3.0, -3.0], [math.nan, math.inf], [1e-30], [1e299, -1e299], [1e308, -1e308]]
)
def test_axis_contains_all_values(values: list[float]) -> None:
    actual = axis(values)
    assert math.isfinite(actual.low)
    assert actual.high > actual.low
    slack = 1e-9 * max(abs(actual.low), abs(actual.high))
    assert all(actual.low - slack <= tick <= actual.high + slack for tick in actual.ticks)


def test_place_is_linear_and_stops_at_the_border() -> None:
    actual = axis([0, 10], bounds=(0, 10))
    assert [actual.pixel(value, 100, 200) for value in (0, 2.5, 10, 99, -5)] == [100, 125, 200, 200, 100]
    assert actual.pixel(2.5, 200, 100) == 175


def test_step_axis_begins_and_ends_with_the_steps() -> None:
    actual = step_axis(range(1, 61))
    assert (actual.low, actual.high) == (1, 60)
    assert actual.ticks == (20, 40, 60)
    assert step_axis([7]).ticks == (7,)


def test_running_mean_by_hand() -> None:
    assert running_mean([1, 2, 6, math.nan, 8], 3) == [1.5, 3.0, 4.0, 7.0, 8.0]
    assert math.isnan(running_mean([math.nan], 3)[0])
