"""The course of micro-batches through an engine's module: one after another, or several at once in a pipeline."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from engine.config import EngineConfig
from engine.figures import detached, on_host
from engine.healing import Healer, Pass
from engine.ledger import Ledger
from engine.optim import Gradients
from engine.parallel import dist, pipeline
from engine.pipelined import Pipelined
from engine.precision import TORCH_DTYPE, LossScaler
from engine.shared_forward import SharedForward

Learned = tuple[Tensor, dict[str, float | Tensor]]  # a micro-batch's loss and metrics, both sums
LossFn = Callable[[nn.Module, Any], Learned]
Work = Callable[[nn.Module, Any], Sequence[Any]]  # the results of a micro-batch, one a row


class Course(Protocol):
    """A way to train and to score a module on a step's micro-batches, and what is known of the step then.

    `healer` halves micro-batches that are each a `Portion` where memory runs out.
    """

    healer: Healer

    def learn(self, micro_batches: Sequence[Any], loss_fn: LossFn, count: float) -> list[Learned]:
        """Forward and backward of all of a step's micro-batches; gradients are those of their sum over `count`."""
        ...

    def rehearse(self, micro_batch: Any, loss_fn: LossFn) -> None:
        """The same with one like this, of which nothing stays but the size that fits."""
        ...

    def score(self, micro_batches: Sequence[Any], work: Work) -> list[list[Any]]:
        """`work` on each micro-batch: what it was cut into, and the rows of each."""
        ...

    def score_to_learn(self, micro_batches: Sequence[Any], work: Work) -> list[Any] | None:
        """The rows of each micro-batch, by forwards that `learn` goes on from; None where that can't be."""
        ...

    def forget(self) -> None:
        """Let go of forwards that wait to be learned from."""
        ...

    def gradients(self) -> Gradients:
        """What the optimizer will step by; their norm is that of the whole model's."""
        ...

    def told(self, figures: dict[str, float]) -> dict[str, float]:
        """This rank's figures of a step, or those of the rank that knows them."""
        ...

    def everywhere(self, mine: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the whole model by name, of which this rank has `mine`."""
        ...


class InTurn:
    """Micro-batches one after another, each forward and backward before the next. `begin` and `backward` are the
    engine's.
    """

    def __init__(
        self,
        module: nn.Module,
        ledger: Ledger,
        discard: Callable[[], None],
        begin: Callable[..., None],
        backward: Callable[..., None],
    ) -> None:
        self.module, self._ledger, self._begin, self._backward = module, ledger, begin, backward
        self.healer = Healer(module, discard)
        self.shared = SharedForward(module, ledger, self.healer, discard, begin, backward)

    def learn(self, micro_batches: Sequence[Any], loss_fn: LossFn, count: float) -> list[Learned]:
        if self.shared.waits:
            learned = self.shared.learn(micro_batches, loss_fn, count)
            if learned is not None:
                return learned
        else:
            self._ledger.begin()
        return _flat(self.healer.run("train", micro_batches, partial(self._one, loss_fn, count)))

    def rehearse(self, micro_batch: Any, loss_fn: LossFn) -> None:
        self.shared.forget()
        self.healer.rehearse([micro_batch], partial(self._one, loss_fn, 1.0))

    def score(self, micro_batches: Sequence[Any], work: Work) -> list[list[Any]]:
        return on_host(self.healer.run("score", micro_batches, lambda batch, _: work(self.module, batch)))

    def score_to_learn(self, micro_batches: Sequence[Any], work: Work) -> list[Any] | None:
        return on_host(self.shared.score(micro_batches, work))

    def forget(self) -> None:
        self.shared.forget()

    def gradients(self) -> Gradients:
        return Gradients(self.module)

    def told(self, figures: dict[str, float]) -> dict[str, float]:
        return figures

    def everywhere(self, mine: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return iter(mine)

    def _one(self, loss_fn: LossFn, count: float, micro_batch: Any, which: Pass) -> Learned:
        self._begin(last=which.last)
        with self._ledger.forward(first=which.first):
            loss_sum, metrics = loss_fn(self.module, micro_batch)
        self._backward(loss_sum, count=count, last=which.last)
        self._ledger.after_backward()
        return loss_sum.detach(), detached(metrics)


class ThroughPipeline:
    """Several micro-batches under way at once in the pieces of a pipeline; the last piece's rank has the results."""

    def __init__(
        self,
        module: nn.Module,
        piece: pipeline.Piece,
        config: EngineConfig,
        ledger: Ledger,
        discard: Callable[[], None],
        scaler: LossScaler,
    ) -> None:
        kind, dtype = config.pipeline_schedule, TORCH_DTYPE[config.dtype]
        self._pipeline = pipeline.Pipeline(module, piece, kind=kind, zero_stage=config.zero_stage, dtype=dtype)
        self._ledger, self._scaler = ledger, scaler
        self._passes = Pipelined(self._pipeline, ledger)
        self.healer = Healer(module, discard, self._passes)

    def learn(self, micro_batches: Sequence[Any], loss_fn: LossFn, count: float) -> list[Learned]:
        self._ledger.begin()
        work = self._passes.learning(loss_fn, self._scaler.scale * dist.world().data_size / count)
        learned = _flat(self.healer.run("train", self._passes.enough(micro_batches), work))
        self._pipeline.add_up()
        self._ledger.after_backward()
        return [done for done in learned if done is not None]

    def rehearse(self, micro_batch: Any, loss_fn: LossFn) -> None:
        under_way = self._passes.enough([micro_batch] * self._pipeline.piece.size)
        self.healer.rehearse(under_way, self._passes.learning(loss_fn, 1.0))

    def score(self, micro_batches: Sequence[Any], work: Work) -> list[list[Any]]:
        scored: list[list[Any]] = self.healer.run("score", micro_batches, self._passes.scoring(work))
        return self._pipeline.from_last(on_host(scored))

    def score_to_learn(self, micro_batches: Sequence[Any], work: Work) -> list[Any] | None:
        return None  # a pipeline's forwards and backwards take turns

    def forget(self) -> None:
        pass

    def gradients(self) -> Gradients:
        return Gradients(self._pipeline.module, self._pipeline.squared_norm)

    def told(self, figures: dict[str, float]) -> dict[str, float]:
        return self._pipeline.from_last(figures)

    def everywhere(self, mine: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return pipeline.everywhere(self._pipeline.piece, mine)


def _flat(pieces: Sequence[Sequence[Any]]) -> list[Any]:
    return [done for parts in pieces for done in parts]
