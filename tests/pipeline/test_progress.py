"""The progress row that a launcher reads, and the allowed time without progress."""

import threading

import pytest

from pipeline import progress
from pipeline.progress import SHORTEST, UNMEASURED, Progress, Row


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of `pipeline.progress` by a list with one number."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def visit(progress: Progress, phase: str, seconds: float, clock: list[float]) -> None:
    with progress.phase(phase):
        clock[0] += seconds


def test_another_process_reads_the_progress_of_a_rank():
    row = Row()
    progress = Progress(Row(row.descriptor))
    before = row.read().moves
    progress.begin_step(7, None)
    with progress.phase("generate"):
        with progress.collective("all_gather", (3, 4)):
            moment = row.read()
        assert (moment.step, moment.phase, moment.number, moment.collective) == (7, "generate", 1, "all_gather[3, 4]")
        assert moment.inside and moment.moves > before
        assert not row.read().inside
    assert row.read().phase == ""


def test_a_long_name_and_another_alphabet_fit_into_the_row():
    row = Row()
    progress = Progress(row)
    with progress.collective("\u00e4" * 500, ()):
        pass
    assert row.read().collective == "\u00e4" * 48


def test_collectives_of_other_threads_do_not_count():
    row = Row()
    progress = Progress(row)
    before = row.read()
    moments = []

    def call():
        with progress.collective("barrier", ()):
            moments.append(row.read())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert [*moments, row.read()] == [before, before]


def test_the_limit_is_ten_times_the_slowest_step_or_phase(clock):
    progress = Progress(Row())
    assert progress.limit("train") == UNMEASURED
    progress.begin_step(1, None)
    visit(progress, "train", 3.0, clock)
    assert progress.limit("train") == SHORTEST and progress.limit("evaluate") == progress.limit("") == UNMEASURED
    progress.begin_step(2, 8.0)
    visit(progress, "train", 2.0, clock)
    visit(progress, "evaluate", 50.0, clock)
    assert (progress.limit("train"), progress.limit("evaluate"), progress.limit("")) == (SHORTEST, 500.0, SHORTEST)
    progress.begin_step(3, 60.0)
    assert (progress.limit("train"), progress.limit("evaluate"), progress.limit("")) == (600.0, 600.0, 600.0)
    progress.begin_step(0, 60.0)  # after the last step
    assert progress.limit("train") == UNMEASURED


def test_work_before_the_first_step_does_not_limit_that_of_a_step(clock):
    """SFT answers the evaluation prompts before its first step. In a step it scores the held-out examples."""
    progress = Progress(Row())
    visit(progress, "evaluate", 2.0, clock)
    progress.begin_step(1, None)
    progress.begin_step(2, 1.0)
    assert progress.limit("evaluate") == UNMEASURED


def test_a_configured_limit_holds_while_the_stage_takes_steps():
    row = Row()
    progress = Progress(row)
    progress.configure(5.0)
    assert progress.limit("evaluate") == UNMEASURED
    with progress.phase("evaluate"), progress.user_calls():
        assert row.read().limit == 5.0
    progress.begin_step(1, None)
    assert progress.limit("evaluate") == progress.limit("") == 5.0
    progress.configure(7200.0)
    progress.begin_step(0, None)
    assert progress.limit("export") == 7200.0


def test_a_phase_in_a_phase_is_published_until_it_ends():
    row = Row()
    progress = Progress(row)
    with progress.phase("evaluate"):
        with progress.phase("generate"):
            assert row.read().phase == "generate"
        assert row.read().phase == "evaluate"


def test_a_higher_limit_is_not_lowered(clock):
    row = Row()
    progress = Progress(row)
    progress.begin_step(1, None)
    visit(progress, "save", 1.0, clock)
    with progress.phase("save"):
        assert row.read().limit == SHORTEST
        with progress.allow(UNMEASURED):
            assert row.read().limit == UNMEASURED
            with progress.allow(SHORTEST):
                assert row.read().limit == UNMEASURED
        assert row.read().limit == SHORTEST
