"""The answers that the report card of the reward model scores: held-out pairs, and changed and generated answers."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from engine import distributed
from pipeline.data.encode import PairItem
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.evaluation.pair_accuracy import Card, Scored, accuracy
from pipeline.evaluation.report_card import (
    Judged,
    agreement,
    calibration,
    changed_answers,
    level,
    margin_by_length,
)
from pipeline.evaluation.samples import SAMPLES, Sample, read_samples
from pipeline.files import write_json
from pipeline.stages.data import on_rank_zero

CARD = "card.json"
ScorePairs = Callable[[Sequence[PairItem]], list[Scored]]


def write_card(
    folder: Path,
    held_out: Sequence[Scored],
    score: ScorePairs,
    tokenizer: ChatTokenizer,
    *,
    reference: dict[str, float],
    penalty: float,
    max_length: int,
) -> None:
    """Write card.json to `folder`, the folder of the stage. Collective: every rank calls this function.

    held_out: the held-out pairs with their scores
    score: returns the scores of pairs
    reference: mean and standard deviation of the scores of reference answers
    penalty: `ppo.missing_end_penalty`, in standard deviations
    """
    items = [each.pair for each in held_out]
    unfinished = score_each(score, [cut_in_half(item, tokenizer.end_id) for item in items], items)
    others = score_each(score, [answer_of_next(items, index, max_length) for index in range(len(items))], items)
    samples = on_rank_zero(lambda: read_samples(folder.parent / "sft" / SAMPLES))
    card: Card = {
        "accuracy": accuracy(held_out),
        "calibration": calibration(held_out),
        "margin_by_length": margin_by_length(held_out),
        "judge": None,
        "scores": {
            "chosen": level([each.chosen for each in held_out]),
            "rejected": level([each.rejected for each in held_out]),
            "unfinished": changed_answers(held_out, unfinished, penalty=penalty * (reference["reward_std"] or 1.0)),
            "other_prompt": changed_answers(held_out, others),
        },
        "temperatures": list(dict.fromkeys(sample.temperature for sample in samples)),
        **reference,
    }
    for model in ("sft", "base"):
        graded = _scored_samples(samples, model, score, tokenizer, max_length=max_length)
        card["scores"][model] = level([value for _, value in graded])
        if model == "sft":
            gold = [Judged(each.prompt, value, each.gold[model]) for each, value in graded if model in each.gold]
            card["judge"] = agreement(gold)
    if distributed.is_rank_zero():
        write_json(folder / CARD, card)


def score_each(score: ScorePairs, ids: Sequence[np.ndarray], items: Sequence[PairItem]) -> list[float]:
    """Return the score of each sequence. Both sides of a pair are the same, and share their computation."""
    pairs = [PairItem(each, each, 0.0, item.source, 0) for each, item in zip(ids, items, strict=True)]
    return [each.chosen for each in score(pairs)]


def cut_in_half(item: PairItem, end_id: int) -> np.ndarray:
    """Return the prompt with the first half of the chosen answer, as PPO scores a cut answer: `end_id` ends it."""
    count = max(1, (len(item.chosen) - item.prompt) // 2)
    cut = item.chosen[: item.prompt + count].copy()
    cut[-1] = end_id
    return cut


def answer_of_next(items: Sequence[PairItem], index: int, max_length: int) -> np.ndarray:
    """Return the prompt of a pair with the chosen answer to the next other prompt, cut to `max_length` tokens.

    Held-out pairs are in the order of their prompts, so the next pair may have the same prompt.
    """
    prompt = items[index].chosen[: items[index].prompt]
    following = map(items.__getitem__, chain(range(index + 1, len(items)), range(index)))
    unlike = (each for each in following if not np.array_equal(each.chosen[: each.prompt], prompt))
    other = next(unlike, items[(index + 1) % len(items)])
    return np.concatenate([prompt, other.chosen[other.prompt :]])[:max_length]


def _scored_samples(
    samples: Sequence[Sample], model: str, score: ScorePairs, tokenizer: ChatTokenizer, *, max_length: int
) -> list[tuple[Sample, float]]:
    """Return the answers of a model to held-out prompts that fit into `max_length`, with their scores."""
    answered = [sample for sample in samples if model in sample.answers]
    prompts = tokenizer.encode_prompts([sample.prompt for sample in answered])
    answers = tokenizer.encode_answers([sample.answers[model] for sample in answered])
    ids = [np.array([*prompt, *answer], dtype=np.int32) for prompt, answer in zip(prompts, answers, strict=True)]
    fitting = [(sample, each) for sample, each in zip(answered, ids, strict=True) if len(each) <= max_length]
    pairs = [PairItem(each, each, 0.0, "", 0) for _, each in fitting]
    return [(sample, each.chosen) for (sample, _), each in zip(fitting, score(pairs), strict=True)]
