"""Generation against full forwards of transformers for every family; answers do not depend on the batch."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.generation import decode_loop
from engine.generation import prepacked_linears as linear
from engine.generation.decode_step import SlotModel
from engine.generation.generator import Generation, Generator
from engine.generation.sampling import Sampling
from tests.engine.generation.families import (
    ENDS,
    FAMILIES,
    build,
    greedy_by_definition,
    ragged_prompts,
    use_decode_attention,
)

PROMPTS = ragged_prompts(3, 11, 7, 1, 11, 5, 2, 14)
STREAMS = list(range(len(PROMPTS)))
GREEDY = Sampling(12, temperature=0, end_ids=ENDS)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build("llama")


def assert_equal(answer: Generation, tokens: list[int], logprobs: list[float]) -> None:
    assert answer.token_ids == tokens
    assert answer.finished == (tokens[-1] in ENDS)
    assert answer.logprobs == pytest.approx(logprobs, abs=2e-4)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [*((family, "C") for family in FAMILIES), *((family, "torch") for family in ("opt", "llama", "mistral", "gemma2"))],
)
def test_greedy_equals_the_plain_forward(family: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts have different lengths, sliding windows are shorter than them, and the padding token ends answers."""
    use_decode_attention(kernels, monkeypatch)
    model = build(family)
    answers = Generator(model, "cpu").generate(PROMPTS, GREEDY, STREAMS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_equal(answer, *greedy_by_definition(model, prompt, answer.token_ids, GREEDY.max_new_tokens))
    single = Generator(model, "cpu").generate(PROMPTS, replace(GREEDY, max_new_tokens=1), STREAMS)
    for one, answer in zip(single, answers, strict=True):
        assert_equal(one, answer.token_ids[:1], answer.logprobs[:1])
    assert len({tuple(a.token_ids) for a in answers}) > 4, "the answers must differ between prompts"


@pytest.mark.parametrize("family", ["opt", "llama", "gemma2", "bloom"])
def test_an_answer_does_not_depend_on_its_batch(family: str) -> None:
    rollouts = Generator(build(family), "cpu")
    sampling = Sampling(12, temperature=1.2, end_ids=ENDS, seed=4)
    full = rollouts.generate(PROMPTS, sampling, STREAMS)
    for batch_size in (1, 3):
        for one, other in zip(rollouts.generate(PROMPTS, sampling, STREAMS, batch_size), full, strict=True):
            assert_equal(one, other.token_ids, other.logprobs)
    order = [5, 2, 7, 0, 1, 6, 4, 3]
    permuted = rollouts.generate([PROMPTS[i] for i in order], sampling, order)
    for one, position in zip(permuted, order, strict=True):
        assert_equal(one, full[position].token_ids, full[position].logprobs)
    lengths = {len(answer.token_ids) for answer in full}
    assert len(lengths) > 3, "answers must have different lengths"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_an_answer_in_16_bit_does_not_depend_on_its_batch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch size, the chunks of prefill and the share of a rank do not change an answer in bf16."""
    if not linear.has_in_place_kernel():
        pytest.skip("no C compiler, or a processor that is left to PyTorch")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 128}
    rollouts = Generator(build(family, **sizes).bfloat16(), "cpu")
    common, *ends = ragged_prompts(18, 1, 5, 20, 33, 12, 27)
    prompts = [*ends, *(common + end for end in ends[:3]), ends[2], common]
    sampling, streams = Sampling(8, end_ids=ENDS[:2], seed=9, top_p=0.95), list(range(len(prompts)))
    full = [a.token_ids for a in rollouts.generate(prompts, sampling, streams)]
    for slots, chunk in ((1, 1024), (3, 1024), (5, 13), (10, 64)):
        monkeypatch.setitem(decode_loop.PREFILL_TOKENS, "cpu", chunk)
        again = rollouts.generate(prompts, sampling, streams, batch_size=slots)
        assert [a.token_ids for a in again] == full
    for share in (slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)):  # the shares of three ranks
        again = rollouts.generate(prompts[share], sampling, streams[share])
        assert [a.token_ids for a in again] == full[share]


def test_streams_and_seeds_make_answers_differ(llama: nn.Module) -> None:
    rollouts, sampling = Generator(llama, "cpu"), Sampling(8, seed=4)
    same = [PROMPTS[1]] * 4
    first = [a.token_ids for a in rollouts.generate(same, sampling, [0, 1, 2, 0])]
    assert first[0] == first[3]
    assert len({tuple(ids) for ids in first}) == 3
    other = [a.token_ids for a in rollouts.generate(same, replace(sampling, seed=5), [0, 1, 2, 0])]
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_streaming_gives_the_tokens_of_generate(llama: nn.Module) -> None:
    rollouts, sampling = Generator(llama, "cpu"), Sampling(12, end_ids=ENDS, seed=4)
    for stream in range(4):
        full = rollouts.generate([PROMPTS[1]], sampling, [stream])[0]
        assert list(rollouts.stream(PROMPTS[1], sampling, stream)) == full.token_ids


def test_a_call_ends_a_stream_that_began_before(llama: nn.Module) -> None:
    """The stream would continue with the tokens of the other prompt, which has its slot now."""
    generator, (first, second) = Generator(llama, "cpu"), ragged_prompts(9, 12)
    stream = generator.stream(first, Sampling(8))
    next(stream)
    assert len([*generator.stream(second, Sampling(8))]) == 8
    with pytest.raises(RuntimeError, match="another call of this generator has begun"):
        next(stream)


def test_an_interrupted_rollout_leaves_the_generator_as_it_was(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt arrives in a prefill, before a decode step or after one."""
    rollouts, sampling = Generator(llama, "cpu"), Sampling(9, end_ids=ENDS, seed=4)
    expected = [a.token_ids for a in rollouts.generate(PROMPTS, sampling, STREAMS, 3)]
    forward, calls = SlotModel.__call__, itertools.count()

    def interrupted(*step: Any) -> torch.Tensor:
        now = next(calls)
        if now == before:
            raise KeyboardInterrupt
        logits = forward(*step)
        if now == behind:
            raise KeyboardInterrupt
        return logits

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for before, behind in ((2, None), (5, None), (None, 1), (None, 6), (None, None)):
        calls = itertools.count()
        hook = None if before or behind else llama.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(SlotModel, "__call__", interrupted)
            rollouts.generate(PROMPTS, sampling, STREAMS, 3)
        if hook is not None:
            hook.remove()
        assert llama(torch.tensor(PROMPTS[:1])).logits.isfinite().all(), "the model's own attention is not restored"
        assert [a.token_ids for a in rollouts.generate(PROMPTS, sampling, STREAMS, 3)] == expected


def test_invalid_arguments_are_refused(llama: nn.Module) -> None:
    rollouts = Generator(llama, "cpu")
    assert rollouts.generate([], GREEDY, []) == []
    with pytest.raises(ValueError, match="at least one token"):
        rollouts.generate([[3], []], GREEDY, [0, 1])
    with pytest.raises(ValueError, match="as many sample_seeds"):
        rollouts.generate(PROMPTS, GREEDY, [0])
    with pytest.raises(ValueError, match="64 positions"):
        rollouts.generate([[3] * 60], GREEDY, [0])


def test_a_gpu_that_is_not_the_current_one_is_refused(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    Generator(llama, "cuda:1"), Generator(llama, "cuda")
    with pytest.raises(ValueError, match=r"set_device\(0\)"):
        Generator(llama, "cuda:0")


def test_nan_weights_stop_the_rollout() -> None:
    model = build("gpt2")
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        Generator(model, "cpu").generate(PROMPTS, Sampling(2), STREAMS)
