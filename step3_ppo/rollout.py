"""Rollouts: answers drawn from the policy, and what the models, and a reward function, say of them.

B sequences of a global batch, R the longest response, T the longest sequence. Every rank holds the whole rollout (some
MB), so that any rank can train on any row and whitening needs no collective; generating and scoring are spread over
ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from engine import Engine, Generation, Sampling
from engine.healing import Portion
from engine.parallel import dist
from engine.rollout.selfcheck import compare
from pipeline.data.batch import padded, plan
from pipeline.data.documents import Documents
from pipeline.data.portions import portion
from pipeline.data.records import Row
from pipeline.data.uploads import uploaded
from pipeline.errors import SharedError, UserError
from pipeline.reward_function import RewardFunction
from step3_ppo.models import Models

Call = tuple[str, Row]
"""What a reward function is called with: an answer's text, and the row of the data that its prompt comes from."""


@dataclass(frozen=True)
class Rows:
    """Some sequences as a forward takes them.

    places: which b sequences; input_ids (b, T), padded on the right, or (1, N) with `documents`, without padding;
    scored (N,), where the response tokens lie in the flattened ids; ends (b,), where each one's last token does;
    counts: response tokens of each.
    """

    places: list[int]
    input_ids: Tensor
    scored: Tensor
    ends: Tensor
    counts: list[int]
    documents: Documents | None = None


@dataclass(frozen=True)
class Rollout:
    """prompts, responses: token ids of B sequences, an end token included where there is one; finished (B,) says where.

    scores (B,) fp32: the reward model's, its mean over reference answers subtracted, plus the reward function's.
    function (B,) fp32: the function's part, or None where one of the two scores alone. logprobs, reference, values,
    generator (B, R) fp32, zero outside response_mask (B, R): log-probabilities under the policy that drew them (by the
    trainer's own forward), under the reference, the critic's values before each token (None without a critic), and the
    generator's own log-probabilities.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    finished: Tensor
    response_mask: Tensor
    scores: Tensor
    logprobs: Tensor
    reference: Tensor
    values: Tensor | None
    generator: Tensor
    function: Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> list[int]:
        """Tokens a sequence, prompt included."""
        return [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]

    def tokens(self, places: Sequence[int] | None = None) -> int:
        """Response tokens, of all sequences or of some."""
        chosen = range(len(self)) if places is None else places
        return sum(len(self.responses[i]) for i in chosen)


def generate(
    models: Models,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    first_stream: int,
    batch_size: int,
    keep: bool = True,
    park_optimizer: bool = False,
    samples: int = 1,
    text: Callable[[list[int]], str] | None = None,
) -> list[Generation]:
    """`samples` answers a prompt, side by side, all on every rank, the work spread over ranks. The noise belongs to the
    answer's place.

    `keep` and `park_optimizer` are those of `Engine.generating`; `text` turns token ids into text, for stop strings.
    """
    flip = models.actor.flip
    expected = (sampling.min_new_tokens + sampling.max_new_tokens) / 2
    with models.actor.generating(keep=keep, park_optimizer=park_optimizer) as rollouts:
        asked = flip.share_of([len(prompt) for prompt in prompts], expected * samples)
        places = [i * samples + sample for i in asked for sample in range(samples)]
        mine = rollouts.generate(
            [prompts[i] for i in asked],
            sampling,
            streams=[first_stream + i for i in places],
            batch_size=batch_size,
            samples=samples,
            text=text,
        )
    check_generator(models, pad_id=sampling.pad_id)
    found = {i: g for part in dist.gather_objects(list(zip(places, mine, strict=True))) for i, g in part}
    return [found[i] for i in range(len(prompts) * samples)]


def check_generator(models: Models, *, pad_id: int) -> None:
    """Score what the flip's self-check said by the trainer's own forward. Raises ValueError where they differ."""
    checked = models.actor.flip.checked
    if not checked:
        return
    batch = rows([c.prompt for c in checked], [c.answer.token_ids for c in checked], [*range(len(checked))], pad_id)
    with models.actor.scoring() as module:
        logprobs, _ = policy_logprobs(module, batch, temperature=1.0)
    compare(checked, logprobs.split([len(c.answer.token_ids) for c in checked]), "the trainer's forward")


def rows(
    prompts: list[list[int]], responses: list[list[int]], places: list[int], pad_id: int, *, packing: bool = False
) -> Rows:
    """Put sequences side by side, in a row each or all in one. No sequences give one padding token, so that a rank
    without work can take part.
    """
    counts = [len(responses[i]) for i in places]
    sequences = [prompts[i] + responses[i] for i in places] or [[pad_id]]
    lengths = [len(sequence) for sequence in sequences]
    if packing:
        documents = Documents(tuple(lengths))
        ids, ends = torch.tensor([[*chain.from_iterable(sequences)]]), documents.ends()
    else:
        documents, ids = None, padded(sequences, pad_id)[0]
        ends = [row * ids.shape[1] + length - 1 for row, length in enumerate(lengths)]
    spans = [torch.arange(end + 1 - count, end + 1) for end, count in zip(ends, counts, strict=False)]
    scored = torch.cat(spans) if spans else torch.empty(0, dtype=torch.long)
    ids, scored, last = (uploaded(tensor, dist.world().device) for tensor in (ids, scored, torch.tensor(ends)))
    return Rows(places, ids, scored, last, counts, documents)


def my_rows(
    prompts: list[list[int]],
    responses: list[list[int]],
    places: Sequence[int],
    pad_id: int,
    budget: int,
    *,
    packing: bool = False,
) -> list[Portion[Rows]]:
    """This rank's micro-batches of some sequences; every rank gets equally many."""

    def lay_out(chosen: Sequence[int]) -> Rows:
        return rows(prompts, responses, list(chosen), pad_id, packing=packing)

    world = dist.world()
    lengths = [len(prompts[i]) + len(responses[i]) for i in places]
    planned = plan(lengths, ranks=world.data_size, budget=budget, packing=packing)[world.data_rank]
    return [portion([places[j] for j in micro], lay_out) for micro in planned]


