"""Does this model give the same numbers the fast way as by its own forward? Asked once, before anything is trained.

Numbers are held against each other at a low temperature, where log-probabilities are differences of logits, and by
their norms: so what is wrong shows in a model with small logits, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine import Engine, attention, distributed, oom
from pipeline.data.batch import places_of
from pipeline.data.documents import Documents
from pipeline.errors import UserError
from pipeline.models.attention import attention_of, use_documents
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import own_field

# Two ways to the same number differ by rounding, this share of its size at most; a wrong mask or a missing scale makes
# it another number.
TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
SAME = 1e-5  # the same calls in the same order
COLD = 0.01  # temperature of the comparisons
LOTS = 128  # tokens, of which some are drawn another expert where that is left to chance
SHORT = (9, 7, 5)  # tokens of the documents that are tried


@dataclass(frozen=True)
class Abilities:
    """What the model can take. `notes` say what had to be done without, for the user."""

    packing: bool
    notes: tuple[str, ...]


def verify(engine: Engine, *, max_length: int) -> Abilities:
    """Compare head(hidden) with a policy's own logits, documents in one row with separate rows; fall back if need be.

    Collective, for an engine around a `Policy` or a `Scorer`. Sets `Policy.use_logits` where the head alone is not the
    whole way to the logits, `packs` where the model takes documents of up to `max_length` tokens, and `steady` where it
    computes otherwise in training although nothing is dropped. Raises UserError where it takes no documents and
    sequence groups were to share out rows of them, where a token's number depends on what follows it, as an encoder's
    do, and where the model has fewer positions than `max_length`.
    """
    module = engine.module
    assert isinstance(module, Policy | Scorer)
    tolerance = TOLERANCE[engine.config.dtype]
    notes = []
    _check_positions(module.backbone, max_length)
    with engine.scoring():
        _check_runs(module, engine.config.dtype)
        if isinstance(module, Policy):
            module.use_logits = _needs_logits(engine, module, tolerance)
            if module.use_logits:
                notes.append("this model does more than its head to make logits, so whole logits are computed")
        if not _is_causal(module, tolerance):
            raise UserError(
                f"{type(module.backbone).__name__} looks at the tokens that follow, as encoders do, so it can't learn "
                "to write; a causal language model is needed"
            )
        module.packs = _packs(engine, module, tolerance, max_length)
        module.steady = _differs_in_training(module, max_length)
    if module.steady:
        module.eval()
        notes.append(
            "this model computes otherwise in training (noise, experts drawn by lot), so it trains in evaluation mode"
        )
    if not module.packs and distributed.world().sequence > 1:
        raise UserError(
            f"engine.sequence_parallel shares out rows of several sequences, and {type(module.backbone).__name__} does "
            "not take these; engine.activation_checkpointing=true fits longer ones without it"
        )
    if not module.packs:
        notes.append("this model does not take several sequences in a row; batches are padded, by length, instead")
    return Abilities(module.packs, tuple(notes))


def adopt(engine: Engine, like: Engine) -> None:
    """Let another engine around the same architecture compute in the way that `like` was found to."""
    module, model = engine.module, like.module
    assert isinstance(module, Policy | Scorer) and isinstance(model, Policy | Scorer)
    if isinstance(module, Policy) and isinstance(model, Policy):
        module.use_logits = model.use_logits
    module.steady = model.steady
    module.packs = model.packs and use_documents(module.backbone)


def _check_positions(model: PreTrainedModel, max_length: int) -> None:
    """Raise UserError if the model supports fewer tokens than `max_length`, although its configuration has positions.

    Some families reserve positions for padding. Others change all rotary frequencies above a length (LongRoPE), so the
    numbers of a token would depend on the lengths of other sequences in the batch.
    """
    limit, configured = attention.max_positions(model), own_field(model.config, "max_position_embeddings")
    if limit is not None and limit < min(max_length, configured):
        raise UserError(
            f"{type(model).__name__} supports sequences of {limit} tokens, not {max_length}: the other positions are "
            "for padding, or its rotary frequencies change above that length (longrope). Lower the stage's max_length, "
            "or rollout.max_prompt_tokens and rollout.max_new_tokens"
        )


def _check_runs(module: Policy | Scorer, dtype: str) -> None:
    """Refuse what can't run a row of tokens by its own forward, in evaluation mode and in training."""
    if isinstance(module, Policy):
        module.use_logits = True
    try:
        for mode in (True, False):
            module.train(mode)
            _numbers(module, _tokens(module, 16))
    except Exception as problem:  # whatever a forward that wants something else may say
        if oom.is_out_of_memory(problem) or isinstance(problem, UserError):
            raise
        advice = "" if dtype == "fp32" else f" in {dtype}; engine.dtype=fp32 may serve"
        reason = str(problem).strip().partition("\n")[0]
        what = f"{type(problem).__name__}: {reason}"
        raise UserError(f"{type(module.backbone).__name__} can't run a row of tokens{advice} ({what})") from problem


