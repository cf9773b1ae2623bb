"""Log-probabilities of all answers: the reference's, once, and the policy's to held-out pairs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from engine import Engine
from engine.parallel import dist
from pipeline.config.schema import DpoSection
from pipeline.data.encode import PairItem
from pipeline.files import explained_disk, write_whole
from pipeline.stage_data import by_first_rank
from step2_dpo.batches import AnswerBatch, Pairs, answer_logprobs
from step2_dpo.objective import preference_loss

KEPT = "reference.safetensors"
AT_A_TIME = 2048  # pairs that are planned together


def pair_logprobs(
    engine: Engine, items: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int
) -> Tensor:
    """(N, 2) fp32 of chosen and rejected answers, on the host of every rank, the work spread over ranks."""
    pairs, found = Pairs(items, torch.zeros(len(items), 2)), torch.zeros(len(items), 2)
    for start in range(0, len(items), AT_A_TIME):
        places = range(start, min(start + AT_A_TIME, len(items)))
        batches, held = pairs.micro_batches(places, budget=budget, packing=packing, pad_id=pad_id)
        mine = {
            places[place]: values
            for where, rows in zip(held, engine.score(batches, _of_pairs), strict=True)
            for place, values in zip(where, rows, strict=True)
        }
        for part in dist.gather_objects({place: values.tolist() for place, values in mine.items()}):
            for place, values in part.items():
                found[place] = torch.tensor(values)
    return found


def _of_pairs(module: nn.Module, batch: AnswerBatch) -> Sequence[Tensor]:
    """(2,) of each pair."""
    return answer_logprobs(module, batch).view(2, len(batch.lengths) // 2).unbind(1)


def with_reference(
    folder: Path, sets: Mapping[str, Sequence[PairItem]], read: Callable[[Sequence[PairItem]], Tensor]
) -> dict[str, Pairs]:
    """Sets of pairs, by name, with what the reference gives them: as kept in `folder`, else by `read`, and kept there.

    The reference is the model that training starts from: to be called before that has changed. Every rank calls.
    """
    kept = by_first_rank(lambda: _kept(folder / KEPT))
    found = {name: kept[name] for name, items in sets.items() if name in kept and len(kept[name]) == len(items)}
    unread = {name: items for name, items in sets.items() if name not in found}
    if dist.world().leads and unread:
        count = sum(len(items) for items in unread.values())
        print(f"dpo: the reference, the model as it starts, reads {count} pairs", flush=True)
    missing = {name: read(items) for name, items in unread.items()}
    if dist.world().leads and missing:
        with explained_disk(folder):
            write_whole(folder / KEPT, save(found | missing))
    return {name: Pairs(items, (found | missing)[name]) for name, items in sets.items()}


def _kept(file: Path) -> dict[str, Tensor]:
    """What was read before; what is damaged is read again, which says so."""
    try:
        return load(file.read_bytes())
    except (FileNotFoundError, SafetensorError):
        return {}


def held_out_figures(pairs: Pairs, logprobs: Tensor, dpo: DpoSection) -> dict[str, float]:
    """Loss, and how many held-out pairs are ranked right, by what margin; `logprobs` (N, 2) are the policy's."""
    moved = logprobs - pairs.reference
    leads = moved[:, 0] - moved[:, 1]
    return {
        "eval_loss": preference_loss(dpo)(leads).item() / len(pairs),
        "eval_accuracy": (leads > 0).double().mean().item(),
        "eval_margin": dpo.beta * leads.mean().item(),
    }
