"""Decoding by slots: what runs when, what is shared, and that none of it changes an answer."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.generation import attention, packed, slot_decoder
from engine.generation.cache import slots as slot_cache
from engine.generation.cache.grouping import BY_TORCH, IN_C, Grouping, Joining, cut_into_groups
from engine.generation.cache.groups import Chunk, Family, Group
from engine.generation.cache.slots import Step
from engine.generation.on_device import rounds
from engine.generation.rollouts import Generation, Rollouts
from engine.generation.sampling import Ending, Sampling, uniforms
from engine.generation.scheduler import Answering, Scheduler
from tests.engine.generation.families import ENDS, VOCABULARY, attends_by, build, greedy_by_definition, ragged_prompts
from tests.engine.generation.test_sampling import filtered

PROMPTS = ragged_prompts(3, 11, 7, 1, 11, 5, 2, 14)
STREAMS = list(range(len(PROMPTS)))
GREEDY = Sampling(12, temperature=0, end_ids=ENDS)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build("llama")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that run."""
    steps: list[Step] = []
    forward = slot_decoder.SlotDecoder.forward

    def keep(self: slot_decoder.SlotDecoder, ids: Sequence[int], step: Step, columns: Sequence[int]) -> torch.Tensor:
        steps.append(step)
        return forward(self, ids, step, columns)

    monkeypatch.setattr(slot_decoder.SlotDecoder, "forward", keep)
    return steps


