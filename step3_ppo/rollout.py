"""A rollout: answers that the policy generates, and the numbers that the models give them.

B sequences of a global batch, R tokens of the longest response. Every rank holds the whole rollout (some MB), so that
each rank can train on any sequence, and whitening needs no collective. The ranks share generation and scoring.
"""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from engine import Engine, Generation, Sampling, distributed
from pipeline.data.microbatches import gather_by_index, gather_rows
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import SharedError
from pipeline.evaluation.judge import Call, function_rewards, rewards_by_name
from step3_ppo.advantages import ScoredRollout
from step3_ppo.batches import Microbatch, collate, critic_values, local_microbatches, policy_logprobs
from step3_ppo.models import REWARD_MODEL, Models

Results = list[tuple[int, Tensor]]  # (index of the sequence, its numbers)


@dataclass(frozen=True)
class Scores:
    """The scores of B answers.

    total: the weighted sum of all rewards
    function: the part of the reward function; None unless the reward model scores as well
    rewards: each reward by name, before weighting
    """

    total: list[float]
    function: list[float] | None
    rewards: dict[str, list[float]]


@dataclass(frozen=True)
class Answered:
    """B prompts with S answers each, next to each other.

    prompts: indices of the B prompts
    generations: the B * S answers
    scores: the scores of the answers
    replaced: number of prompts that were replaced
    """

    prompts: list[int]
    generations: list[Generation]
    scores: Scores
    replaced: int = 0


@dataclass(frozen=True)
class Rollout(ScoredRollout):
    """Prompts with their responses, and the numbers of all models.

    prompts, responses: token ids of B sequences; a response contains its end token
    generator: (B, R) fp32, the generator's own log-probabilities
    function: (B,) fp32, the score of the reward function; None unless the reward model scores as well
    rewards: the mean of each reward by name, before weighting
    batches: this rank's micro-batches, as the models scored them
    sampled: which tokens of each response the policy sampled; None: all. The others are messages (`Episode`)
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    generator: Tensor
    function: Tensor | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    batches: list[Microbatch] = field(default_factory=list)
    sampled: list[list[bool]] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of sampled tokens of each response."""
        return [*map(len, self.responses)] if self.sampled is None else [*map(sum, self.sampled)]

    def tokens(self, indices: Sequence[int] | None = None) -> int:
        """Return the number of sampled tokens, of all sequences or of those at `indices`."""
        chosen = range(len(self)) if indices is None else indices
        return sum(self.lengths[i] for i in chosen)


def generate(
    models: Models,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    first_seed: int,
    batch_size: int,
    keep: bool = True,
    park_optimizer: bool = False,
    samples: int = 1,
    text: Callable[[list[int]], str] | None = None,
) -> list[Generation]:
    """Return `samples` answers to each prompt, next to each other, on every rank. The ranks share the work.

    Answer i uses the sample seed `first_seed` + i on any number of ranks. `text` decodes token ids, for stop strings.
    `keep` and `park_optimizer` are those of `Engine.generating`.
    """
    with models.actor.generating(keep=keep, park_optimizer=park_optimizer) as generator:
        assigned = models.actor.flip.assign([len(prompt) for prompt in prompts])
        indices = [i * samples + sample for i in assigned for sample in range(samples)]
        answers = generator.generate(
            [prompts[i] for i in assigned],
            sampling,
            sample_seeds=[first_seed + i for i in indices],
            batch_size=batch_size,
            samples=samples,
            text=text,
        )
    check_generator(models.actor)
    return gather_by_index(dict(zip(indices, answers, strict=True)))


def check_generator(actor: Engine) -> None:
    """Compare the answers of the last parity check with the trainer's forward. Raises ValueError if they differ."""
    checked = actor.flip.checked
    if not checked:
        return
    prompts, answers = [each.prompt for each in checked], [each.answer.token_ids for each in checked]
    batch = collate(prompts, answers, range(len(checked)), pad_id=0).to(actor.device)
    with actor.scoring() as module:
        logprobs, _ = policy_logprobs(module, batch, temperature=1.0)
    actor.check_generator(logprobs.split(batch.response_lengths))


