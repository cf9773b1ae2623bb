"""The scheduler's plans: the order of sequences, shared prompts and prefixes, and the reuse of slots."""

from collections.abc import Sequence
from typing import Any

from engine.generation.scheduler import Plan, Scheduler, queue_order

LONG = list(range(41))  # 40 tokens run in chunks, and the last one as the first token of its sequences


def scheduler_of(prompts: Sequence[list[int]], **sizes: Any) -> Scheduler:
    scheduler = Scheduler(**sizes)
    for request in queue_order(prompts):
        scheduler.add(request, prompts[request])
    return scheduler


def chunks(plan: Plan) -> list[tuple[int, int, int]]:
    return [(chunk.slot, chunk.start, chunk.end) for chunk in plan.chunks]


def starting(plan: Plan) -> list[tuple[int, int, int]]:
    return [(sequence.request, sequence.slot, sequence.prompt.slot) for sequence in plan.starting]


def test_a_freed_slot_goes_to_the_next_prompt() -> None:
    scheduler = scheduler_of([[1, 2, 0], [3], [4, 5, 6, 7]], slots=2, prompt_slots=2, prefill_tokens=100)
    first = scheduler.plan()
    assert chunks(first) == [(0, 0, 3), (1, 0, 2)] and starting(first) == [(2, 0, 0), (0, 1, 1)]
    assert [sequence.last for sequence in first.starting] == [7, 0]
    scheduler.finish({2})
    second = scheduler.plan()
    assert not second.chunks and starting(second) == [(1, 0, 0)]
    assert [sequence.request for sequence in scheduler.decoding] == [1, 0]


def test_late_samples_do_not_compute_their_prompt_again() -> None:
    scheduler = scheduler_of([LONG, LONG, [9], LONG], slots=2, prompt_slots=2, prefill_tokens=100)
    first = scheduler.plan()
    assert chunks(first) == [(0, 0, 40)] and starting(first) == [(0, 0, 0), (1, 1, 0)]
    scheduler.finish({1})
    second = scheduler.plan()
    assert not second.chunks and starting(second) == [(3, 1, 0)]
    scheduler.finish({0})
    third = scheduler.plan()
    assert not third.chunks and starting(third) == [(2, 0, 1)]
    scheduler.finish({2, 3})
    assert not scheduler.busy


def test_a_prompt_stays_until_its_slot_is_needed_and_nothing_reads_it() -> None:
    other, third = [99, *LONG], [98, *LONG]
    scheduler = scheduler_of([LONG, LONG, other, third], slots=2, prompt_slots=1, prefill_tokens=100)
    assert chunks(scheduler.plan()) == [(0, 0, 41)], "the second prompt must wait for a slot"
    assert not scheduler.plan().chunks
    scheduler.finish({scheduler.decoding[0].request})
    assert chunks(scheduler.plan()) == [(0, 0, 41)]
    scheduler.finish({scheduler.decoding[0].request})
    assert chunks(scheduler.plan()) == [(0, 0, 40)] and [s.request for s in scheduler.decoding] == [0, 1]
    scheduler.finish({0, 1})
    assert not scheduler.busy


def test_an_empty_prompt_slot_is_used_before_a_cached_prompt_is_dropped() -> None:
    scheduler = scheduler_of([LONG, [9]], slots=1, prompt_slots=2, prefill_tokens=100)
    scheduler.plan()
    scheduler.finish({0})
    assert starting(scheduler.plan()) == [(1, 0, 1)]


def test_an_aborted_prompt_continues_where_it_stopped() -> None:
    scheduler = scheduler_of([LONG], slots=1, prompt_slots=1, prefill_tokens=30)
    assert chunks(scheduler.plan()) == [(0, 0, 30)]
    scheduler.abort(0)
    assert not scheduler.busy
    scheduler.add(1, LONG)
    assert chunks(scheduler.plan()) == [(0, 30, 40)]


def test_a_common_prefix_is_copied_between_prompts() -> None:
    """The copied tokens leave room for the third prompt in the same step."""
    prompts = [LONG, [*LONG[:30], *range(70, 81)], [*range(50, 70)]]
    scheduler = scheduler_of(prompts, slots=3, prompt_slots=3, prefill_tokens=40)
    plan = scheduler.plan()
    assert plan.copies == [] and chunks(plan) == [(0, 0, 40)]
    plan = scheduler.plan()
    assert plan.copies == [(0, 1, 30)] and chunks(plan) == [(1, 30, 40), (2, 0, 19)]


def test_copies_of_one_plan_read_slots_that_it_does_not_fill() -> None:
    """The plan fills slots 0 and 1. Slot 0 is the first one with the beginning of the prompt of slot 1."""
    scheduler = Scheduler(slots=3, prompt_slots=3, prefill_tokens=200)
    for request, prompt in enumerate(([91, 92], [93, 94], LONG, [*LONG[:30], 77, 78], [*LONG[:30], 88, 89])):
        scheduler.add(request, prompt)
    scheduler.plan()
    scheduler.finish({0, 1})
    assert scheduler.plan().copies == [(2, 0, 30), (2, 1, 30)]
