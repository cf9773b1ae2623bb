"""One minibatch: the clipped update of the policy and of the critic."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from engine import Engine, Update
from pipeline.config.schema import PpoSection
from pipeline.data.batch import TokenBatch
from step3_ppo.advantages import KL
from step3_ppo.loss import Sums, importance_weights, log_ratio, policy_loss, value_loss
from step3_ppo.ptx import PtxBatch
from step3_ppo.rollout import Rollout
from step3_ppo.rows import Rows, critic_values, my_rows, policy_logprobs
from step3_ppo.targets import Targets


@dataclass(frozen=True)
class Minibatch:
    """This rank's micro-batches of one optimizer step, and the response tokens of the global minibatch."""

    batches: list[Rows]
    tokens: int


def minibatches(
    rollout: Rollout, *, parts: int, seed: int, pad_id: int, budget: int, packing: bool = False
) -> list[Minibatch]:
    """Cut the rollout into `parts` optimizer steps, shuffled by `seed`, the same on every rank."""
    order = torch.randperm(len(rollout), generator=torch.Generator().manual_seed(seed)).tolist()
    if parts == 1:
        order = list(range(len(rollout)))
    chosen = [sorted(order[part::parts]) for part in range(parts)]
    return [
        Minibatch(
            my_rows(rollout.prompts, rollout.responses, places, pad_id, budget, packing=packing),
            rollout.tokens(places),
        )
        for places in chosen
    ]


def undivided(rollout: Rollout) -> Minibatch:
    """All of the rollout in one optimizer step, in the micro-batches that were scored."""
    return Minibatch(rollout.batches, rollout.tokens())


def update_policy(
    actor: Engine,
    minibatch: Minibatch,
    rollout: Rollout,
    targets: Targets,
    ppo: PpoSection,
    *,
    temperature: float,
    ptx: PtxBatch | None = None,
    check: Callable[[float], None] | None = None,
) -> Update:
    """One step of the actor; metrics are sums over the minibatch's tokens, and "largest" the largest |ratio - 1|.

    `check` is told the mean |ratio - 1| before the step; what it raises leaves the parameters as they were.
    """

    def clipped(module: nn.Module, batch: Rows) -> tuple[Tensor, Sums]:
        logprobs, entropies = policy_logprobs(module, batch, temperature)
        old = _flat(rollout.logprobs, rollout, batch.places)
        weights, weighed = _weights(rollout, batch, ppo.importance_cap)
        total, sums = policy_loss(
            logprobs,
            old,
            _flat(targets.advantages, rollout, batch.places),
            clip=ppo.clip,
            clip_high=ppo.clip_high,
            dual_clip=ppo.dual_clip,
            weights=weights,
        )
        deviation = (log_ratio(logprobs.detach(), old).exp() - 1.0).abs()
        bonus = entropies.sum()
        if ppo.entropy_coef:  # a gradient of zero would cost as much as any other
            total = total - ppo.entropy_coef * bonus
        if targets.kl_coef:
            assert rollout.reference is not None
            estimate = KL[ppo.kl_estimator or "k3"]
            away = estimate(logprobs, _flat(rollout.reference, rollout, batch.places)).sum()
            total, sums = total + targets.kl_coef * away, sums | {"kl_loss": away}
        largest = deviation.max() if len(deviation) else deviation.new_zeros(())
        return total, sums | weighed | {"entropy": bonus, "deviation": deviation.sum(), "largest": largest}

    def imitated(module: nn.Module, batch: TokenBatch) -> tuple[Tensor, Sums]:
        assert ptx is not None
        logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
        loss = -logprobs.sum() * (minibatch.tokens / ptx.tokens)
        return ptx.coef * loss, {"ptx_loss": loss}

    def loss(module: nn.Module, batch: Rows | TokenBatch) -> tuple[Tensor, Sums]:
        return clipped(module, batch) if isinstance(batch, Rows) else imitated(module, batch)

    batches = cast("list[Rows | TokenBatch]", [*minibatch.batches, *(ptx.batches if ptx else [])])

    def look(sums: Mapping[str, float]) -> None:
        if check is not None:
            check(sums["deviation"] / minibatch.tokens)

    return actor.update(batches, loss, minibatch.tokens, maxima=("largest",), before_step=look)


def update_critic(critic: Engine, minibatch: Minibatch, rollout: Rollout, targets: Targets, ppo: PpoSection) -> Update:
    """One step of the critic."""
    before, returns = rollout.values, targets.returns
    assert before is not None and returns is not None, "a rollout without a critic"

    def loss(module: nn.Module, batch: Rows) -> tuple[Tensor, Sums]:
        return value_loss(
            critic_values(module, batch),
            _flat(before, rollout, batch.places),
            _flat(returns, rollout, batch.places),
            clip=ppo.value_clip,
        )

    return critic.update(minibatch.batches, loss, minibatch.tokens)


def dry_run(actor: Engine, critic: Engine | None, longest: Rows, ppo: PpoSection, *, temperature: float) -> None:
    """The passes of an update of actor and critic over the longest micro-batch to come; nothing of them stays."""

    def said(module: nn.Module, batch: Rows) -> tuple[Tensor, Sums]:
        logprobs, entropies = policy_logprobs(module, batch, temperature)
        return logprobs.sum() - (ppo.entropy_coef * entropies.sum() if ppo.entropy_coef else 0.0), {}

    def valued(module: nn.Module, batch: Rows) -> tuple[Tensor, Sums]:
        return critic_values(module, batch).sum(), {}

    actor.dry_run(longest, said)
    if critic is not None:
        critic.dry_run(longest, valued)


def _weights(rollout: Rollout, batch: Rows, cap: float | None) -> tuple[Tensor | float, Sums]:
    """What each token's loss counts for, as the generator and not the trainer drew it."""
    if cap is None:
        return 1.0, {}
    old, generator = (_flat(table, rollout, batch.places) for table in (rollout.logprobs, rollout.generator))
    return importance_weights(old, generator, cap)


def _flat(table: Tensor, rollout: Rollout, places: Sequence[int]) -> Tensor:
    """(B, R) -> (N,) the response tokens of some sequences, in the order the models give them."""
    if not places:
        return table.new_empty(0)
    return torch.cat([table[place, : len(rollout.responses[place])] for place in places])


def means(update: Update, tokens: int) -> dict[str, float]:
    """Sums over tokens -> means."""
    return {name: value / tokens for name, value in update.sums.items()}
