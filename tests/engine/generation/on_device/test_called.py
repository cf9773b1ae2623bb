"""Steps that are called, as on GPUs where the generator is streamed or split: on a CPU, against the slot decoder."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.generation import slot_decoder
from engine.generation.cache import slots as slot_cache
from engine.generation.on_device import called
from engine.generation.on_device.called import Mixed
from engine.generation.rollouts import Rollouts
from engine.generation.sampling import Sampling
from tests.engine.generation.families import ENDS, build, ragged_prompts

DRAWN = Sampling(12, temperature=0.8, end_ids=ENDS, seed=6)
PENALISED = replace(DRAWN, temperature=0, repetition_penalty=1.6)
STOPPED = replace(DRAWN, min_new_tokens=5, stop=("9>",))


def text(token_ids: list[int]) -> str:
    return "".join(f"<{token}>" for token in token_ids)


@pytest.mark.parametrize("family", ["opt", "llama", "mistral", "gemma2"])
@pytest.mark.parametrize(("longest", "chunk"), [(14, 9), (140, 60)])
def test_samples_share_their_prompt(family: str, longest: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks beside sequences that decode, with fewer slots than samples: a prompt runs once and is cached once."""
    monkeypatch.setitem(slot_decoder.PREFILL_TOKENS, "cpu", chunk)
    monkeypatch.setattr(slot_cache, "QUERIES", 5)
    model = build(family, max_position_embeddings=160)
    plain, ours = Rollouts(model, "cpu"), Rollouts(model, "cpu")
    assert ours.fallback is None and ours._slots is not None
    ours._slots.shares = True
    forward, steps = ours._slots._called, list[Mixed]()

    def watched(name: str, ids: Sequence[int], step: Any, keep: Sequence[int]) -> torch.Tensor:
        assert name == called.NAME and len(ids) == len(step.positions)
        steps.append(step)
        return forward(name, ids, step, keep)

    ours._slots._called = watched  # type: ignore[method-assign]
    prompts = [[7], *ragged_prompts(longest, longest - 9)]
    for how in (DRAWN, PENALISED, STOPPED):
        steps.clear()
        found = ours.generate(prompts, how, list(range(21)), batch_size=5, samples=7, text=text)
        ran = [chunk for step in steps if step.chunks is not None for chunk in step.chunks.chunks]
        assert sum(chunk.end - chunk.begin for chunk in ran) == sum(len(prompt) for prompt in prompts)
        assert any(step.chunks is not None and step.queries is not None for step in steps), "both kinds in one forward"
        joined = {step.queries.firsts is not None for step in steps if step.queries is not None}
        assert joined == {longest >= 128}
        apart = plain.generate(prompts, how, list(range(21)), samples=7, text=text)
        assert [a.token_ids for a in found] == [a.token_ids for a in apart]
        for one, other in zip(found, apart, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-4) and one.finished == other.finished
    prompts_held, answers_held = ours._slots.caches
    assert (prompts_held.slots, answers_held.slots, answers_held.capacity) == (3, 5 + 1, 64)
    ours.release()
    assert not ours._slots.caches
