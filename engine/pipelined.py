"""A step's micro-batches on their way into a pipeline: enough of them, how large they are, and memory that runs out.

What the healer (engine/healing) is where every rank has the whole model. Nothing is halved after a failure here: the
other ranks of a schedule would wait for messages of the one that failed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.healing import Portion, is_out_of_memory
from engine.parallel.pipeline import Pipeline

Learned = tuple[Tensor, dict[str, float | Tensor]]
ADVICE = (
    "under pipeline_parallel a micro-batch is not halved: fewer tokens in each (micro_batch_tokens), "
    "activation_checkpointing, or more ranks in the pipeline need less"
)


class Pipelined:
    """Runs the passes of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def train(
        self, batches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Learned], factor: float
    ) -> list[Learned]:
        """Forward and backward of all micro-batches; losses and metrics on the last rank, nothing on the others."""
        enough = _enough(batches, self.pipeline.piece.size)
        with _explained():
            return self.pipeline.train([_batch(each) for each in enough], _rows(enough), loss_fn, factor)

    def rehearse(self, batch: Any, loss_fn: Callable[[nn.Module, Any], Learned], discard: Callable[[], None]) -> None:
        """As many of a micro-batch as are under way at once; nothing stays of them, the random state neither."""
        before = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self.train([batch] * self.pipeline.piece.size, loss_fn, 1.0)
        discard()
        torch.set_rng_state(before[0])
        if before[1] is not None:
            torch.cuda.set_rng_state(before[1])

    def score(self, batches: Sequence[Any], work: Callable[[nn.Module, Any], Any]) -> list[Any]:
        """What `work` gives of each micro-batch, on every rank."""
        with _explained():
            return self.pipeline.score([_batch(each) for each in batches], _rows(batches), work)


def _enough(batches: Sequence[Any], ranks: int) -> Sequence[Any]:
    """At least as many micro-batches as ranks, where they can be cut: each into as many parts, on every rank alike."""
    while 0 < len(batches) < ranks and all(isinstance(batch, Portion) for batch in batches):
        batches = [part for batch in batches for part in batch.halves() or (batch, batch.nothing())]
    return batches


def _batch(batch: Any) -> Any:
    return batch.batch if isinstance(batch, Portion) else batch


def _rows(batches: Sequence[Any]) -> list[int]:
    """Tokens of each micro-batch, padding included: what a message between ranks has to have room for."""
    return [batch.size if isinstance(batch, Portion) else _ids(batch).numel() for batch in batches]


def _ids(batch: Any) -> Tensor:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", batch)
    if not isinstance(ids, Tensor):
        raise ValueError("pipeline_parallel has to know a micro-batch's tokens: a tensor of ids, or input_ids in it")
    return ids


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"out of memory ({str(error).partition(chr(10))[0]}); {ADVICE}") from error