def _is_causal(module: Policy | Scorer, tolerance: float) -> bool:
    """Whether most tokens' numbers stay when what follows is another text, or nothing. Not all have to: where experts
    are chosen, rounding may turn a choice.
    """
    row = _tokens(module, 16)
    other = torch.cat([row[:, :8], row[:, :8].flip(1)], dim=1)
    first = 8 - isinstance(module, Policy)  # a policy has no number for the first token
    plain, *others = (_numbers(module, each)[:first] for each in (row, other, row[:, :8]))
    size = plain.abs().median().clamp_min(torch.finfo(plain.dtype).tiny)
    off = max(((each - plain).abs().median() / size).item() for each in others)
    return distributed.max_over_ranks(off) <= tolerance


def _needs_logits(engine: Engine, policy: Policy, tolerance: float) -> bool:
    row = _tokens(policy, 16)
    policy.use_logits = False
    fast = _tried(engine, lambda: _numbers(policy, row))
    policy.use_logits = True
    return fast is None or _differs(fast, _numbers(policy, row), tolerance)


def _differs_in_training(module: Policy | Scorer, max_length: int) -> bool:
    """Whether training mode gives other numbers although nothing is dropped.

    Noise on a router turns few choices, so that a trial may miss it: configurations call it jitter.
    """
    drops = any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
    rates = module.backbone.config.get_text_config().to_dict()
    positive = {key for key, rate in rates.items() if isinstance(rate, float) and rate > 0}
    if drops or any("dropout" in key for key in positive):
        return False
    if any("jitter" in key for key in positive):
        return True
    row = _tokens(module, min(LOTS, max_length, attention.max_positions(module.backbone) or LOTS))
    calm = _numbers(module, row)
    module.train()
    loud = torch.cat([_numbers(module, row) for _ in range(2)])  # twice: lots may fall alike
    module.eval()
    return _differs(loud, calm.repeat(2), SAME)


def _tried(engine: Engine, work: Callable[[], Tensor]) -> Tensor | None:
    """Return the result of `work`; None if the model cannot do it. The engine then discards the pass."""
    try:
        return work()
    except Exception as problem:  # whatever a forward that wants something else may say
        if oom.is_out_of_memory(problem):
            raise
    engine.discard()
    return None


def _packs(engine: Engine, module: Policy | Scorer, tolerance: float, max_length: int) -> bool:
    """Whether documents in one row get the numbers they get apart, one longer than the model's window among them.

    Where they do, the model keeps attending by document; otherwise its attention stays as it was.
    """
    model = module.backbone
    lengths = (max(SHORT[0], _beyond_window(model.config.get_text_config(), max_length)), *SHORT[1:])
    first, second, third = _tokens(module, sum(lengths)).split(lengths, dim=1)
    apart = [_numbers(module, first), _numbers(module, second), _numbers(module, torch.cat([first, third], dim=1))]
    before: str = model.config._attn_implementation
    if not _counts_from_zero(engine, module, first) or not use_documents(model):
        return False
    # The third goes on from the first, so its own numbers are the last ones of the two together.
    after = apart[2][-(len(third[0]) - isinstance(module, Policy)) :]
    documents = Documents(lengths, (None, None, 0))
    row = torch.cat([first, second, third], dim=1)
    together = _tried(engine, lambda: _numbers(module, row, documents))
    found = together is not None and not _differs(together, torch.cat([apart[0], apart[1], after]), tolerance)
    if not found:
        attention_of(model, before)
    return found


def _counts_from_zero(engine: Engine, module: Policy | Scorer, row: Tensor) -> bool:
    """Whether positions 0, 1, ... told to the model are those that it gives its tokens by itself."""
    places = torch.arange(row.shape[1], device=row.device)[None]
    told = _tried(engine, lambda: _numbers(module, row, positions=places))
    return told is not None and not _differs(told, _numbers(module, row), SAME)


def _beyond_window(text: Any, max_length: int) -> int:
    """Tokens that don't fit the smallest window of a layer; 0 where no sequence is as long."""
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return max((window + 8 for window in windows if window and max_length > window), default=0)


def _numbers(
    module: Policy | Scorer, row: Tensor, documents: Documents | None = None, positions: Tensor | None = None
) -> Tensor:
    """(N,) log-probabilities of all tokens but the first of a document, or the values of all."""
    if isinstance(module, Scorer):
        width = cast(nn.Linear, module.model.score).in_features
        head = torch.linspace(-1, 1, width, device=row.device)  # its own may be all zeros
        return module(row, documents=documents, positions=positions, head=head)[0]
    counts = torch.ones_like(row, dtype=torch.bool)
    counts[0, list(documents.starts) if documents else [0]] = False
    logprobs: Tensor = module(row, places_of(counts), temperature=COLD, documents=documents, positions=positions)[0]
    return logprobs


def _tokens(module: Policy | Scorer, count: int) -> Tensor:
    vocabulary = module.backbone.config.get_text_config().vocab_size
    return (torch.arange(1, count + 1, device=distributed.world().device) * 7919 % vocabulary)[None]


def _differs(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether numbers are others by more than this share of their size."""
    return (
        distributed.max_over_ranks(((a - b).norm() / b.norm().clamp_min(torch.finfo(b.dtype).tiny)).item()) > tolerance
    )
