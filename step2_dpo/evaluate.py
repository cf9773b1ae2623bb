"""Log-probabilities of answers: under the reference model, computed once, and under the policy for held-out pairs."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from engine import Engine, distributed
from pipeline.config.stage_sections import DpoSection
from pipeline.data.encode import PairItem
from pipeline.data.microbatches import gather_by_index
from pipeline.evaluation.pair_accuracy import Scored, accuracies
from pipeline.files import explained_disk, write_whole
from pipeline.stages.data import on_rank_zero
from step2_dpo.batches import AnswerBatch, Pairs, answer_logprobs
from step2_dpo.objective import objective

REFERENCE_FILE = "reference.safetensors"
Item = TypeVar("Item")
CHUNK_PAIRS = 512  # items that the reference model scores before progress is printed or saved
PRINT_SECONDS = 10.0
SAVE_SECONDS = 60.0


def pair_logprobs(engine: Engine, items: Sequence[PairItem], *, budget: int, packing: bool, pad_id: int) -> Tensor:
    """Return the log-probabilities of the chosen and rejected answers, (N, 2) fp32, on the CPU of every rank.

    The ranks divide the pairs among them.
    """
    pairs = Pairs(items, torch.zeros(len(items), 2))
    batches, indices = pairs.micro_batches(range(len(items)), budget=budget, packing=packing, pad_id=pad_id)
    local = {
        index: logprobs.tolist()
        for microbatch, rows in zip(indices, engine.score(batches, _logprobs_by_pair), strict=True)
        for index, logprobs in zip(microbatch, rows, strict=True)
    }
    return torch.tensor(gather_by_index(local)).view(len(items), 2)


def _logprobs_by_pair(module: nn.Module, batch: AnswerBatch) -> Sequence[Tensor]:
    """Return the log-probabilities of the chosen and the rejected answer, (2,), for each pair."""
    return answer_logprobs(module, batch).view(2, len(batch.lengths) // 2).unbind(1)


def with_reference(
    folder: Path, sets: Mapping[str, Sequence[PairItem]], read: Callable[[Sequence[PairItem]], Tensor]
) -> dict[str, Pairs]:
    """Return each set of pairs with its log-probabilities under the reference model, see `reference_tables`."""
    tables = reference_tables(folder, sets, read)
    return {name: Pairs(items, tables[name]) for name, items in sets.items()}


def reference_tables(
    folder: Path, sets: Mapping[str, Sequence[Item]], read: Callable[[Sequence[Item]], Tensor], *, unit: str = "pairs"
) -> dict[str, Tensor]:
    """Return the log-probabilities of each set under the reference model, (N, 2) fp32 for N items.

    The log-probabilities are read from `reference.safetensors` in `folder`, or computed by `read` and saved there. A
    restarted run computes only the missing log-probabilities. The reference is the model before training: call this
    function before the first optimizer step, on every rank. `unit` is what messages call the items.
    """
    saved_tables = on_rank_zero(lambda: _load_tables(folder / REFERENCE_FILE))
    tables = {name: saved_tables.get(name, torch.empty(0, 2)) for name in sets}
    for name, items in sets.items():
        if len(tables[name]) != len(items):
            tables[name] = torch.full((len(items), 2), torch.nan)  # not computed yet
    starts = [(name, start) for name, items in sets.items() for start in range(0, len(items), CHUNK_PAIRS)]
    chunks = [(name, slice(start, start + CHUNK_PAIRS)) for name, start in starts]
    missing = [(name, chunk) for name, chunk in chunks if tables[name][chunk].isnan().any()]
    is_leader, count = distributed.is_rank_zero(), sum(len(tables[name][chunk]) for name, chunk in missing)
    if is_leader and missing:
        print(f"dpo: the reference (the model before training) scores {count} {unit}", flush=True)
    printed_at = saved_at = time.monotonic()
    done = 0
    for name, chunk in missing:
        tables[name][chunk] = read(sets[name][chunk])
        done += len(tables[name][chunk])
        if is_leader and time.monotonic() - printed_at >= PRINT_SECONDS:
            printed_at = time.monotonic()
            print(f"dpo: the reference has scored {done} of {count} {unit}", flush=True)
        if is_leader and (done == count or time.monotonic() - saved_at >= SAVE_SECONDS):
            saved_at = time.monotonic()
            with explained_disk(folder):
                write_whole(folder / REFERENCE_FILE, save(tables))
    return tables


def _load_tables(file: Path) -> dict[str, Tensor]:
    """Return the saved log-probabilities by set. A missing or damaged file gives none, and they are computed again."""
    try:
        return load(file.read_bytes())
    except (FileNotFoundError, SafetensorError):
        return {}


def held_out_figures(pairs: Pairs, logprobs: Tensor, dpo: DpoSection) -> dict[str, float]:
    """Return loss, accuracy, margin and rewards of held-out pairs. `logprobs` (N, 2) are those of the policy."""
    chosen_objective = objective(dpo)
    scores = answer_scores(pairs, logprobs, dpo)
    margins = scores[:, 0] - scores[:, 1]
    loss = chosen_objective.loss(scores.T.flatten(), logprobs.T.flatten(), pairs.lengths.T.flatten())
    chosen, rejected = (dpo.beta * scores.mean(0)).tolist()
    return {
        "eval_loss": loss.item() / len(pairs),
        "eval_accuracy": (margins > 0).double().mean().item(),
        "eval_margin": dpo.beta * margins.mean().item(),
        "eval_chosen_reward": chosen,
        "eval_rejected_reward": rejected,
    }


def held_out_shares(pairs: Pairs, logprobs: Tensor, dpo: DpoSection) -> dict[str, Any]:
    """Return the accuracy over all held-out pairs, by source, and by which answer is longer."""
    scores = answer_scores(pairs, logprobs, dpo).tolist()
    return accuracies([Scored(item, *both) for item, both in zip(pairs.items, scores, strict=True)])


def answer_scores(pairs: Pairs, logprobs: Tensor, dpo: DpoSection) -> Tensor:
    """Return the score (N, 2) of each answer by the loss of the configuration, see `step2_dpo.loss`."""
    return objective(dpo).score(logprobs, pairs.reference, pairs.lengths)
