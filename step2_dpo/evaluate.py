"""Log-probabilities of all answers: the reference's, once, and the policy's to held-out pairs."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from engine import Engine
from pipeline.config.schema import DpoSection
from pipeline.data.encode import PairItem
from pipeline.distributed import gather_by_index, is_rank_zero, on_rank_zero
from pipeline.evaluation.pair_accuracy import Scored, accuracies
from pipeline.files import explained_disk, write_whole
from step2_dpo.batches import AnswerBatch, Pairs, answer_logprobs
from step2_dpo.objective import preference_loss

KEPT = "reference.safetensors"
AT_A_TIME = 512  # pairs that the reference reads between two looks at the clock
SECONDS_A_LINE = 10.0
SECONDS_A_FILE = 60.0


def pair_logprobs(engine: Engine, items: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int) -> Tensor:
    """(N, 2) fp32 of chosen and rejected answers, on the host of every rank, the work spread over ranks."""
    pairs = Pairs(items, torch.zeros(len(items), 2))
    batches, held = pairs.micro_batches(range(len(items)), budget=budget, packing=packing, pad_id=pad_id)
    mine = {
        place: values.tolist()
        for where, rows in zip(held, engine.score(batches, _of_pairs), strict=True)
        for place, values in zip(where, rows, strict=True)
    }
    return torch.tensor(gather_by_index(mine)).view(len(items), 2)


def _of_pairs(module: nn.Module, batch: AnswerBatch) -> Sequence[Tensor]:
    """(2,) of each pair."""
    return answer_logprobs(module, batch).view(2, len(batch.lengths) // 2).unbind(1)


def with_reference(
    folder: Path, sets: Mapping[str, Sequence[PairItem]], read: Callable[[Sequence[PairItem]], Tensor]
) -> dict[str, Pairs]:
    """Sets of pairs, by name, with what the reference gives them: as kept in `folder`, else by `read`, and kept there.

    The reference is the model that training starts from: to be called before that has changed. Every rank calls. Who is
    stopped while it reads goes on where it was last kept.
    """
    kept = on_rank_zero(lambda: _kept(folder / KEPT))
    tables = {name: kept.get(name, torch.empty(0, 2)) for name in sets}
    for name, items in sets.items():
        if len(tables[name]) != len(items):
            tables[name] = torch.full((len(items), 2), torch.nan)  # not read yet
    starts = [(name, start) for name, items in sets.items() for start in range(0, len(items), AT_A_TIME)]
    parts = [(name, slice(start, start + AT_A_TIME)) for name, start in starts]
    unread = [(name, part) for name, part in parts if tables[name][part].isnan().any()]
    leads, count = is_rank_zero(), sum(len(tables[name][part]) for name, part in unread)
    if leads and unread:
        print(f"dpo: the reference, the model as it starts, reads {count} pairs", flush=True)
    said = saved = time.monotonic()
    done = 0
    for name, part in unread:
        tables[name][part] = read(sets[name][part])
        done += len(tables[name][part])
        if leads and time.monotonic() - said >= SECONDS_A_LINE:
            said = time.monotonic()
            print(f"dpo: {done} of {count} pairs are read", flush=True)
        if leads and (done == count or time.monotonic() - saved >= SECONDS_A_FILE):
            saved = time.monotonic()
            with explained_disk(folder):
                write_whole(folder / KEPT, save(tables))
    return {name: Pairs(items, tables[name]) for name, items in sets.items()}


def _kept(file: Path) -> dict[str, Tensor]:
    """What was read before; what is damaged is read again, which says so."""
    try:
        return load(file.read_bytes())
    except (FileNotFoundError, SafetensorError):
        return {}


def held_out_figures(pairs: Pairs, logprobs: Tensor, dpo: DpoSection) -> dict[str, float]:
    """Loss, how many held-out pairs are ranked right, by what margin, rewards; `logprobs` (N, 2) are the policy's."""
    moved = logprobs - pairs.reference
    leads = moved[:, 0] - moved[:, 1]
    chosen, rejected = (dpo.beta * moved.mean(0)).tolist()
    return {
        "eval_loss": preference_loss(dpo)(leads).item() / len(pairs),
        "eval_accuracy": (leads > 0).double().mean().item(),
        "eval_margin": dpo.beta * leads.mean().item(),
        "eval_chosen_reward": chosen,
        "eval_rejected_reward": rejected,
    }


def held_out_shares(pairs: Pairs, logprobs: Tensor) -> dict[str, Any]:
    """How many held-out pairs are ranked right: of all, of each source, and where either answer is the longer one."""
    moved = (logprobs - pairs.reference).tolist()
    return accuracies([Scored(item, *each) for item, each in zip(pairs.items, moved, strict=True)])
