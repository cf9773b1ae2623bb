"""The examples of the stage as micro-batches of answers, and the log-probabilities of answers under the reference."""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from engine import distributed
from pipeline.config.stage_sections import DpoSection
from pipeline.data.batch import Documents, Movable
from pipeline.files import explained_disk, write_atomically
from pipeline.stages.data import on_rank_zero
from pipeline.stages.supervised import SupervisedTask

REFERENCE_FILE = "reference.safetensors"
CHUNK = 512  # examples that the reference model scores before the result is saved
SAVE_SECONDS = 10.0

Example = TypeVar("Example")


@dataclass(frozen=True, eq=False)
class AnswerBatch(Movable):
    """A micro-batch of A answers. Of B pairs it has 2B answers, and the chosen answers precede the rejected answers.

    input_ids (A, T) or (1, N) long: right-padded rows, or one row of documents
    scored (M,) long: indices of the answer tokens in the flattened ids
    slots (M,) long: index of each answer token in a flattened table (A, R) of answers
    lengths (A,) fp32: the number of tokens of each answer, including its end token
    reference (A,) fp32: the log-probability of each answer under the reference model
    longest: R, the number of tokens of the longest answer
    """

    input_ids: Tensor
    scored: Tensor
    slots: Tensor
    lengths: Tensor
    reference: Tensor
    longest: int
    documents: Documents | None = None


def answer_tokens(ends: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """Return `scored`, `slots` and `longest` of an `AnswerBatch` from the last index and the length of each answer."""
    longest = max(lengths, default=0)
    scored = [torch.arange(end + 1 - length, end + 1) for end, length in zip(ends, lengths, strict=True)]
    slots = [torch.arange(row * longest, row * longest + length) for row, length in enumerate(lengths)]
    nothing = torch.empty(0, dtype=torch.long)
    return torch.cat([nothing, *scored]), torch.cat([nothing, *slots]), longest


def answer_logprobs(module: nn.Module, batch: AnswerBatch) -> Tensor:
    """Return the log-probability of each answer under the policy, (A,) fp32."""
    logprobs, _ = module(batch.input_ids, batch.scored, documents=batch.documents)
    table = logprobs.new_zeros(len(batch.lengths) * batch.longest).index_put((batch.slots,), logprobs)
    return table.view(len(batch.lengths), batch.longest).sum(1)


@dataclass(frozen=True)
class Batches(SupervisedTask[AnswerBatch], Generic[Example]):
    """The training and held-out examples of the stage as batches. Each example has two answers to one prompt.

    reference: (N, 2) fp32 on the CPU for "train" and "held_out", the log-probabilities of both answers of each example
        under the reference model; zeros until `read_reference`, and for a loss without a reference
    schedule: for each step, the indices of its examples in `train`
    packing: a micro-batch is one row without padding
    """

    section: DpoSection
    train: Sequence[Example]
    held_out: Sequence[Example]
    reference: Mapping[str, Tensor]
    schedule: Sequence[Sequence[int]]
    packing: bool
    pad_id: int

    @property
    @abstractmethod
    def longest(self) -> int:
        """The most tokens, padding included, of a micro-batch with a single example."""

    def evaluate(self, budget: int) -> dict[str, float]:
        return self.evaluation(budget)[0]

    @abstractmethod
    def evaluation(self, budget: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the metrics of the held-out examples for a line of metrics.jsonl, and those for summary.json."""

    @abstractmethod
    def logprobs(self, examples: Sequence[Example], budget: int) -> Tensor:
        """Return the log-probabilities of both answers of each example, (N, 2) fp32, on the CPU of every rank.

        The ranks divide the examples among them.
        """

    def read_reference(self, folder: Path, budget: int) -> Self:
        """Return these batches with the log-probabilities under the reference: the policy before its first step."""
        sets = {"train": self.train, "held_out": self.held_out}
        read = partial(self.logprobs, budget=budget)
        return replace(self, reference=reference_tables(folder, sets, read))


def reference_tables(
    folder: Path, sets: Mapping[str, Sequence[Example]], read: Callable[[Sequence[Example]], Tensor]
) -> dict[str, Tensor]:
    """Return the log-probabilities of each set under the reference model, (N, 2) fp32 for N examples.

    The log-probabilities are read from `reference.safetensors` in `folder`, or computed by `read` and saved there. A
    restarted run computes only the missing log-probabilities. The reference is the model before training: call this
    function before the first optimizer step, on every rank.
    """
    saved_tables = on_rank_zero(lambda: _load_tables(folder / REFERENCE_FILE))
    tables = {name: saved_tables.get(name, torch.empty(0, 2)) for name in sets}
    for name, examples in sets.items():
        if len(tables[name]) != len(examples):
            tables[name] = torch.full((len(examples), 2), torch.nan)  # not computed yet
    starts = [(name, start) for name, examples in sets.items() for start in range(0, len(examples), CHUNK)]
    chunks = [(name, slice(start, start + CHUNK)) for name, start in starts]
    missing = [(name, chunk) for name, chunk in chunks if tables[name][chunk].isnan().any()]
    is_leader, count = distributed.is_rank_zero(), sum(len(tables[name][chunk]) for name, chunk in missing)
    if is_leader and missing:
        print(f"dpo: the reference (the model before training) scores {count} examples", flush=True)
    saved_at, done = time.monotonic(), 0
    for name, chunk in missing:
        tables[name][chunk] = read(sets[name][chunk])
        done += len(tables[name][chunk])
        if is_leader and (done == count or time.monotonic() - saved_at >= SAVE_SECONDS):
            with explained_disk(folder):
                write_atomically(folder / REFERENCE_FILE, save(tables))
            saved_at = time.monotonic()
            if done < count:
                print(f"dpo: the reference has scored {done} of {count} examples", flush=True)
    return tables


def _load_tables(file: Path) -> dict[str, Tensor]:
    """Return the saved log-probabilities by set. A missing or damaged file gives none, and they are computed again."""
    try:
        return load(file.read_bytes())
    except (FileNotFoundError, SafetensorError):
        return {}
