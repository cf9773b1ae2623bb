"""One minibatch: the update of the policy and of the critic."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from engine import Engine, Update, distributed
from pipeline.config.stage_sections import PpoSection
from pipeline.data.batch import TokenBatch, batch_indices
from pipeline.data.encode import TokenItem
from pipeline.data.microbatches import token_microbatches
from pipeline.errors import UserError
from step3_ppo.advantages import Advantages, loss_kl
from step3_ppo.batches import Microbatch, critic_values, local_microbatches, policy_logprobs
from step3_ppo.loss import POLICY_LOSSES, Sums, equal_sequences, importance_of, log_ratio, ratio_of, value_loss
from step3_ppo.rollout import Rollout

# Mean |ratio - 1| of the first minibatch that rounding explains, by compute precision.
RATIO_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


PtxBatch = tuple[list[TokenBatch], int]
"""This rank's micro-batches, and the number of target tokens of the global batch."""


@dataclass(frozen=True)
class Minibatch:
    """This rank's micro-batches of one optimizer step.

    tokens: response tokens of the global minibatch
    sequences: sequences of the global minibatch
    ptx: the SFT conversations that `ppo.ptx_coef` adds; None without them
    """

    batches: list[Microbatch]
    tokens: int
    sequences: int
    ptx: PtxBatch | None = None


def minibatches(
    rollout: Rollout,
    *,
    count: int,
    seed: int,
    pad_id: int,
    budget: int,
    packing: bool = False,
    only_finished: bool = False,
) -> list[Minibatch]:
    """Divide a rollout into `count` optimizer steps, in an order that depends on `seed`, the same on every rank.

    only_finished: leave out the answers without an end token (overlong filtering; Yu et al., 2025, arXiv:2503.14476,
        section 3.4), and the optimizer steps for which no answer is left
    """
    order = torch.randperm(len(rollout), generator=torch.Generator().manual_seed(seed)).tolist()
    if only_finished:
        finished = rollout.finished.tolist()
        order = [index for index in order if finished[index]]
    result = []
    for first in range(count):
        indices = sorted(order[first::count])
        if not indices:  # a step without answers would move the parameters by momentum and weight decay
            continue
        batches = local_microbatches(
            rollout.prompts, rollout.responses, indices, pad_id, budget, packing=packing, sampled=rollout.sampled
        )
        result.append(Minibatch(batches, rollout.tokens(indices), len(indices)))
    return result


def single_minibatch(rollout: Rollout) -> Minibatch:
    """Return all of a rollout as one optimizer step, with the micro-batches that were scored."""
    return Minibatch(rollout.batches, rollout.tokens(), len(rollout))


@dataclass(frozen=True)
class PtxMix:
    """Pretraining mix: `size` SFT conversations for each policy step (Ouyang et al., 2022, eq. 2)."""

    items: Sequence[TokenItem]
    size: int
    pad_id: int
    seed: int

    def batch(self, step: int, budget: int, *, packing: bool = False) -> PtxBatch:
        """Return the conversations of optimizer step `step`, counted from 0."""
        items = [self.items[i] for i in batch_indices(len(self.items), self.size, self.seed, step)]
        return token_microbatches(items, budget=budget, packing=packing, pad_id=self.pad_id)


def update_policy(
    actor: Engine,
    minibatch: Minibatch,
    rollout: Rollout,
    advantages: Advantages,
    ppo: PpoSection,
    *,
    temperature: float,
    kl_coef: float = 0.0,
    check: Callable[[float], None] | None = None,
) -> Update:
    """Take one optimizer step of the actor.

    Metrics are sums over the tokens of the minibatch; "largest" is the largest |ratio - 1|. `kl_coef` weighs the KL in
    the loss. `check` gets the mean |ratio - 1| before the step; if it raises, the parameters stay unchanged.
    """

    ptx_batches, ptx_tokens = minibatch.ptx or ([], 1)
    loss_function, keys = POLICY_LOSSES[ppo.loss]
    surrogate = partial(loss_function, **{key: getattr(ppo, key) for key in keys})

    def policy(module: nn.Module, batch: Microbatch) -> tuple[Tensor, Sums]:
        logprobs, entropies = policy_logprobs(module, batch, temperature)
        old = _token_values(rollout.logprobs, rollout, batch.indices)
        answer_weights = _answer_weights(rollout, batch, minibatch, ppo)
        importance, importance_sums = _importance(rollout, batch, ppo)
        total, sums = surrogate(
            logprobs,
            old,
            _token_values(advantages.advantages, rollout, batch.indices),
            weights=answer_weights * importance,
            ratio=ratio_of(ppo.ratio, batch.response_lengths),
        )
        deviation = (log_ratio(logprobs.detach(), old).exp() - 1.0).abs()
        entropy = entropies.sum()
        if ppo.entropy_coef:  # without it, no time for a gradient of zero
            total = total - ppo.entropy_coef * entropy
        if kl_coef:
            assert rollout.reference is not None
            reference = _token_values(rollout.reference, rollout, batch.indices)
            kl = (answer_weights * loss_kl(ppo.kl_estimator or "k3", logprobs, reference, old)).sum()
            total, sums = total + kl_coef * kl, sums | {"kl_loss": kl}
        largest = deviation.max() if len(deviation) else deviation.new_zeros(())
        return total, sums | importance_sums | {"entropy": entropy, "deviation": deviation.sum(), "largest": largest}

    def pretraining(module: nn.Module, batch: TokenBatch) -> tuple[Tensor, Sums]:
        logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
        loss = -logprobs.sum() * (minibatch.tokens / ptx_tokens)
        return ppo.ptx_coef * loss, {"ptx_loss": loss}

    def loss(module: nn.Module, batch: Microbatch | TokenBatch) -> tuple[Tensor, Sums]:
        return policy(module, batch) if isinstance(batch, Microbatch) else pretraining(module, batch)

    def check_ratio(sums: Mapping[str, float]) -> None:
        if check is not None:
            check(sums["deviation"] / minibatch.tokens)

    batches = cast("list[Microbatch | TokenBatch]", [*minibatch.batches, *ptx_batches])
    return actor.update(batches, loss, minibatch.tokens, maxima=("largest",), before_step=check_ratio)