def collect(
    models: Models,
    prompts: list[list[int]],
    generations: Sequence[Generation],
    *,
    temperature: float,
    pad_id: int,
    budget: int,
    scores: Scores | None = None,
    shared_forwards: Collection[str] = (),
    sampled: list[list[bool]] | None = None,
) -> Rollout:
    """Score one answer per prompt with all models, by the trainer's forward, with dropout off.

    scores: the result of `score_answers`; None: of the answers as they are generated
    shared_forwards: the roles ("actor", "critic") whose first update reuses the forwards of the scoring
        (`Engine.score_to_learn`)
    sampled: as in `Rollout`
    """
    responses = [generation.token_ids for generation in generations]
    batches = local_microbatches(
        prompts, responses, range(len(prompts)), pad_id, budget, packing=models.packing, sampled=sampled
    )

    def logprobs(module: nn.Module, batch: Microbatch) -> Results:
        return _by_sequence(batch, policy_logprobs(module, batch, temperature)[0])

    def values(module: nn.Module, batch: Microbatch) -> Results:
        return _by_sequence(batch, critic_values(module, batch))

    def score(role: str, engine: Engine, work: Callable[[nn.Module, Microbatch], Results]) -> dict[int, Tensor]:
        run = engine.score_to_learn if role in shared_forwards else engine.score
        return dict(chain.from_iterable(run(batches, work)))

    # The models that share their forwards score last: graphs that are held for the update need memory.
    scores = scores or score_answers(models, prompts, responses, pad_id=pad_id, budget=budget)
    local = dict[str, dict[int, Tensor]]()
    with models.reference_policy() as reference:
        if reference is not None:
            local["reference"] = score("reference", reference, logprobs)
    if models.critic is not None:
        local["values"] = score("critic", models.critic, values)
    local["logprobs"] = score("actor", models.actor, logprobs)
    device = models.actor.device
    tables = {name: gather_rows(rows) for name, rows in local.items()}
    tables["generator"] = {i: torch.tensor(generation.logprobs) for i, generation in enumerate(generations)}
    table = {name: distributed.to_device(_table(rows, len(prompts)), device) for name, rows in tables.items()}
    lengths = torch.tensor([len(generation.logprobs) for generation in generations])
    if models.has_rewards:
        totals = distributed.to_device(torch.tensor(scores.total), device)
    else:
        totals = (table["reference"] - table["logprobs"]).sum(1)  # both are zero after the end of an answer
    return Rollout(
        prompts=prompts,
        responses=responses,
        finished=distributed.to_device(torch.tensor([generation.finished for generation in generations]), device),
        response_mask=distributed.to_device(torch.arange(int(lengths.max()))[None] < lengths[:, None], device),
        scores=totals,
        logprobs=table["logprobs"],
        reference=table.get("reference"),
        values=table.get("values"),
        generator=table["generator"],
        function=None if scores.function is None else distributed.to_device(torch.tensor(scores.function), device),
        rewards={name: sum(values) / len(values) for name, values in scores.rewards.items()},
        batches=batches,
        sampled=sampled,
    )


def ended_answers(
    generations: Sequence[Generation], tokenizer: ChatTokenizer, stop: Sequence[str] = ()
) -> list[list[int]]:
    """Return the answers with the end that the reward model was trained on: the tokenizer's `end_id`.

    `end_id` replaces another end token, the last token of an answer that was cut off, and a stop string. The result is
    never longer than the answer.
    """
    ended = []
    for generation in generations:
        ids = generation.token_ids
        if generation.finished and ids[-1] not in tokenizer.end_ids:  # a stop string ended the answer
            ids = tokenizer.encode_answer(tokenizer.decode(ids, stop))[: len(ids)]
        ended.append([*ids[:-1], tokenizer.end_id])
    return ended


