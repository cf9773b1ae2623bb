"""Dynamic sampling: replace prompts whose answers all score the same.

DAPO (Yu et al., 2025, arXiv:2503.14476, section 3.2) samples until no such prompt is left. Here the rounds are bounded.
Such prompts have no advantage. The replacements are functions of (seed, step, round), so that a resumed run and every
rank choose the same prompts.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from itertools import islice

import torch

from engine import Generation
from pipeline.data.batch import epoch_order
from step3_ppo.advantages import RewardShaping, answer_scores, is_uniform
from step3_ppo.rollout import Answered, Scores


def replace_uniform(
    answered: Answered,
    sample: Callable[[list[int], int], Answered],
    shaping: RewardShaping,
    *,
    samples: int,
    rounds: int,
    count: int,
    seed: Sequence[int],
) -> Answered:
    """Return the rollout after at most `rounds` rounds of replacements.

    sample: (prompts, round from 1) -> `samples` answers to each prompt, with their scores
    count: number of training prompts
    seed: the seed and the step
    """
    prompts, generations, scores = list(answered.prompts), list(answered.generations), copy.deepcopy(answered.scores)
    used, replaced = set(prompts), 0
    for number in range(1, rounds + 1):
        places = uniform_prompts(scores.total, generations, shaping, samples=samples)
        new = new_prompts(len(places), used, count=count, seed=(*seed, number))
        if not new:
            break
        used.update(new)
        other = sample(new, number)
        for place, (index, prompt) in zip(places, enumerate(new), strict=False):
            here = slice(place * samples, (place + 1) * samples)
            there = slice(index * samples, (index + 1) * samples)
            prompts[place], generations[here] = prompt, other.generations[there]
            for column, new_column in zip(_columns(scores), _columns(other.scores), strict=True):
                column[here] = new_column[there]
        replaced += len(new)
    return Answered(prompts, generations, scores, replaced)


def _columns(scores: Scores) -> list[list[float]]:
    """Return the lists of a `Scores` with one number for each answer, the rewards in the order of their names."""
    return [
        scores.total,
        *([] if scores.function is None else [scores.function]),
        *(scores.rewards[name] for name in sorted(scores.rewards)),
    ]


def uniform_prompts(
    scores: Sequence[float], generations: Sequence[Generation], shaping: RewardShaping, *, samples: int
) -> list[int]:
    """Return the places of the prompts whose answers all have the same score, after clipping and penalties."""
    finished = torch.tensor([generation.finished for generation in generations])
    lengths = torch.tensor([len(generation.logprobs) for generation in generations])  # without messages
    shaped = answer_scores(torch.tensor(scores), finished, lengths, shaping)
    return is_uniform(shaped, samples).nonzero().flatten().tolist()


def new_prompts(wanted: int, used: Collection[int], *, count: int, seed: Sequence[int]) -> list[int]:
    """Return `wanted` of the `count` prompts that are not in `used`, or as many as there are."""
    if not wanted:
        return []
    first, *rest = seed
    order = epoch_order(count, first, 1_000_003 + sum(part * 1_009**power for power, part in enumerate(rest)))
    return [*islice((index for index in order if index not in used), wanted)]