def by_definition(model: nn.Module, prompts: Sequence[list[int]], answers: Sequence[Generation]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logprobs = greedy_by_definition(model, prompt, GREEDY.max_new_tokens)
        assert answer.token_ids == tokens
        assert answer.logprobs == pytest.approx(logprobs, abs=2e-4)


@pytest.mark.parametrize("family", ["opt", "llama", "mistral", "gemma2", "gemma3_text", "mixtral"])
@pytest.mark.parametrize(("slots", "chunk"), [(1, 1024), (3, 4), (5, 9)])
@pytest.mark.parametrize("kernels", ["C", "torch"])
def test_few_slots_and_chunked_prompts_say_the_same(
    family: str, slots: int, chunk: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refilled slots hold other sequences' keys behind their own; chunks see what is cached, within the window."""
    attends_by(kernels, monkeypatch)
    monkeypatch.setitem(slot_decoder.PREFILL_TOKENS, "cpu", chunk)
    monkeypatch.setattr(slot_cache, "QUERIES", 3)
    model = build(family)
    by_definition(model, PROMPTS, Rollouts(model, "cpu").generate(PROMPTS, GREEDY, STREAMS, batch_size=slots))


def test_no_token_is_computed_twice_or_for_nothing(llama: nn.Module, watched: list[Step]) -> None:
    answers = Rollouts(llama, "cpu").generate(PROMPTS, GREEDY, STREAMS, batch_size=3)
    steps = watched[2:]  # the first two are the trial
    assert sum(len(step.slots) for step in steps) == sum(
        len(prompt) + len(answer.token_ids) - 1 for prompt, answer in zip(PROMPTS, answers, strict=True)
    )
    busy = [sum(len(group.lengths) for group in step.groups) + len(step.chunks) for step in steps]
    assert max(busy) == 3
    last_prompt = max(place for place, step in enumerate(steps) if step.chunks)
    assert all(rows == 3 for rows in busy[: last_prompt + 1]), "a slot was idle while a prompt waited"


@pytest.mark.parametrize("family", ["opt", "llama", "mistral", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("slots", [8, 3])
@pytest.mark.parametrize("kernels", ["C", "torch"])
def test_samples_share_the_prompt(
    family: str, slots: int, kernels: str, watched: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few slots a sample may begin when the others of its prompt are well on their way."""
    attends_by(kernels, monkeypatch)
    monkeypatch.setattr(Joining, "pays", lambda _, members, *__: members > 1)
    model = build(family)
    prompts = ragged_prompts(30, 21)
    sampling = Sampling(9, seed=3, end_ids=ENDS, repetition_penalty=1.3)
    streams = list(range(8))
    rollouts = Rollouts(model, "cpu")
    assert rollouts.fallback is None
    watched.clear()
    shared = rollouts.generate(prompts, sampling, streams, samples=4, batch_size=slots)
    steps = list(watched)
    apart = [rollouts.generate([prompts[i // 4]], sampling, [i])[0] for i in streams]
    assert [answer.token_ids for answer in shared] == [answer.token_ids for answer in apart]
    for one, other in zip(shared, apart, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4)
    assert len({tuple(answer.token_ids) for answer in shared}) == 8
    chunks = sum(chunk.end - chunk.begin for step in steps for chunk in step.chunks)
    late = chunks - 30 - 21  # those that were admitted later run the prompt's last token
    assert late == 0 if slots == 8 else 0 < late <= 8 - 3
    assert any(isinstance(part, Family) and len(part.lengths) > 1 for step in steps for part in step.groups)


def test_a_family_is_worth_its_cost() -> None:
    def answering(same_prompt: int, slot: int, prompt: int) -> Answering:
        return Answering(0, [0] * prompt, slot, same_prompt, home=slot, cached=prompt + 2)

    rows = [answering(0, 0, 400), *(answering(1, slot, 400) for slot in (1, 2, 4)), answering(2, 3, 5)]
    rows += [answering(2, 5, 5)]
    cut = Grouping(1536, BY_TORCH)(rows)
    assert cut[1] == Family(400, (Group(1, 3, 1, (403, 403)), Group(3, 4, 4, (403,))))
    assert [type(part) for part in cut] == [Group, Family, Group, Group]
    alone = Grouping(1536, None)(rows)
    assert all(isinstance(part, Group) for part in alone)
    assert [(part.begin, part.end) for part in alone] == [(0, 3), (3, 4), (4, 5), (5, 6)]
    assert [IN_C.pays(8, prompt, 1536) for prompt in (73, 74)] == [False, True]
    assert [IN_C.pays(2, prompt, 1536) for prompt in (128, 129)] == [False, True]
    assert not BY_TORCH.pays(1, 10**6, 1536)


def test_a_common_beginning_is_copied(llama: nn.Module, watched: list[Step]) -> None:
    start, *rest = ragged_prompts(20, 3, 4, 5)
    prompts = [start + end for end in rest]
    by_definition(llama, prompts, Rollouts(llama, "cpu").generate(prompts, GREEDY, [0, 1, 2], batch_size=2))
    assert sum(chunk.end - chunk.begin for step in watched[2:] for chunk in step.chunks) == 20 + 3 + 4 + 5


def test_the_cache_stays_within_its_bound(llama: nn.Module, watched: list[Step]) -> None:
    rollouts = Rollouts(llama, "cpu")
    assert rollouts.fallback is None and rollouts._slots is not None
    token = rollouts._slots.token_bytes
    assert token == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    bounded = Rollouts(llama, "cpu", cache_bytes=2 * 64 * token + 5)
    watched.clear()
    by_definition(llama, PROMPTS, bounded.generate(PROMPTS, GREEDY, STREAMS))
    assert watched[-1].cache.slots == 2 and watched[-1].cache.capacity == 64
    bounded.release()
    assert bounded._slots is not None and bounded._slots.cache is None


@pytest.mark.parametrize("on_device", [False, True])
def test_a_cache_too_small_for_a_sequence_runs_one_and_says_so(
    llama: nn.Module, on_device: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = Rollouts(llama, "cpu", cache_bytes=100)
    assert rollouts.fallback is None and rollouts._slots is not None
    rollouts._slots.on_device = on_device
    for _ in range(2):
        by_definition(llama, PROMPTS, rollouts.generate(PROMPTS, GREEDY, STREAMS))
    (record,) = caplog.records
    held = sum(cache.slots * cache.capacity * cache.token_bytes for cache in rollouts._slots.caches)
    assert f"may take 100 bytes, and one sequence takes {held}:" in record.getMessage()


ALL_SETTINGS = Sampling(
    10, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.4, min_new_tokens=3, end_ids=ENDS,
    stop=("4>",), seed=5,
)  # fmt: skip


def text(token_ids: list[int]) -> str:
    return "".join(f"<{token}>" for token in token_ids)


def drawn_by_definition(
    model: nn.Module, prompt: list[int], how: Sampling, stream: int
) -> tuple[list[int], list[float]]:
    """Token by token in float64: penalty, ends forbidden, then what remains of the softmax, inverted at the stream's
    number, likeliest tokens first.
    """
    ids, logprobs = list(prompt), []
    for place in range(how.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].double()
        for token in set(ids):
            logits[token] *= how.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        if place < how.min_new_tokens:
            logits[list(how.end_ids)] = float("-inf")
        if how.temperature == 0:
            token, logprob = int(logits.argmax()), float(logits.log_softmax(-1).max())
        else:
            left = filtered(logits, how.temperature, how.top_k, how.top_p, how.min_p)
            falling = left.argsort(descending=True)
            number = uniforms(how.seed, torch.tensor([stream]), place).double()
            token = int(falling[(left[falling].cumsum(0) <= number).sum()])
            logprob = float(left[token].log())
        ids.append(token)
        logprobs.append(logprob)
        said = ids[len(prompt) :]
        if token in how.end_ids or (len(said) >= how.min_new_tokens and text(said).endswith(how.stop or ("none",))):
            break
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_all_settings_together_are_the_definition(family: str) -> None:
    model = build(family)
    for how in (Sampling(10, temperature=0, repetition_penalty=1.7), ALL_SETTINGS, replace(ALL_SETTINGS, end_ids=())):
        answers = Rollouts(model, "cpu").generate(PROMPTS, how, STREAMS, batch_size=3, text=text)
        for prompt, stream, answer in zip(PROMPTS, STREAMS, answers, strict=True):
            tokens, logprobs = drawn_by_definition(model, prompt, how, stream)
            assert answer.token_ids == tokens and answer.logprobs == pytest.approx(logprobs, abs=2e-4)
        plain = Rollouts(model, "cpu").generate(PROMPTS, replace(how, repetition_penalty=1.0), STREAMS, text=text)
        assert [a.token_ids for a in plain] != [a.token_ids for a in answers], "they repeat themselves without it"
        assert any(a.finished for a in answers) == (how.temperature > 0)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_stop_strings_end_an_answer(family: str) -> None:
    rollouts = Rollouts(build(family), "cpu")
    whole = rollouts.generate(PROMPTS, Sampling(12, seed=5), STREAMS)
    stop = tuple(f"<{a.token_ids[4]}><{a.token_ids[5]}>" for a in whole[:3])

    cut = rollouts.generate(PROMPTS, Sampling(12, seed=5, stop=stop), STREAMS, batch_size=3, text=text)
    for one, other in zip(cut, whole, strict=True):
        ends = [n for n in range(1, 13) if text(other.token_ids[:n]).endswith(stop)]
        assert one.token_ids == other.token_ids[: ends[0] if ends else 12] and one.finished == bool(ends)
    assert sum(answer.finished for answer in cut) >= 3
    said = list(rollouts.stream(PROMPTS[0], Sampling(12, seed=5, stop=stop), 0, text=text))
    assert said == cut[0].token_ids


def test_the_model_is_left_as_it_was(llama: nn.Module) -> None:
    llama.config._attn_implementation = "sdpa"
    stream = Rollouts(llama, "cpu").stream(PROMPTS[0], Sampling(9))
    next(stream)
    assert llama.config._attn_implementation == "sdpa"  # even while a stream waits
    assert not any("forward" in module.__dict__ for module in llama.modules())


def test_groups_are_the_cheapest_cut() -> None:
    assert cut_into_groups([], [], 64) == []
    assert cut_into_groups([0, 1, 2, 3], [50, 50, 50, 50], 1) == [(0, 4)]
    assert cut_into_groups([0, 1, 3, 4], [50, 50, 50, 50], 1) == [(0, 2), (2, 4)]  # neighbours only
    lengths = [500, 490, 20, 22, 21, 480]
    assert cut_into_groups(list(range(6)), lengths, 1536) == [(0, 2), (2, 5), (5, 6)]


def test_masks_show_what_a_query_may_see() -> None:
    cpu = torch.device("cpu")
    assert Group(0, 2, 0, (7, 7)).seen(None, cpu) == (0, 7, None)
    assert Group(0, 2, 0, (7, 7)).seen(3, cpu) == (4, 7, None)
    first, last, mask = Group(0, 2, 0, (5, 7)).seen(3, cpu)
    assert (first, last) == (2, 7) and mask is not None
    assert mask[:, 0, 0].int().tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]


@pytest.mark.parametrize("window", [None, 3, 8])
def test_long_chunks_take_small_masks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by run each query sees what it should, whatever else the step carries."""
    monkeypatch.setattr(slot_cache, "QUERIES", 4)
    chunks, none = [Chunk(0, 10, 0, 21), Chunk(10, 17, 1, 0), Chunk(17, 18, 2, 5), Chunk(18, 23, 3, 2)], torch.empty(0)
    step = Step(slot_cache.SlotCache(4, 64), none, none, [], chunks)
    for whole in (True, False):
        for chunk in chunks:
            parts = list(step.chunk_seen(chunk, window, whole=whole))
            assert (parts[0][0].begin, parts[-1][0].end) == (chunk.begin, chunk.end)
            for part, first, last, mask in parts:
                queries = part.end - part.begin
                seen = torch.ones(queries, last - first).tril(last - first - queries).bool() if mask is None else mask
                for query, row in zip(range(part.start, part.length), seen, strict=True):
                    nearest = 0 if window is None else max(0, query - window + 1)
                    assert [first + int(key) for key in row.nonzero()] == [*range(nearest, query + 1)]
                assert mask is None or queries <= 4 or window == 8
    (stairs,) = step._stairs.values()
    assert stairs.shape == (4, 4 + (29 if window is None else window - 1))


@pytest.mark.parametrize("on_device", [False, True])
def test_a_long_prompt_holds_nobody_up(llama: nn.Module, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the second prompt runs in ten chunks, who answers the first draws a token beside each."""
    monkeypatch.setitem(slot_decoder.PREFILL_TOKENS, "cpu", 5)
    monkeypatch.setattr(rounds, "WINDOW", 1)
    rollouts = Rollouts(llama, "cpu")
    assert rollouts.fallback is None and rollouts._slots is not None
    rollouts._slots.on_device = on_device
    how = Sampling(12)
    steps = rollouts._run(ragged_prompts(50, 49), how, [0, 1], 2, Ending(how, None))
    drawn = [[place for place, _, _ in step] for step in steps]
    own = 2 if on_device else 1  # a round on a device has a step behind its prompts
    assert drawn[: own + 9] == [[0]] * (own + 9) and 1 in drawn[own + 9]


def test_a_freed_slot_goes_to_the_next_prompt() -> None:
    scheduler = Scheduler([[1, 2], [3], [4, 5, 6]], slots=2, prefill_tokens=100)
    assert scheduler.admit() == []
    chunks, members = scheduler.chunks()
    assert [(c.slot, c.begin, c.end) for c in chunks] == [(0, 0, 3), (1, 3, 5)]
    scheduler.ran(members, chunks)
    scheduler.finish({2})
    scheduler.admit()
    chunks, members = scheduler.chunks()
    assert [(c.slot, c.begin, c.end) for c in chunks] == [(0, 1, 2)] and members[0].request == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_packed_weights_give_the_same_products(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed.available(dtype):
        pytest.skip("this PyTorch packs no weights of this type here")
    monkeypatch.setitem(packed.FEWEST_NUMBERS, dtype, 1)
    model = copy.deepcopy(build(family)).to(dtype)
    ids = torch.arange(24).remainder(VOCABULARY).view(2, 12)
    packs = packed.PackedLinears(model)
    with torch.no_grad():
        plain = model(ids).logits
        with packs.applied():
            ours = model(ids).logits
        again = model(ids).logits
    layers = sum(type(module) in (nn.Linear, packed.Conv1D) for module in model.modules())
    assert len(packs) == layers > 8
    assert torch.equal(plain, again) and not any("forward" in module.__dict__ for module in model.modules())
    torch.testing.assert_close(ours, plain, atol=3e-5 if dtype == torch.float32 else 0.3, rtol=0.02)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": None}, "sliding window does not reach"),
        ({"s_aux": torch.ones(4)}, "asks for s_aux"),
        ({"is_causal": False}, "another kind"),
    ],
)
def test_what_the_slots_cannot_do_falls_back_and_says_so(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("mistral", sliding_window=6)
    right = attention.slot_attention

    def changed(module: nn.Module, *states: torch.Tensor, **rest: Any) -> Any:
        return right(module, *states, **(rest | changes))

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, changed)
    monkeypatch.setattr("engine.generation.rollouts._told", set())
    for _ in range(2):
        rollouts = Rollouts(model, "cpu")
        assert rollouts.fallback is not None and reason in rollouts.fallback
    assert [record.getMessage().count("padded batches") for record in caplog.records] == [1], "said once"
    by_definition(model, PROMPTS, rollouts.generate(PROMPTS, GREEDY, STREAMS))
