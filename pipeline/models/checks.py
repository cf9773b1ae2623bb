"""Does this model give the same numbers the fast way as by its own forward? Asked once, before anything is trained."""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import Engine
from engine.parallel import dist
from pipeline.models.modules import Policy

# Two ways to the same fp32 number differ by rounding; a wrong mask or a missing scale differs by far more.
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 2e-1}


@dataclass(frozen=True)
class Abilities:
    """What the model can take. `notes` say what had to be done without, for the user."""

    packing: bool
    notes: tuple[str, ...]


def verify(engine: Engine, *, max_length: int) -> Abilities:
    """Compare head(hidden) with the model's own logits, packed rows with separate ones; fall back where they differ.

    Collective. Sets `Policy.use_logits` where the head alone is not the whole way to the logits.
    """
    policy = engine.module
    assert isinstance(policy, Policy)
    notes = []
    tolerance = TOLERANCE[engine.config.dtype]
    vocabulary = policy.lm.config.get_text_config().vocab_size
    row = (torch.arange(1, 17, device=dist.world().device) * 7919 % vocabulary)[None]
    scored = torch.ones_like(row, dtype=torch.bool)
    scored[:, 0] = False
    with engine.scoring():
        fast, _ = policy(row, scored)
        policy.use_logits = True
        plain, _ = policy(row, scored)
        policy.use_logits = _differs(fast, plain, tolerance)
        if policy.use_logits:
            notes.append("this model scales its logits after the head, so whole logits are computed")
        packing = _packs(policy, row, tolerance, max_length)
    if not packing:
        notes.append("this model does not take packed rows; batches are bucketed by length instead")
    return Abilities(packing, tuple(notes))


def _packs(policy: Policy, row: Tensor, tolerance: float, max_length: int) -> bool:
    """Whether two documents in one row get the log-probabilities they get apart."""
    if "position_ids" not in inspect.signature(policy.lm.forward).parameters:
        return False
    window = getattr(policy.lm.config.get_text_config(), "sliding_window", None)
    if window is not None and max_length > window:
        return False  # the mask of packed rows would replace the window's
    first, second = row[:, :9], row[:, 9:]
    positions = torch.cat([torch.arange(9), torch.arange(7)]).to(row.device)[None]
    documents = torch.cat([torch.zeros(9), torch.ones(7)]).long().to(row.device)[None]
    scored = positions > 0
    packed, _ = policy(row, scored, position_ids=positions, document_ids=documents)
    apart = torch.cat([policy(first, scored[:, :9])[0], policy(second, scored[:, 9:])[0]])
    return not _differs(packed, apart, tolerance)


def _differs(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return dist.max_over_ranks((a - b).abs().max().item()) > tolerance
