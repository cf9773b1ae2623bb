"""Prompts in slots of their own: who waits for which, what is freed when, and how much memory that takes."""

from engine.generation.on_device.caches import Demand
from engine.generation.on_device.sharing import SharingScheduler, firsts_of

LONG = list(range(40))


def run(scheduler: SharingScheduler) -> list[tuple[int, int, int]]:
    """A forward over the prompts that wait; what they ran, as (slot, start, length)."""
    chunks, members = scheduler.chunks()
    assert not list(scheduler.ran(members, chunks))
    return [(chunk.slot, chunk.start, chunk.length) for chunk in chunks]


def test_late_samples_run_nothing() -> None:
    scheduler = SharingScheduler([LONG, LONG, [9], LONG], slots=2, prefill_tokens=100, prompt_slots=2)
    assert scheduler.most_read == 40
    assert scheduler.admit() == [] and run(scheduler) == [(0, 0, 40)]
    assert [(s.request, s.cached, s.shared) for s in scheduler.decoding] == [(0, 40, 40), (1, 40, 40)]
    scheduler.finish({1})
    assert scheduler.admit() == [] and run(scheduler) == []
    assert [(s.request, s.slot, s.home, s.cached, s.shared) for s in scheduler.decoding] == [
        (0, 0, 0, 40, 40), (3, 1, 0, 39, 39)
    ]  # fmt: skip
    assert firsts_of(scheduler.decoding) == [0, 0]
    scheduler.finish({0})
    assert scheduler.admit() == [] and run(scheduler) == [(1, 0, 1)]
    assert [(s.request, s.slot, s.home) for s in scheduler.decoding] == [(2, 0, 1), (3, 1, 0)]
    assert firsts_of(scheduler.decoding) == [0, 1]
    scheduler.finish({2, 3})
    assert not scheduler.busy


def test_a_prompt_stays_while_it_is_read_and_until_its_slot_is_needed() -> None:
    other, third = [99, *LONG], [98, *LONG]
    scheduler = SharingScheduler([LONG, LONG, other, third], slots=2, prefill_tokens=100, prompt_slots=1)
    scheduler.admit()
    assert run(scheduler) == [(0, 0, 41)], "the second has no slot for its prompt"
    assert scheduler.admit() == [] and not scheduler.chunks()[0]
    scheduler.finish({scheduler.decoding[0].request})
    scheduler.admit()
    assert run(scheduler) == [(0, 0, 41)]
    scheduler.finish({scheduler.decoding[0].request})
    scheduler.admit()
    assert run(scheduler) == [(0, 0, 40)] and [s.request for s in scheduler.decoding] == [0, 1]
    scheduler.finish({0, 1})
    assert not scheduler.busy


def test_samples_of_a_prompt_need_no_room_of_their_own() -> None:
    scheduler = SharingScheduler([LONG, LONG], slots=2, prefill_tokens=20, prompt_slots=1)
    for chunk in ((0, 0, 20), (0, 20, 40)):
        scheduler.admit()
        assert run(scheduler) == [chunk]
    assert [s.request for s in scheduler.decoding] == [0, 1], "one waited until the other's prompt had run"


def test_a_common_beginning_is_copied_between_prompts() -> None:
    scheduler = SharingScheduler([LONG, [*LONG[:30], 77, 78]], slots=2, prefill_tokens=100, prompt_slots=2)
    assert scheduler.admit() == [] and run(scheduler) == [(0, 0, 40)]
    assert scheduler.admit() == [(0, 1, 30)] and run(scheduler) == [(1, 30, 32)]


def test_a_shared_prompt_is_counted_once() -> None:
    """8 samples of each of 100 prompts; in short memory a fourth as many prompts as sequences: s (128 + 1024 / 4)."""
    demand = Demand(prompt_tokens=1000, answer_tokens=120, prompts=100, sequences=800, slots=800)
    caches = demand.fitting(1_000_000)
    assert (caches.slots, caches.prompts.slots) == (800, 100)
    assert caches.prompts.slots * caches.prompts.capacity + caches.answers.slots * caches.answers.capacity < 206_000
    short = demand.fitting(100_000)  # 86 unshared
    assert (short.slots, short.prompts.slots) == (260, 65)
    assert demand.fitting(99_967).slots == 259, "the scratch slot is counted"
    assert demand.is_met_by(short, short.slots) and not demand.is_met_by(short, 300)
    assert demand.fitting(5).slots == 1, "one sequence runs whatever it takes"