def policy_logprobs(module: nn.Module, batch: Rows, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (N,) of the response tokens of a micro-batch."""
    logprobs, entropies = module(batch.input_ids, batch.scored, temperature=temperature, documents=batch.documents)
    return logprobs, entropies


def critic_values(module: nn.Module, batch: Rows) -> Tensor:
    """Values (N,) before each response token: what the critic expects when it has seen all tokens before."""
    return module(batch.input_ids, documents=batch.documents).flatten().index_select(0, batch.scored - 1)


def end_scores(module: nn.Module, batch: Rows) -> Tensor:
    """(b,) the reward model's score at the last token of each sequence."""
    return module(batch.input_ids, documents=batch.documents).flatten()[batch.ends]


@dataclass(frozen=True)
class Scores:
    """What answers score in all, and the reward function's part of it; None where one of the two scores alone."""

    total: list[float]
    function: list[float] | None = None


def score_answers(models: Models, batches: Sequence[Portion[Rows]], calls: Sequence[Call]) -> Scores:
    """By the reward model, by the reward function, or by both: of all sequences, on every rank."""
    given = None if models.function is None else function_scores(models.function, calls)
    if models.reward is None:
        assert given is not None, "nothing scores"
        return Scores(given)
    found = model_scores(models.reward, batches, models.reward_mean)
    if given is None:
        return Scores(found)
    return Scores([one + other for one, other in zip(found, given, strict=True)], given)


def model_scores(reward: Engine, batches: Sequence[Portion[Rows]], mean: float) -> list[float]:
    """Scores of all sequences less `mean`, on every rank."""

    def centred(module: nn.Module, batch: Rows) -> list[tuple[int, float]]:
        return list(zip(batch.places, (end_scores(module, batch) - mean).tolist(), strict=False))

    return _in_order(dict(chain.from_iterable(reward.score(batches, centred))))


def function_scores(function: RewardFunction, calls: Sequence[Call]) -> list[float]:
    """What a function gives for each call, the calls spread over ranks; all of it on every rank.

    Raises SharedError where a call fails on any rank.
    """
    world = dist.world()
    mine: dict[int, float] = {}
    failure: UserError | None = None
    try:
        mine = {place: function.score(*calls[place]) for place in range(world.rank, len(calls), world.size)}
    except UserError as problem:
        failure = problem
    said = [text for text in dist.gather_objects(None if failure is None else str(failure)) if text is not None]
    if said:
        raise SharedError(said[0]) from failure
    return _in_order(mine)


def _in_order(mine: dict[int, float]) -> list[float]:
    """Every rank's scores by place -> all of them."""
    found = {place: score for part in dist.gather_objects(mine) for place, score in part.items()}
    return [found[place] for place in range(len(found))]


def collect(
    models: Models,
    prompts: list[list[int]],
    generations: Sequence[Generation],
    *,
    temperature: float,
    pad_id: int,
    budget: int,
    calls: Sequence[Call] = (),
) -> Rollout:
    """Score answers, one a prompt, with all models, by the trainer's own forward, with dropout off.

    `calls` are what a reward function is called with, one an answer.
    """
    responses = [g.token_ids for g in generations]
    batches = my_rows(prompts, responses, range(len(prompts)), pad_id, budget, packing=models.pack)

    def logprobs(module: nn.Module, batch: Rows) -> list[tuple[int, Tensor]]:
        return _by_place(batch, policy_logprobs(module, batch, temperature)[0])

    def values(module: nn.Module, batch: Rows) -> list[tuple[int, Tensor]]:
        return _by_place(batch, critic_values(module, batch))

    mine = {"logprobs": dict(chain.from_iterable(models.actor.score(batches, logprobs)))}
    with models.referring() as reference:
        mine["reference"] = dict(chain.from_iterable(reference.score(batches, logprobs)))
    if models.critic is not None:
        mine["values"] = dict(chain.from_iterable(models.critic.score(batches, values)))
    scores = score_answers(models, batches, calls)
    everyone = dist.gather_objects(mine)
    parts = {name: {i: t for part in everyone for i, t in part[name].items()} for name in mine}
    device, size = dist.world().device, len(prompts)
    generator = {i: torch.tensor(g.logprobs) for i, g in enumerate(generations)}
    lengths = torch.tensor([len(r) for r in responses])
    return Rollout(
        prompts=prompts,
        responses=responses,
        finished=torch.tensor([g.finished for g in generations], device=device),
        response_mask=(torch.arange(int(lengths.max()))[None] < lengths[:, None]).to(device),
        scores=torch.tensor(scores.total, device=device),
        logprobs=_table(parts["logprobs"], size).to(device),
        reference=_table(parts["reference"], size).to(device),
        values=_table(parts["values"], size).to(device) if models.critic is not None else None,
        generator=_table(generator, size).to(device),
        function=None if scores.function is None else torch.tensor(scores.function, device=device),
    )


def _by_place(batch: Rows, flat: Tensor) -> list[tuple[int, Tensor]]:
    """Cut (N,) back into one tensor a sequence, on the host."""
    return list(zip(batch.places, flat.float().cpu().split(batch.counts), strict=True)) if batch.places else []


def _table(parts: dict[int, Tensor], size: int) -> Tensor:
    """One tensor a sequence -> (B, R), zero behind the end."""
    return nn.utils.rnn.pad_sequence([parts[i] for i in range(size)], batch_first=True)
