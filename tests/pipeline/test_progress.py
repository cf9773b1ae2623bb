"""The row that a launcher reads, and the seconds without progress that a rank is allowed."""

import threading

import pytest

from pipeline import progress
from pipeline.progress import ALONE, SHORTEST, UNMEASURED, Progress, Row


@pytest.fixture
def clock(monkeypatch):
    """The time of `pipeline.progress`, in a list with one number."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def visit(own: Progress, phase: str, seconds: float, clock: list[float]) -> None:
    with own.phase(phase):
        clock[0] += seconds


def test_another_process_reads_what_the_rank_does():
    row = Row()
    own = Progress(Row(row.descriptor))
    before = row.read().moves
    own.begin_step(7, None)
    with own.phase("generate"):
        own.begin("all_gather", (3, 4))
        moment = row.read()
        assert (moment.step, moment.phase, moment.number, moment.collective) == (7, "generate", 1, "all_gather[3, 4]")
        assert moment.inside and moment.moves > before
        own.end()
        assert not row.read().inside
    assert row.read().phase == ""


def test_a_long_name_and_another_alphabet_fit_into_the_row():
    row = Row()
    own = Progress(row)
    own.begin("\u00e4" * 500, ())
    assert row.read().collective == "\u00e4" * 48


def test_collectives_of_other_threads_are_no_progress():
    row = Row()
    own = Progress(row)
    before = row.read()
    thread = threading.Thread(target=lambda: (own.begin("barrier", ()), own.end()))
    thread.start()
    thread.join()
    assert row.read() == before


def test_the_limit_is_ten_times_the_slowest_step_or_phase(clock):
    own = Progress(Row())
    assert own.limit("train") == UNMEASURED
    own.begin_step(1, None)
    visit(own, "train", 3.0, clock)
    assert own.limit("train") == SHORTEST and own.limit("evaluate") == own.limit("") == UNMEASURED
    own.begin_step(2, 8.0)
    visit(own, "train", 2.0, clock)
    visit(own, "evaluate", 50.0, clock)
    assert (own.limit("train"), own.limit("evaluate"), own.limit("")) == (80.0, 500.0, 80.0)
    own.begin_step(3, 60.0)
    assert (own.limit("train"), own.limit("evaluate"), own.limit("")) == (600.0, 600.0, 600.0)
    own.begin_step(0, 60.0)  # after the last step
    assert own.limit("train") == UNMEASURED


def test_a_configured_limit_holds_while_the_stage_takes_steps():
    own = Progress(Row())
    own.configure(5.0)
    assert own.limit("evaluate") == UNMEASURED
    own.begin_step(1, None)
    assert own.limit("evaluate") == own.limit("") == 5.0
    own.configure(7200.0)
    own.begin_step(0, None)
    assert own.limit("export") == 7200.0


def test_a_phase_in_a_phase_is_published_until_it_ends():
    row = Row()
    own = Progress(row)
    with own.phase("evaluate"):
        with own.phase("generate"):
            assert row.read().phase == "generate"
        assert row.read().phase == "evaluate"


def test_work_of_rank_zero_for_all_ranks_may_take_a_day():
    row = Row()
    own = Progress(row)
    with own.alone():
        assert row.read().limit == ALONE
    assert row.read().limit == UNMEASURED