def score_answers(
    models: Models,
    prompts: list[list[int]],
    answers: list[list[int]],
    calls: Sequence[Call] = (),
    *,
    pad_id: int,
    budget: int,
    played: Sequence[dict[str, float]] | None = None,
) -> Scores:
    """Return the scores of one answer per prompt, on every rank: the weighted sum of all rewards.

    Without rewards the scores are empty.

    answers: the token ids that the reward models score
    calls: the arguments of the reward function, one for each answer
    played: the rewards of episodes, instead of calls
    """
    rewards: dict[str, list[float]] = {}
    if models.function is not None and played is not None:
        rewards = rewards_by_name(models.function, played)
    elif models.function is not None:
        rewards = function_rewards(models.function, calls)
    names = list(rewards)
    if models.rewards:
        if REWARD_MODEL in rewards:
            raise SharedError(
                f"ppo.reward_function returns a reward with the name {REWARD_MODEL}, which is the name of the reward "
                "model in ppo.reward_weights and metrics.jsonl: return it by another name"
            )
        sequences = [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]
        places = {sequence: place for place, sequence in enumerate(dict.fromkeys(sequences))}
        # Equal answers are scored once: micro-batches round differently, and GRPO would magnify the difference.
        distinct = [[*sequence] for sequence in places]
        nothing: list[list[int]] = [[] for _ in distinct]
        batches = local_microbatches(nothing, distinct, range(len(distinct)), pad_id, budget, packing=models.packing)
        scores = ensemble_scores([model_scores(engine, batches) for engine in models.rewards], models.ensemble_score)
        rewards[REWARD_MODEL] = [scores[places[sequence]] for sequence in sequences]
    unknown = [name for name in models.reward_weights if name not in rewards]
    if unknown:
        raise SharedError(
            f"ppo.reward_weights.{unknown[0]} weighs a reward that does not exist; the rewards are "
            f"{', '.join(rewards)}: remove it, or return it from ppo.reward_function"
        )
    by_function = weighted_sum({name: rewards[name] for name in names}, models.reward_weights)
    total = weighted_sum(rewards, models.reward_weights)
    return Scores(total, by_function if names and models.rewards else None, rewards)


def weighted_sum(rewards: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    """Return the sum of weight * reward for each answer. A reward without a weight has the weight 1."""
    terms = [[weights.get(name, 1.0) * value for value in values] for name, values in rewards.items()]
    return [sum(each) for each in zip(*terms, strict=True)]


def ensemble_scores(members: Sequence[Sequence[float]], combine: str) -> list[float]:
    """Return the score of each answer from those of several reward models: their mean, or the lowest ("worst").

    The lowest score is high only if no model objects (Coste et al., 2023, arXiv:2310.02743, section 3.2).
    """
    by_answer = list(zip(*members, strict=True))
    return [*map(min, by_answer)] if combine == "worst" else [*map(statistics.fmean, by_answer)]


def model_scores(reward: Engine, batches: Sequence[Microbatch]) -> list[float]:
    """Return the reward model's score of each sequence, on every rank."""

    def last_values(module: nn.Module, batch: Microbatch) -> Results:
        values = module(batch.input_ids, documents=batch.documents).flatten()
        return list(zip(batch.indices, values[batch.ends].unbind(), strict=False))

    scores = chain.from_iterable(reward.score(batches, last_values))
    return gather_by_index({index: score.item() for index, score in scores})


def _by_sequence(batch: Microbatch, values: Tensor) -> Results:
    """Split `values` (N,) of response tokens into one tensor for each sequence."""
    return list(zip(batch.indices, values.float().split(batch.response_lengths), strict=True)) if batch.indices else []


def _table(rows: dict[int, Tensor], count: int) -> Tensor:
    """Return (B, R) from one tensor for each sequence, zero after its end."""
    return nn.utils.rnn.pad_sequence([rows[i] for i in range(count)], batch_first=True)
