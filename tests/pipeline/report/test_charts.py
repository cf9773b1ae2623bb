import math
import re
from itertools import pairwise

import pytest

from pipeline.report.charts import (
    MOST_DOTS,
    histogram_chart,
    interval_chart,
    scatter_chart,
)
from pipeline.report.curves import MOST_POINTS, line_chart
from pipeline.report.svg import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, Series


def places(page: str, class_: str) -> list[list[tuple[float, float]]]:
    """Return the points of every polyline of a class."""
    actual = re.findall(rf'<polyline points="([^"]*)" class="{class_}"', page)
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line.split())] for line in actual]


def test_a_curve_goes_from_corner_to_corner_of_its_frame() -> None:
    page = line_chart("t", [Series("", [(1, 0.0), (2, 5.0), (3, 10.0)], "plain")], x_name="step", bounds=(0, 10))
    assert page is not None
    right = WIDTH - 44
    [line] = places(page, "curve tone-plain")
    middle = ((LEFT + right) / 2, (TOP + HEIGHT - BOTTOM) / 2)
    assert line == [(LEFT, HEIGHT - BOTTOM), middle, (right, TOP)]


def test_a_curve_breaks_where_a_value_is_not_finite() -> None:
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, math.inf), (6, 2.0), (7, 2.0)]
    page = line_chart("t", [Series("", points, "plain")], x_name="step")
    assert page is not None
    assert [len(line) for line in places(page, "curve tone-plain")] == [2, 2]
    assert "nan" not in page
    assert "inf" not in page


def test_without_finite_values_there_is_no_chart() -> None:
    assert line_chart("t", [Series("", [(1, math.nan)], "plain"), Series("", [], "sft")], x_name="step") is None
    assert scatter_chart("t", [], x_name="x", y_name="y") is None
    assert interval_chart("t", [], x_name="x") is None


@pytest.mark.parametrize("level", [0.0, 0.5, 0.97])
def test_end_labels_do_not_overlap(level: float) -> None:
    series = [Series(name, [(1, 1.0), (2, level + 0.01 * at)], "plain") for at, name in enumerate("abc")]
    page = line_chart("t", series, x_name="step", bounds=(0, 1))
    assert page is not None
    tops = sorted(float(y) for y in re.findall(r'<text x="[^"]*" y="([^"]*)" class="label tone-plain">[abc]<', page))
    assert len(tops) == 3
    assert all(below - above > 25.9 for above, below in pairwise(tops))
    assert tops[-1] <= HEIGHT


def test_long_runs_are_thinned_without_changing_their_mean() -> None:
    points = [(step, float(step % 7)) for step in range(1, 10_001)]
    page = line_chart("t", [Series("", points, "plain", exact=True)], x_name="step", bounds=(0, 6))
    assert page is not None
    [line] = places(page, "curve tone-plain")
    assert places(page, "curve faint tone-plain") == []
    assert len(line) == MOST_POINTS
    mean = sum(y for _, y in line) / len(line)
    assert abs(mean - (TOP + HEIGHT - BOTTOM) / 2) < 0.5  # The mean of 0..6 is 3, half way up.
    assert len(page) < 40_000


def test_the_dots_of_a_large_group_come_from_all_of_its_points() -> None:
    group = Series("", [(float(at), 0.0) for at in range(10 * MOST_DOTS)])
    page = scatter_chart("t", [group], x_name="x", y_name="y")
    assert page is not None
    across = [float(x) for x in re.findall(r'<circle cx="([^"]*)"', page)]
    middle = (min(across) + max(across)) / 2
    assert len(across) == MOST_DOTS and max(across) > 0.95 * (WIDTH - 16)
    assert sum(x < middle for x in across) == MOST_DOTS / 2


def test_a_noisy_curve_is_drawn_thin_with_its_mean_above() -> None:
    points = [(step, float(step % 2)) for step in range(100)]
    page = line_chart("t", [Series("", points, "plain")], x_name="step", bounds=(0, 1))
    assert page is not None
    [thin], [thick] = places(page, "curve faint tone-plain"), places(page, "curve tone-plain")
    assert max(y for _, y in thin) - min(y for _, y in thin) == HEIGHT - BOTTOM - TOP
    inner = [y for _, y in thick[5:-5]]
    assert max(inner) - min(inner) < 0.3 * (HEIGHT - BOTTOM - TOP)


def test_a_histogram_counts_the_values_of_each_group_in_the_same_bins() -> None:
    before = Series("SFT", [(0, 0.0), (1, 1.0), (2, 1.0), (3, math.nan)], "sft")
    after = Series("PPO", [(0, 4.0)], "ppo")
    page = histogram_chart("t", [before, after], x_name="score", bins=4)
    assert page is not None and "SFT: 3 answers, PPO: 1 answers" in page
    right, base = WIDTH - 16, HEIGHT - BOTTOM
    width, unit = (right - LEFT) / 4, (base - TOP) / 2
    first, second = (places(page, f"area tone-{tone}")[0] for tone in ("sft", "ppo"))
    heights = [round((base - y) / unit, 1) for _, y in first]
    assert heights == [0, 1, 1, 2, 2, 0, 0, 0, 0, 0]
    assert [round((x - LEFT) / width, 1) for x, _ in first] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [round((base - y) / unit, 1) for _, y in second] == [0, 0, 0, 0, 0, 0, 0, 1, 1, 0]
    assert histogram_chart("t", [Series("SFT", [(0, math.nan)], "sft")], x_name="score") is None
