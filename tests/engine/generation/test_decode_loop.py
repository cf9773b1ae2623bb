"""The decode loop: chunked prefill, shared prompts, slots and windows do not change an answer.

Answers are compared with full forwards of transformers, and sampled answers with the definition in float64.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.generation import attention, decode_loop
from engine.generation.attention import DecodeRows, StepTokens
from engine.generation.decode_loop import DecodeLoop
from engine.generation.decode_step import SlotModel
from engine.generation.generator import Generation, Generator
from engine.generation.kv_cache import CacheSize, KVCache
from engine.generation.sampling import Sampling, combine_seeds, uniforms
from engine.generation.scheduler import Chunk
from tests.engine.generation.families import (
    ENDS,
    build,
    greedy_by_definition,
    plain_logits,
    ragged_prompts,
    use_decode_attention,
)
from tests.engine.kernels.test_sample import filtered

PROMPTS = ragged_prompts(3, 11, 7, 1, 11, 5, 2, 14)
SEEDS = [4, 9, 2, 7, 0, 11, 3, 5]
STREAMS = list(range(len(PROMPTS)))
GREEDY = Sampling(12, temperature=0, end_ids=ENDS)
RANDOM = Sampling(12, temperature=0.8, end_ids=ENDS, seed=6)
NO_ROWS = DecodeRows(*torch.zeros(9, 0, dtype=torch.int64))


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build("llama")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[StepTokens]:
    """Record the steps that run."""
    seen: list[StepTokens] = []
    call = SlotModel.__call__

    def record(self: SlotModel, ids: Tensor, positions: Tensor, step: StepTokens) -> Tensor:
        assert len(ids) == len(step.rows.slots) + sum(len(chunk.tokens) for chunk in step.chunks)
        seen.append(step)
        return call(self, ids, positions, step)

    monkeypatch.setattr(SlotModel, "__call__", record)
    return seen


def loop_of(generator: Generator, *, windows: bool = False) -> DecodeLoop:
    """Return the loop of a generator. With `windows` it launches several steps at a time, as with CUDA graphs."""
    loop = generator.backend
    assert isinstance(loop, DecodeLoop)
    loop.use_graphs = windows
    return loop


def windowed_generator(model: nn.Module, cache_bytes: int | None = None) -> Generator:
    generator = Generator(model, "cpu", cache_bytes)
    loop_of(generator, windows=True)
    return generator


def assert_greedy(model: nn.Module, prompts: Sequence[list[int]], answers: Sequence[Generation]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, logprobs = greedy_by_definition(model, prompt, answer.token_ids, GREEDY.max_new_tokens)
        assert answer.token_ids == tokens
        assert answer.logprobs == pytest.approx(logprobs, abs=2e-4)


def assert_equal(actual: Sequence[Generation], expected: Sequence[Generation]) -> None:
    for answer, wanted in zip(actual, expected, strict=True):
        assert answer.token_ids == wanted.token_ids and answer.finished == wanted.finished
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=2e-4)


@pytest.mark.parametrize(
    ("family", "slots", "chunk", "kernels"),
    [
        ("opt", 1, 1024, "C"),
        ("mistral", 3, 4, "C"),
        ("gemma2", 3, 4, "C"),
        ("mixtral", 1, 1024, "C"),
        ("opt", 5, 9, "torch"),
        ("mistral", 5, 9, "torch"),
    ],
)
def test_few_slots_and_chunked_prompts_give_the_greedy_tokens(
    family: str, slots: int, chunk: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refilled slots contain stale keys of earlier sequences. Chunks attend to cached keys within the window."""
    use_decode_attention(kernels, monkeypatch)
    if kernels == "torch":
        monkeypatch.setattr(attention, "ragged_attention", lambda *_, **__: None)
    monkeypatch.setitem(decode_loop.PREFILL_TOKENS, "cpu", chunk)
    monkeypatch.setattr(attention, "MASKED_QUERIES", 3)
    model = build(family)
    assert_greedy(model, PROMPTS, Generator(model, "cpu").generate(PROMPTS, GREEDY, STREAMS, batch_size=slots))


