"""Static steps, run eagerly on a CPU, say token for token what the slot decoder says: the code that a GPU captures."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.generation import slot_decoder
from engine.generation.buckets import bucket
from engine.generation.on_device import rounds
from engine.generation.rollouts import Rollouts
from engine.generation.sampling import Sampling, under_seed, uniforms
from engine.kernels.decode_rows import CACHED, ENDED, LIMIT, NOTHING, PROMPT, STREAM
from engine.kernels.decode_rows import DRAWN as COUNT
from tests.engine.generation.families import ENDS, build, ragged_prompts

PROMPTS = ragged_prompts(3, 11, 7, 1, 11, 5, 2, 14)
STREAMS = [4, 9, 2, 7, 0, 11, 3, 5]
DRAWN = Sampling(12, temperature=0.8, end_ids=ENDS, seed=6)
SETTINGS: list[Sampling] = [
    replace(DRAWN, temperature=0),
    replace(DRAWN, top_k=20, top_p=0.9),
    replace(DRAWN, min_p=0.05, min_new_tokens=5),
    replace(DRAWN, repetition_penalty=1.6),
    replace(DRAWN, max_new_tokens=1),
]


def on_device(model: Any, cache_bytes: int | None = None) -> Rollouts:
    """A generator that decodes as it would on a GPU."""
    rollouts = Rollouts(model, "cpu", cache_bytes)
    assert rollouts.fallback is None and rollouts._slots is not None
    rollouts._slots.on_device = True
    return rollouts


def same(model: Any, ours: Rollouts, sampling: Sampling, slots: int = 3, **rest: Any) -> None:
    by_slots = Rollouts(model, "cpu").generate(PROMPTS, sampling, STREAMS, slots, **rest)
    by_steps = ours.generate(PROMPTS, sampling, STREAMS, slots, **rest)
    for one, other in zip(by_steps, by_slots, strict=True):
        assert one.token_ids == other.token_ids and one.finished == other.finished
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "mistral", "gemma2", "gemma3_text", "mixtral"])
def test_says_what_the_slot_decoder_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(slot_decoder.PREFILL_TOKENS, "cpu", 9)  # prompts in chunks, beside sequences that decode
    model = build(family)
    same(model, on_device(model), DRAWN)


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("slots", [1, 5, 64])
def test_the_host_may_look_as_seldom_as_it_likes(window: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "WINDOW", window)
    model = build("llama")
    same(model, on_device(model), DRAWN, slots)


def test_one_decoder_under_many_settings() -> None:
    """State, steps and cache are those of the calls before; more settings than are kept."""
    model = build("llama")
    ours = on_device(model)
    for sampling in [*SETTINGS, DRAWN, replace(DRAWN, seed=8), *SETTINGS[:2]]:
        same(model, ours, sampling)
    assert ours._slots is not None and ours._slots._rounds is not None
    assert len(ours._slots._rounds._replays) == rounds.SETTINGS_KEPT


def test_stop_strings() -> None:
    model = build("llama")
    whole = Rollouts(model, "cpu").generate(PROMPTS, replace(DRAWN, end_ids=()), STREAMS)
    stop = tuple(f"<{a.token_ids[4]}>" for a in whole[:3])
    same(model, on_device(model), replace(DRAWN, end_ids=(), stop=stop),
         text=lambda ids: "".join(f"<{token}>" for token in ids))  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("longest", [30, 140])
def test_samples_share_their_prompt(family: str, longest: int) -> None:
    """Each prompt runs once and is cached once, however many slots there are and whenever its samples begin."""
    model = build(family, max_position_embeddings=160)
    prompts = [[7], *ragged_prompts(longest, longest - 9)]
    sampling = replace(DRAWN, repetition_penalty=1.6)
    ours = on_device(model)
    assert ours._slots is not None
    forward, ran = ours._slots.forward, list[int]()

    def counted(token_ids: Any, *rest: Any) -> Any:
        ran.append(len(token_ids))
        return forward(token_ids, *rest)

    ours._slots.forward = counted  # type: ignore[method-assign]
    shared = ours.generate(prompts, sampling, list(range(21)), batch_size=5, samples=7)
    assert sum(ran) == sum(len(prompt) for prompt in prompts)
    caches = ours._slots._rounds.caches  # type: ignore[union-attr]
    assert caches.prompts.slots == 3 and caches.slots == 5 and caches.answers.capacity == 64
    (joined,) = (joined for _, joined in ours._slots._rounds._replays)  # type: ignore[union-attr]
    assert joined == (longest >= rounds.WORTH_JOINING)
    apart = [Rollouts(model, "cpu").generate([prompts[i // 7]], sampling, [i])[0] for i in range(21)]
    assert [a.token_ids for a in shared] == [a.token_ids for a in apart]
    for one, other in zip(shared, apart, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)


def test_a_stream_that_is_left_leaves_nothing_behind() -> None:
    model = build("llama")
    ours = on_device(model)
    next(ours.stream(PROMPTS[0], DRAWN, 1))
    same(model, ours, DRAWN)


def test_caches_stay_within_the_bound() -> None:
    """Where memory is short fewer prompts are kept, and fewer sequences run."""
    model = build("llama")
    token = 2 * 2 * 2 * 8 * 4
    for blocks, sizes in ((3, (1, 2)), (7, (3, 4)), (99, (8, 9))):
        ours = on_device(model, cache_bytes=blocks * 64 * token)
        same(model, ours, DRAWN, slots=8)
        assert ours._slots is not None
        assert tuple(cache.slots for cache in ours._slots.caches) == sizes
        held = sum(layer.keys.nbytes + layer.values.nbytes for c in ours._slots.caches for layer in c.layers.values())
        assert held <= blocks * 64 * token


def test_weights_elsewhere_take_new_steps() -> None:
    model = build("llama")
    ours = on_device(model)
    same(model, ours, DRAWN)
    before = ours._slots._rounds  # type: ignore[union-attr]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    same(model, ours, DRAWN)
    assert ours._slots._rounds is before  # type: ignore[union-attr]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    same(model, ours, DRAWN)
    assert ours._slots._rounds is not before  # type: ignore[union-attr]
    ours.release()
    assert ours._slots._rounds is None  # type: ignore[union-attr]


def test_what_has_ended_stays_and_says_nothing() -> None:
    ours = on_device(build("llama"))
    prompts = ragged_prompts(3, 4)
    ours.generate(prompts, replace(DRAWN, temperature=0, end_ids=(), max_new_tokens=3), [0, 1])
    assert ours._slots is not None and ours._slots._rounds is not None
    state = ours._slots._rounds.state
    step = next(iter(ours._slots._rounds._replays.values())).step
    before = state.rows.clone()
    assert before[:2, ENDED].tolist() == [1, 1] and before[:2, COUNT].tolist() == [3, 3]
    assert sorted(before[:2, CACHED].tolist()) == [3 + 2, 4 + 2], "the last token drawn is not cached"
    state.begin()
    state.rows[1, ENDED], state.rows[:2, LIMIT] = 0, 9
    step(torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3]]))
    said = state.said.tokens
    assert said[0, 0] == NOTHING and said[0, 1] != NOTHING and (said[1:] == NOTHING).all()
    assert state.rows[0, CACHED:PROMPT].tolist() == [*before[0, CACHED:LIMIT].tolist(), 9, 1]
    assert state.rows[1, CACHED:PROMPT].tolist() == [int(before[1, CACHED]) + 1, int(before[1, STREAM]), 4, 9, 0]
    assert state.rows[state.scratch, ENDED] == 1


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 2, 3, 5, 9, 17, 24, 25, 33, 49, 65, 97, 129)] == [
        1, 2, 4, 8, 16, 24, 24, 32, 48, 64, 96, 128, 192
    ]  # fmt: skip


def test_a_seed_is_a_shift_of_the_streams() -> None:
    streams, places = torch.tensor([[0], [5], [-3], [2**62]]), torch.arange(7)
    for seed in (0, 1, 2**64 - 1, -9):
        shifted = under_seed(seed, streams)
        assert torch.equal(uniforms(0, shifted, places), uniforms(seed, streams, places))
