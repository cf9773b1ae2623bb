"""The padded path: what it says, and that its batches shrink."""

import pytest
import torch
from torch import nn

from engine.generation.batches import batch_decoding, padded
from engine.generation.batches.batch_decoding import run_batches
from engine.generation.batches.padded import PaddedDecoding
from engine.generation.sampling import Ending, Sampling
from tests.engine.generation.families import ENDS, build, greedy_by_definition, ragged_prompts

PROMPTS = ragged_prompts(3, 11, 7, 1, 11, 5, 2, 14)
STREAMS = list(range(len(PROMPTS)))
GREEDY = Sampling(12, temperature=0, end_ids=ENDS, pad_id=ENDS[0])


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build("llama")


def answers_of(model: nn.Module, prompts: list[list[int]], streams: list[int], batch_size: int = 64) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    where = torch.device("cpu")
    for drawn in run_batches(PaddedDecoding, model, where, prompts, GREEDY, streams, batch_size, Ending(GREEDY)):
        for place, token, _ in drawn:
            answers[place].append(token)
    return answers


@pytest.mark.parametrize("family", ["opt", "gemma2", "mistral", "bloom"])
def test_padded_answers_equal_the_plain_forward(family: str) -> None:
    model = build(family)
    for batch_size in (3, 8):
        for prompt, answer in zip(PROMPTS, answers_of(model, PROMPTS, STREAMS, batch_size), strict=True):
            assert answer == greedy_by_definition(model, prompt, GREEDY.max_new_tokens)[0]


def test_finished_rows_leave_the_batch(llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work shrinks with the live rows; what they say does not change."""
    prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]  # so that a forward of one token is a decoding step
    plain = answers_of(llama, prompts, STREAMS[1:])
    sizes: list[int] = []
    forward = PaddedDecoding._forward

    def watched(self: PaddedDecoding, token_ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if token_ids.shape[1] == 1:
            sizes.append(token_ids.shape[0])
        return forward(self, token_ids, *rest)

    monkeypatch.setattr(PaddedDecoding, "_forward", watched)
    monkeypatch.setattr(batch_decoding, "COMPACT_BELOW", 0.99)
    answers = answers_of(llama, prompts, STREAMS[1:])
    assert answers == plain
    live = [sum(len(answer) > step for answer in answers) for step in range(1, 12)]
    assert sizes == [rows for rows in live if rows > 0] and sizes[0] > sizes[-1]


def test_prompts_are_prefilled_in_groups_of_like_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert padded._prefill_groups([10, 9, 8, 7, 6, 3, 3, 1]) == [slice(0, 3), slice(3, 5), slice(5, 7), slice(7, 8)]
    monkeypatch.setattr(padded, "PREFILL_TOKENS", 25)
    assert padded._prefill_groups([10, 10, 10, 10, 10]) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert padded._prefill_groups([100]) == [slice(0, 1)]