@pytest.mark.parametrize(
    ("family", "chunk", "window", "slots"),
    [("gpt2", 9, 1, 3), ("mistral", 9, 3, 1), ("gemma3_text", 9, 8, 3), ("mixtral", 1024, 8, 64)],
)
def test_windows_of_steps_change_no_answer(
    family: str, chunk: int, window: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the code that a GPU captures without capturing it."""
    monkeypatch.setitem(decode_loop.PREFILL_TOKENS, "cpu", chunk)
    monkeypatch.setattr(decode_loop, "WINDOW", window)
    model = build(family)
    expected = Generator(model, "cpu").generate(PROMPTS, RANDOM, SEEDS, slots)
    assert_equal(windowed_generator(model).generate(PROMPTS, RANDOM, SEEDS, slots), expected)


def test_a_window_outlasts_an_answer_that_fills_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts run in chunks of different steps, so that one answer is full in the middle of a window."""
    use_decode_attention("torch", monkeypatch)
    monkeypatch.setitem(decode_loop.PREFILL_TOKENS, "cpu", 9)
    model, sampling = build("llama", max_position_embeddings=160), replace(RANDOM, max_new_tokens=64, end_ids=())
    generator = windowed_generator(model)
    answers = generator.generate(PROMPTS[:5], sampling, SEEDS[:5], 3)
    cache = loop_of(generator, windows=True).cache
    assert cache is not None and cache.size.answer_capacity == 64
    assert_equal(answers, Generator(model, "cpu").generate(PROMPTS[:5], sampling, SEEDS[:5], 3))


def test_each_token_is_computed_exactly_once(llama: nn.Module, steps: list[StepTokens]) -> None:
    answers = Generator(llama, "cpu").generate(PROMPTS, GREEDY, STREAMS, batch_size=3)
    ran = steps[2:]  # the first two steps are the loop's trial
    tokens = [len(step.rows.slots) + sum(len(chunk.tokens) for chunk in step.chunks) for step in ran]
    assert sum(tokens) == sum(len(p) + len(a.token_ids) - 1 for p, a in zip(PROMPTS, answers, strict=True))
    busy = [len(step.rows.slots) for step in ran]
    assert max(busy) == 3
    last_prompt = max(index for index, step in enumerate(ran) if step.chunks)
    assert all(rows == 3 for rows in busy[: last_prompt + 1]), "a slot was idle while a prompt waited"


@pytest.mark.parametrize(
    ("family", "longest", "chunk", "windows", "kernels"),
    [
        ("opt", 30, 1024, False, "C"),
        ("gemma3_text", 30, 1024, True, "torch"),
        ("opt", 140, 60, True, "torch"),
        ("gemma3_text", 140, 60, False, "C"),
    ],
)
def test_samples_share_their_prompt(
    family: str, longest: int, chunk: int, windows: bool, kernels: str, steps: list[StepTokens],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A prompt is computed once and cached once for any number of slots, whenever its samples start."""
    use_decode_attention(kernels, monkeypatch)
    monkeypatch.setitem(decode_loop.PREFILL_TOKENS, "cpu", chunk)
    model = build(family, max_position_embeddings=160)
    prompts = [[7], *ragged_prompts(longest, longest - 9)]
    sampling = replace(RANDOM, repetition_penalty=1.6)
    generator = Generator(model, "cpu")
    loop = loop_of(generator, windows=windows)
    steps.clear()
    shared = generator.generate(prompts, sampling, list(range(21)), batch_size=5, samples=7)
    assert sum(len(c.tokens) for step in steps for c in step.chunks) == sum(len(prompt) - 1 for prompt in prompts)
    if chunk < longest:
        assert any(step.chunks and len(step.rows.slots) for step in steps), "no forward had prompt and decode tokens"
    firsts = [step.rows.firsts.tolist() for step in steps]
    assert any(len(set(each)) < len(each) for each in firsts), "no prompt was read once for several rows"
    assert loop.cache is not None and loop.cache.size == CacheSize(3, 192 if longest > 128 else 64, 5 + 1, 64)
    single = Generator(model, "cpu")
    separate = [single.generate([prompts[i // 7]], sampling, [i])[0] for i in range(21)]
    assert_equal(shared, separate)
    assert len({tuple(answer.token_ids) for answer in shared}) > 14


def test_a_common_prefix_is_copied(llama: nn.Module, steps: list[StepTokens], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second prompt starts in the second step. The third one starts when a slot is free."""
    monkeypatch.setitem(decode_loop.PREFILL_TOKENS, "cpu", 20 + 4)
    start, *rest = ragged_prompts(20, 3, 4, 5)
    prompts = [start + end for end in rest]
    assert_greedy(llama, prompts, Generator(llama, "cpu").generate(prompts, GREEDY, [0, 1, 2], batch_size=2))
    computed = [len(chunk.tokens) for step in steps[2:] for chunk in step.chunks]
    assert computed == [20 + 4, 3, 2], "20 tokens of the second and third prompt must be copied"


@pytest.mark.parametrize("windows", [False, True])
def test_the_cache_stays_within_its_bound(llama: nn.Module, windows: bool) -> None:
    """With little memory, the loop caches fewer prompts and runs fewer sequences."""
    token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    for blocks, sizes in ((3, (1, 2)), (7, (3, 4)), (99, (8, 9))):
        generator = Generator(llama, "cpu", cache_bytes=blocks * 64 * token + 5)
        loop = loop_of(generator, windows=windows)
        assert loop.token_bytes == token
        assert_greedy(llama, PROMPTS, generator.generate(PROMPTS, GREEDY, STREAMS, 8))
        assert loop.cache is not None and (loop.cache.size.prompt_slots, loop.cache.size.answer_slots) == sizes
        assert sum(tensor.nbytes for tensor in generator.backend.memory()[1]) <= blocks * 64 * token
        generator.release()
        assert loop.cache is None and loop.memory() == ([], [], 0)


def test_a_cache_too_small_for_a_sequence_runs_one_and_warns(
    llama: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    generator = Generator(llama, "cpu", cache_bytes=100)
    for _ in range(2):
        assert_greedy(llama, PROMPTS, generator.generate(PROMPTS, GREEDY, STREAMS))
    (record,) = caplog.records
    held = sum(tensor.nbytes for tensor in generator.backend.memory()[1])
    assert f"may take 100 bytes (cache_bytes), and one sequence takes {held} bytes" in record.getMessage()


ALL_SETTINGS = Sampling(
    10, temperature=0.8, top_k=20, top_p=0.9, min_p=0.2, repetition_penalty=1.4, min_new_tokens=3, end_ids=ENDS,
    stop=("4>",), seed=5,
)  # fmt: skip


def text(token_ids: list[int]) -> str:
    return "".join(f"<{token}>" for token in token_ids)


def sample_by_definition(
    model: nn.Module, prompt: list[int], answer: Sequence[int], how: Sampling, sample_seed: int
) -> tuple[list[int], list[float]]:
    """Sample each token after the tokens of `answer`, in float64: repetition penalty, minimal length, filtered softmax.

    The cumulative distribution is inverted at the uniform number of the sample seed.
    """
    ids, logprobs = list(prompt), []
    for position, logits in enumerate(plain_logits(model, prompt, answer)[: how.max_new_tokens]):
        for token in set(ids):
            logits[token] *= how.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        if position < how.min_new_tokens:
            logits[list(how.end_ids)] = float("-inf")
        if how.temperature == 0:
            token, logprob = int(logits.argmax()), float(logits.log_softmax(-1).max())
        else:
            probabilities = filtered(logits, how.temperature, how.top_k, how.top_p, how.min_p)
            number = uniforms(torch.tensor([combine_seeds(how.seed, sample_seed)]), position).double()
            token = int((probabilities.cumsum(0) <= number).sum())
            logprob = float(probabilities[token].log())
        ids.append(token)
        logprobs.append(logprob)
        sampled = ids[len(prompt) :]
        enough = len(sampled) >= how.min_new_tokens
        if token in how.end_ids or (enough and text(sampled).endswith(how.stop or ("none",))):
            break
        if sampled != list(answer[: position + 1]):
            break  # the other logits are those of the wrong answer
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("family", ["llama", "bloom"])  # the decode loop, and transformers' generate
def test_all_settings_combined_equal_the_definition(family: str) -> None:
    model = build(family)
    rollouts = Generator(model, "cpu")
    for how in (Sampling(10, temperature=0, repetition_penalty=1.7), ALL_SETTINGS, replace(ALL_SETTINGS, end_ids=())):
        answers = rollouts.generate(PROMPTS, how, STREAMS, batch_size=3, text=text)
        for prompt, stream, answer in zip(PROMPTS, STREAMS, answers, strict=True):
            tokens, logprobs = sample_by_definition(model, prompt, answer.token_ids, how, stream)
            assert answer.token_ids == tokens and answer.logprobs == pytest.approx(logprobs, abs=2e-4)
        plain = rollouts.generate(PROMPTS, replace(how, repetition_penalty=1.0), STREAMS, text=text)
        assert [a.token_ids for a in plain] != [a.token_ids for a in answers], (
            "the penalty has no effect on these answers"
        )
        assert any(a.finished for a in answers) == (how.temperature > 0)


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_chunks_attend_as_the_definition(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of new and of continued prompts, in one kernel call and with small masks, against a float64 loop."""
    monkeypatch.setattr(attention, "MASKED_QUERIES", 4)
    torch.manual_seed(0)
    chunks = [Chunk(0, [0] * 10, 21), Chunk(1, [0] * 7, 0), Chunk(2, [0], 5), Chunk(3, [0] * 5, 2)]
    query, key, value = torch.randn(1, 4, 23, 8), torch.randn(1, 2, 23, 8), torch.randn(1, 2, 23, 8)
    results = []
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(attention, "ragged_attention", lambda *_, **__: None)
        cache = KVCache(CacheSize(4, 64, 2, 64), torch.device("cpu"))
        layer = cache.layer(0, key, value)
        generator = torch.Generator().manual_seed(1)
        for states in (layer.prompt_keys, layer.prompt_values):
            states.copy_(torch.randn(states.shape, generator=generator))
        module = nn.Module()
        module.layer_idx = 0
        step = StepTokens(cache, NO_ROWS, chunks)
        how: dict[str, Any] = {"scaling": 0.4, "sliding_window": window, "softcap": softcap}
        results.append(attention.slot_attention(module, query, key, value, step=step, **how)[0][0])
        begin = 0
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(4):
                    k = layer.prompt_keys[chunk.slot, head // 2, first : position + 1].double()
                    scores = 0.4 * (k @ query[0, head, begin].double())
                    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                    right = (
                        scores.softmax(0) @ layer.prompt_values[chunk.slot, head // 2, first : position + 1].double()
                    )
                    torch.testing.assert_close(results[-1][begin, head].double(), right, atol=1e-5, rtol=0)
                begin += 1


@pytest.mark.parametrize("kernels", ["C", "torch"])
def test_capped_scores_of_a_bf16_model(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and its answer attend as in float64, with scores around the soft cap, where steps of bf16 are large."""
    use_decode_attention(kernels, monkeypatch)
    model = build("gemma2", attn_logit_softcapping=50.0, query_pre_attn_scalar=1).bfloat16()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(32 if "q_proj" in name else 1)
    right, calls = attention.slot_attention, dict[int, list[list[Tensor]]]()

    def recorded(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **how: Any) -> Any:
        out = right(module, query, key, value, *rest, **how)
        tokens = [query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), out[0]]
        calls.setdefault(module.layer_idx, []).append([tensor[0].double() for tensor in tokens])
        return out

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, recorded)
    generator = Generator(model, "cpu")
    assert generator.fallback is None
    calls.clear()  # of the trial
    generator.generate(ragged_prompts(24), GREEDY, [0])
    positions = torch.arange(len(torch.cat([call[0] for call in calls[0]])))
    distances = positions[:, None] - positions
    for index, window in enumerate((6, len(positions))):
        query, key, value, out = (torch.cat(tokens) for tokens in zip(*calls[index], strict=True))
        key, value = (states.repeat_interleave(2, 1) for states in (key, value))
        scores = 50 * torch.tanh(torch.einsum("nhd,thd->hnt", query, key) / 50)
        assert scores.abs().median() > 16
        scores = scores.masked_fill((distances < 0) | (distances >= window), float("-inf"))
        expected = torch.einsum("hnt,thd->nhd", scores.softmax(-1), value)
        torch.testing.assert_close(out, expected, atol=0.01 * value.std().item(), rtol=0.01)


@pytest.mark.parametrize("windows", [False, True])
def test_a_long_prompt_does_not_delay_decoding(
    llama: nn.Module, windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the second prompt runs in ten chunks, the first sequence decodes one token in each of these forwards."""
    monkeypatch.setitem(decode_loop.PREFILL_TOKENS, "cpu", 5)
    monkeypatch.setattr(decode_loop, "WINDOW", 1)
    generator, how = Generator(llama, "cpu"), Sampling(40)
    loop_of(generator, windows=windows)
    sampled = [
        {token.request for token in step}
        for step in generator.run([*ragged_prompts(20), ragged_prompts(20, 24)[1]], how, [0, 1], 2, lambda *_: False)
    ]
    began = next(index for index, requests in enumerate(sampled) if len(requests) == 2)
    assert sampled[:began] == [sampled[0]] * began and 4 <= began <= 10


def test_weights_at_new_addresses_get_new_steps(llama: nn.Module) -> None:
    model = copy.deepcopy(llama)
    generator = windowed_generator(model)
    loop = loop_of(generator, windows=True)
    generator.generate(PROMPTS, RANDOM, SEEDS)
    before = loop._step
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    generator.refresh()
    assert_equal(generator.generate(PROMPTS, RANDOM, SEEDS), Generator(model, "cpu").generate(PROMPTS, RANDOM, SEEDS))
    assert loop._step is before
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    generator.refresh()
    assert_equal(generator.generate(PROMPTS, RANDOM, SEEDS), Generator(model, "cpu").generate(PROMPTS, RANDOM, SEEDS))
    assert loop._step is not before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": None}, "sliding window"),
        ({"s_aux": torch.ones(4)}, "needs s_aux"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_unsupported_attention_falls_back_with_a_warning(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("mistral", sliding_window=6)
    right = attention.slot_attention

    def changed(module: nn.Module, *states: Tensor, **rest: Any) -> Any:
        return right(module, *states, **(rest | changes))

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, changed)
    monkeypatch.setattr("engine.generation.generator._warned", set())
    for _ in range(2):
        rollouts = Generator(model, "cpu")
        assert rollouts.fallback is not None and reason in rollouts.fallback
        rollouts.refresh()
    assert [record.getMessage().count("padded batches") for record in caplog.records] == [1], (
        "there must be one warning"
    )
    assert_greedy(model, PROMPTS, rollouts.generate(PROMPTS, GREEDY, STREAMS))