def update_critic(
    critic: Engine, minibatch: Minibatch, rollout: Rollout, advantages: Advantages, *, clip: float | None
) -> Update:
    """Take one optimizer step of the critic. `clip` bounds the change of a value; None does not clip."""
    old, returns = rollout.values, advantages.returns
    assert old is not None and returns is not None, "a rollout without a critic"

    def loss(module: nn.Module, batch: Microbatch) -> tuple[Tensor, Sums]:
        return value_loss(
            critic_values(module, batch),
            _token_values(old, rollout, batch.indices),
            _token_values(returns, rollout, batch.indices),
            clip=clip,
        )

    return critic.update(minibatch.batches, loss, minibatch.tokens)


def dry_run(
    actor: Engine, critic: Engine | None, longest: Microbatch, *, temperature: float, entropy_coef: float = 0.0
) -> None:
    """Run the passes of an update of actor and critic over a micro-batch, and discard the result."""

    def policy(module: nn.Module, batch: Microbatch) -> tuple[Tensor, Sums]:
        logprobs, entropies = policy_logprobs(module, batch, temperature)
        return logprobs.sum() - (entropy_coef * entropies.sum() if entropy_coef else 0.0), {}

    def value(module: nn.Module, batch: Microbatch) -> tuple[Tensor, Sums]:
        return critic_values(module, batch).sum(), {}

    actor.dry_run(longest, policy)
    if critic is not None:
        critic.dry_run(longest, value)


def _answer_weights(rollout: Rollout, batch: Microbatch, minibatch: Minibatch, ppo: PpoSection) -> Tensor | float:
    """Return the weight of each token in the surrogate and the KL: with sequence-level ratios, answers count equally.

    DeepSeekMath (Shao et al., 2024, equation 3) has the KL inside the mean over the tokens of an answer.
    """
    if ppo.ratio == "token":
        return 1.0
    weights = equal_sequences(batch.response_lengths, tokens=minibatch.tokens, sequences=minibatch.sequences)
    return distributed.to_device(weights, rollout.logprobs.device)


def _importance(rollout: Rollout, batch: Microbatch, ppo: PpoSection) -> tuple[Tensor | float, Sums]:
    """Return the importance weights of tokens that the generator sampled, not the trainer, and metrics."""
    if ppo.importance_cap is None:
        return 1.0, {}
    old, generator = (_token_values(each, rollout, batch.indices) for each in (rollout.logprobs, rollout.generator))
    return importance_of(ppo.importance_weights, batch.response_lengths)(old, generator, ppo.importance_cap)


def _token_values(table: Tensor, rollout: Rollout, indices: Sequence[int]) -> Tensor:
    """Return (N,) the values of the response tokens of some sequences, in the order of the models' outputs."""
    if not indices:
        return table.new_empty(0)
    return torch.cat([table[i, : rollout.lengths[i]] for i in indices])


def means(update: Update, tokens: int) -> dict[str, float]:
    """Return the metrics of an update as means over tokens."""
    return {name: value / tokens for name, value in update.sums.items()}


def check_first_ratio(deviation: float, *, dtype: str, tolerance: float | None) -> None:
    """Raise UserError if the mean |ratio - 1| of the first minibatch is above the tolerance. Call before its step.

    In the first update the old and the new policy are the same, so the ratio must be 1. Another ratio shows a broken
    PPO (Huang et al., 2022, "The 37 implementation details of PPO"): active dropout, padding that changes other tokens,
    or a precision that is too low.

    tolerance: None uses what rounding explains in the precision `dtype`
    """
    limit = RATIO_TOLERANCE[dtype] if tolerance is None else tolerance
    if deviation <= limit:
        return
    raise UserError(
        f"the first minibatch's ratio is off by {deviation:.2g} on average (at most {limit:.2g} is rounding): the "
        "update would be wrong. Either dropout is active in the actor's forward: set the model's dropout to 0. Or the "
        "log-probabilities of an answer depend on the padding next to it: set ppo.micro_batch_tokens so low that each "
        "micro-batch has one answer, or use another attention (model.attention=eager). Or the precision is too low for "
        "this model: use engine.dtype=fp32 (or bf16 instead of fp16), or raise ppo.ratio_tolerance if you accept the "
        "difference"
    )
