"""Generator: answers drawn from the policy, and what the models, and a reward function, say of them.

B sequences of a global batch, R the longest response, T the longest sequence. Every rank holds the whole rollout (some
MB), so that any rank can train on any row and whitening needs no collective; generating and scoring are spread over
ranks.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from engine import Engine, Generation, Sampling
from engine.generation.parity_check import compare_logprobs
from engine.uploads import uploaded
from pipeline.distributed import device, gather_objects
from step3_ppo.models import Models
from step3_ppo.rows import Rows, critic_values, my_rows, policy_logprobs, rows
from step3_ppo.scores import Call, score_answers

Said = dict[int, Tensor]  # what a model says of each of a rank's sequences, (R,) fp32


@dataclass(frozen=True)
class Rollout:
    """prompts, responses: token ids of B sequences, an end token included where there is one; finished (B,) says where.

    scores (B,) fp32: the reward model's, its mean over reference answers subtracted, plus the reward function's.
    function (B,) fp32: the function's part, or None where one of the two scores alone. logprobs, reference, values,
    generator (B, R) fp32, zero outside response_mask (B, R): log-probabilities under the policy that drew them (by the
    trainer's own forward), under the reference (None without one), the critic's values before each token (None without
    a critic), and the generator's own log-probabilities.

    batches: this rank's micro-batches, as the models took them; the first update goes on from forwards that were kept.
    apart (B, R): logprobs by a forward of its own, where both were asked for.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    finished: Tensor
    response_mask: Tensor
    scores: Tensor
    logprobs: Tensor
    reference: Tensor | None
    values: Tensor | None
    generator: Tensor
    function: Tensor | None = None
    batches: list[Rows] = field(default_factory=list)
    apart: Tensor | None = None

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
        asked = flip.assign([len(prompt) for prompt in prompts], expected * samples)
        places = [i * samples + sample for i in asked for sample in range(samples)]
        mine = rollouts.generate(
            [prompts[i] for i in asked],
            sampling,
            sample_seeds=[first_stream + i for i in places],
            batch_size=batch_size,
            samples=samples,
            text=text,
        )
    check_generator(models, pad_id=sampling.pad_id)
    found = {i: g for part in gather_objects(list(zip(places, mine, strict=True))) for i, g in part}
    return [found[i] for i in range(len(prompts) * samples)]


def check_generator(models: Models, *, pad_id: int) -> None:
    """Compare the answers of the parity check with the trainer's own forward. Raises ValueError if they differ."""
    checked = models.actor.flip.checked
    if not checked:
        return
    batch = rows([c.prompt for c in checked], [c.answer.token_ids for c in checked], [*range(len(checked))], pad_id)
    with models.actor.scoring() as module:
        logprobs, _ = policy_logprobs(module, batch, temperature=1.0)
    said = logprobs.split([len(c.answer.token_ids) for c in checked])
    eight_bits = models.actor.config.compress in ("gather8", "both")
    compare_logprobs(checked, said, "the trainer's forward", eight_bits=eight_bits)


def collect(
    models: Models,
    prompts: list[list[int]],
    generations: Sequence[Generation],
    *,
    temperature: float,
    pad_id: int,
    budget: int,
    calls: Sequence[Call] = (),
    to_learn: Collection[str] = (),
    compares: bool = False,
) -> Rollout:
    """Score answers, one a prompt, with all models, by the trainer's own forward, with dropout off.

    `calls` are what a reward function is called with, one an answer. The models that `to_learn` names ("actor",
    "critic") are scored by the forwards that their update over `Rollout.batches` learns from, where their engines can
    (`Engine.score_to_learn`); `compares` has the actor score apart as well.
    """
    responses = [g.token_ids for g in generations]
    batches = my_rows(prompts, responses, range(len(prompts)), pad_id, budget, packing=models.pack)

    def logprobs(module: nn.Module, batch: Rows) -> list[tuple[int, Tensor]]:
        return _by_place(batch, policy_logprobs(module, batch, temperature)[0])

    def values(module: nn.Module, batch: Rows) -> list[tuple[int, Tensor]]:
        return _by_place(batch, critic_values(module, batch))

    def said(engine: Engine, role: str, work: Callable[[nn.Module, Rows], list[tuple[int, Tensor]]]) -> Said:
        kept = engine.score_to_learn(batches, work) if role in to_learn else None
        return dict(chain.from_iterable(engine.score(batches, work) if kept is None else kept))

    # What is kept is kept for as short as can be; the reference may be the actor without its adapters.
    scores, mine = score_answers(models, batches, calls), dict[str, Said]()
    with models.referring() as reference:
        if reference is not None:
            mine["reference"] = said(reference, "reference", logprobs)
    if compares:
        mine["apart"] = said(models.actor, "apart", logprobs)
    if models.critic is not None:
        mine["values"] = said(models.critic, "critic", values)
    mine["logprobs"] = said(models.actor, "actor", logprobs)
    everyone = gather_objects(mine)
    parts = {name: {i: t for part in everyone for i, t in part[name].items()} for name in mine}
    on, size = device(), len(prompts)
    tables = {name: uploaded(_table(found, size), on) for name, found in parts.items()}
    generator = {i: torch.tensor(g.logprobs) for i, g in enumerate(generations)}
    lengths = torch.tensor([len(r) for r in responses])
    return Rollout(
        prompts=prompts,
        responses=responses,
        finished=uploaded(torch.tensor([g.finished for g in generations]), on),
        response_mask=uploaded(torch.arange(int(lengths.max()))[None] < lengths[:, None], on),
        scores=uploaded(torch.tensor(scores.total), on),
        logprobs=tables["logprobs"],
        reference=tables.get("reference"),
        values=tables.get("values"),
        generator=uploaded(_table(generator, size), on),
        function=None if scores.function is None else uploaded(torch.tensor(scores.function), on),
        batches=batches,
        apart=tables.get("apart"),
    )


def _by_place(batch: Rows, flat: Tensor) -> list[tuple[int, Tensor]]:
    """Cut (N,) back into one tensor a sequence."""
    return list(zip(batch.places, flat.float().split(batch.counts), strict=True)) if batch.places else []


def _table(parts: dict[int, Tensor], size: int) -> Tensor:
    """One tensor a sequence -> (B, R), zero behind the end."""
    return nn.utils.rnn.pad_sequence([parts[i] for i in range(size)], batch_first=True)
