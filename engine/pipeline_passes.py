"""The passes of a pipeline-parallel module: several micro-batches at once, with the results on the last rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import EngineConfig
from engine.memory.tracker import MemoryTracker
from engine.oom import watch_pass
from engine.optim import Gradients
from engine.parallel import dist
from engine.parallel.pipeline_parallel import Pipeline
from engine.parallel.pipeline_split import PipelineSplit, split_of
from engine.passes import LossAndMetrics, LossFn, Passes, PassState, ScoreFn, detach_metrics, to_host
from engine.precision import TORCH_DTYPE, LossScaler


def make_passes(
    module: nn.Module,
    config: EngineConfig,
    tracker: MemoryTracker,
    scaler: LossScaler,
    discard: Callable[[], None],
) -> Passes:
    """Return the passes of a module, which may be a stage of a pipeline."""
    split = split_of(module)
    if split is None:
        return Passes(module, config, tracker, scaler, discard)
    return PipelinePasses(module, config, tracker, scaler, discard, split)


class PipelinePasses(Passes):
    """The passes of this rank's stage of a pipeline."""

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        tracker: MemoryTracker,
        scaler: LossScaler,
        discard: Callable[[], None],
        split: PipelineSplit,
    ) -> None:
        super().__init__(module, config, tracker, scaler, discard)
        schedule, dtype = config.pipeline_schedule, TORCH_DTYPE[config.dtype]
        self._pipeline = Pipeline(module, split, schedule=schedule, zero_stage=config.zero_stage, dtype=dtype)

    def train(self, micro_batches: Sequence[Any], loss_fn: LossFn, count: float) -> list[LossAndMetrics]:
        self._tracker.start_update()
        results = self._train(micro_batches, loss_fn, self._scaler.scale * dist.world().data_size / count)
        self._pipeline.finish_step()
        self._tracker.after_backward()
        return [each for each in results if each is not None]

    def dry_run(self, micro_batch: Any, loss_fn: LossFn) -> None:
        before = PassState(self.module)
        self._train([micro_batch] * self._pipeline.split.size, loss_fn, 1.0)
        self._discard()
        before.restore()

    def score(self, micro_batches: Sequence[Any], score_fn: ScoreFn) -> list[Sequence[Any]]:
        def scored(micro_batch: Any) -> tuple[Tensor, Sequence[Any]]:
            return torch.zeros((), device=dist.world().device), score_fn(self._pipeline.module, micro_batch)

        with watch_pass():
            results: list[Sequence[Any]] = self._run(micro_batches, scored)
        return self._pipeline.broadcast_from_last(to_host(results))

    def score_to_learn(self, micro_batches: Sequence[Any], score_fn: ScoreFn) -> list[Sequence[Any]] | None:
        """Return None: forwards and backwards of a pipeline take turns."""
        return None

    def gradients(self) -> Gradients:
        return Gradients(self._pipeline.module, self._pipeline.squared_norm)

    def metrics_of_step(self, metrics: dict[str, float]) -> dict[str, float]:
        return self._pipeline.broadcast_from_last(metrics)

    def all_parameters(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return self._pipeline.all_parameters(own)

    def _train(self, micro_batches: Sequence[Any], loss_fn: LossFn, factor: float) -> list[LossAndMetrics | None]:
        """Run all forwards and backwards; gradients are those of `factor` times the losses."""

        def loss_of(micro_batch: Any) -> tuple[Tensor, LossAndMetrics]:
            loss, metrics = loss_fn(self._pipeline.module, micro_batch)
            return loss * factor, (loss.detach(), detach_metrics(metrics))

        with watch_pass():
            return self._run(micro_batches, loss_of)

    def _run(self, micro_batches: Sequence[Any], work: Callable[[Any], tuple[Tensor, Any]]) -> list[Any]:
        """Return the second results of `work` on the last rank, None for each micro-batch on the others."""
        results: list[Any] = [None] * len(micro_batches)
        trains = torch.is_grad_enabled()

        def loss_of(index: int) -> Tensor:
            with self._tracker.training() if trains else nullcontext():
                loss, results[index] = work(micro_batches[index])
            return loss

        self._pipeline.run(loss_of, [_ids(micro_batch).numel() for micro_batch in micro_batches])
        return results


def _ids(micro_batch: Any) -> Tensor:
    if isinstance(micro_batch, Mapping):
        ids = micro_batch.get("input_ids")
    else:
        ids = getattr(micro_batch, "input_ids", micro_batch)
    if not isinstance(ids, Tensor):
        raise ValueError(
            "pipeline_parallel counts the tokens of a micro-batch: pass a tensor of token ids, or a mapping or object "
            "with input_ids"
        )
    return ids
