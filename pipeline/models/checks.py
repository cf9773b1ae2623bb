"""Does this model give the same numbers the fast way as by its own forward? Asked once, before anything is trained."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine import Engine
from engine.parallel import dist
from engine.rollout.attention import Unserved
from pipeline.data.batch import places_of
from pipeline.data.documents import Documents
from pipeline.errors import UserError
from pipeline.models.attention import attention_of, use_documents
from pipeline.models.modules import Policy, Scorer

# Two ways to the same fp32 number differ by rounding; a wrong mask or a missing scale differs by far more.
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 2e-1}
SHORT = (9, 7, 5)  # tokens of the documents that are tried


@dataclass(frozen=True)
class Abilities:
    """What the model can take. `notes` say what had to be done without, for the user."""

    packing: bool
    notes: tuple[str, ...]


def verify(engine: Engine, *, max_length: int) -> Abilities:
    """Compare head(hidden) with a policy's own logits, documents in one row with separate rows; fall back if need be.

    Collective, for an engine around a `Policy` or a `Scorer`. Sets `Policy.use_logits` where the head alone is not the
    whole way to the logits, and `packs` where the model takes documents of up to `max_length` tokens. Raises UserError
    where it doesn't and sequence groups were to share out rows of documents, and where a token's number depends on what
    follows it, as an encoder's do.
    """
    module = engine.module
    assert isinstance(module, Policy | Scorer)
    tolerance = TOLERANCE[engine.config.dtype]
    notes = []
    with engine.scoring():
        if not _is_causal(module, tolerance):
            raise UserError(
                f"{type(module.backbone).__name__} looks at the tokens that follow, as encoders do, so it can't learn "
                "to write; a causal language model is needed"
            )
        if isinstance(module, Policy):
            module.use_logits = _needs_logits(module, tolerance)
            if module.use_logits:
                notes.append("this model scales its logits after the head, so whole logits are computed")
        module.packs = _packs(module, tolerance, max_length)
    if not module.packs and dist.world().sequence > 1:
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
    module.packs = model.packs and use_documents(module.backbone)


def _is_causal(module: Policy | Scorer, tolerance: float) -> bool:
    """Whether most tokens' numbers stay when what follows is another text. Not all have to: where experts are chosen,
    rounding may turn a choice.
    """
    row = _tokens(module, 16)
    other = torch.cat([row[:, :8], row[:, :8].flip(1)], dim=1)
    first = 8 - isinstance(module, Policy)  # a policy has no number for the first token
    one, two = (_numbers(module, each)[:first] for each in (row, other))
    return dist.max_over_ranks((one - two).abs().median().item()) <= tolerance


def _needs_logits(policy: Policy, tolerance: float) -> bool:
    row = _tokens(policy, 16)
    fast = _numbers(policy, row)
    policy.use_logits = True
    return _differs(fast, _numbers(policy, row), tolerance)


def _packs(module: Policy | Scorer, tolerance: float, max_length: int) -> bool:
    """Whether documents in one row get the numbers they get apart, one longer than the model's window among them.

    Where they do, the model keeps attending by document; otherwise its attention stays as it was.
    """
    model = module.backbone
    lengths = (max(SHORT[0], _beyond_window(model.config.get_text_config(), max_length)), *SHORT[1:])
    first, second, third = _tokens(module, sum(lengths)).split(lengths, dim=1)
    apart = [_numbers(module, first), _numbers(module, second), _numbers(module, torch.cat([first, third], dim=1))]
    before: str = model.config._attn_implementation
    if not use_documents(model):
        return False
    # The third goes on from the first, so its own numbers are the last ones of the two together.
    after = apart[2][-(len(third[0]) - isinstance(module, Policy)) :]
    documents = Documents(lengths, (None, None, 0))
    try:
        together = _numbers(module, torch.cat([first, second, third], dim=1), documents)
        found = not _differs(together, torch.cat([apart[0], apart[1], after]), tolerance)
    except Unserved:
        found = False
    if not found:
        attention_of(model, before)
    return found


def _beyond_window(text: Any, max_length: int) -> int:
    """Tokens that don't fit the smallest window of a layer; 0 where no sequence is as long."""
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return max((window + 8 for window in windows if window and max_length > window), default=0)


def _numbers(module: Policy | Scorer, row: Tensor, documents: Documents | None = None) -> Tensor:
    """(N,) log-probabilities of all tokens but the first of a document, or the values of all."""
    if isinstance(module, Scorer):
        return module(row, documents=documents)[0]
    counts = torch.ones_like(row, dtype=torch.bool)
    counts[0, list(documents.starts) if documents else [0]] = False
    logprobs: Tensor = module(row, places_of(counts), documents=documents)[0]
    return logprobs


def _tokens(module: Policy | Scorer, count: int) -> Tensor:
    vocabulary = module.backbone.config.get_text_config().vocab_size
    return (torch.arange(1, count + 1, device=dist.world().device) * 7919 % vocabulary)[None]


def _differs(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return dist.max_over_ranks((a - b).abs().max().item()) > tolerance
