"""Forward and backward passes of one module over the micro-batches of a step.

PPO scores a rollout with the models that learn, and then takes its first step on the same sequences with the same
parameters. The forward of the scoring is then also the forward of the update: `score_to_learn` holds the graphs of all
micro-batches until `train` computes the losses and the backwards. This needs memory for the activations of a full step.

Pipeline parallelism runs several micro-batches at once, and has their results on the last rank: `PipelinePasses`
(engine/parallel/pipeline_parallel.py).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from engine.checkpoint import random_state, restore_random_state
from engine.config import EngineConfig
from engine.internals import tree_flatten, tree_map_only, tree_unflatten
from engine.memory.tracker import MemoryTracker
from engine.oom import PassOutOfMemory, is_out_of_memory
from engine.optimizer_step import LossScaler
from engine.parallel import dist, dtensors, zero

Batch = TypeVar("Batch")
Tree = TypeVar("Tree")
LossAndMetrics = tuple[Tensor, dict[str, float | Tensor]]  # of a micro-batch, all of them sums
LossFn = Callable[[nn.Module, Batch], LossAndMetrics]
ScoreFn = Callable[[nn.Module, Any], Sequence[Any]]  # the results of a micro-batch, one for each row


@dataclass(eq=False)
class Passes:
    """The passes of one module. `discard` drops the gradients and the gathered parameters of an unfinished step."""

    module: nn.Module
    config: EngineConfig
    tracker: MemoryTracker
    scaler: LossScaler
    discard: Callable[[], None]

    def __post_init__(self) -> None:
        self._scored: list[Any] = []  # the micro-batches whose graphs are held
        self._outputs: list[Any] = []  # the module's output for each of them
        self._before = PassState(self.module)  # before their forwards

    def backward(self, loss: Tensor, factor: float, *, last: bool) -> None:
        """Add the gradient of `factor` times a loss, averaged over ranks. `last` means the last one of a step."""
        zero.before_backward(self.module, stage=self.config.zero_stage, last=last)
        (loss * (factor * self.scaler.scale)).backward()
        dist.note_work()

    def train(self, micro_batches: Sequence[Any], loss_fn: LossFn[Any], count: float) -> list[LossAndMetrics]:
        """Run forward and backward of all micro-batches of a step. The gradients are those of the sum over `count`.

        Micro-batches that `score_to_learn` has just scored need no second forward.
        """
        if self._scored and [id(batch) for batch in self._scored] != [id(batch) for batch in micro_batches]:
            self.discard_scored()
        outputs, self._scored, self._outputs = self._outputs, [], []
        holds_graphs = bool(outputs)
        if not holds_graphs:
            self.tracker.start_update()
        results = list[LossAndMetrics]()
        with watch_pass(holds_graphs=holds_graphs):
            for index, micro_batch in enumerate(micro_batches):
                if holds_graphs:
                    output = outputs.pop(0)
                    loss, metrics = loss_fn(cast("nn.Module", lambda *_, output=output, **__: output), micro_batch)
                    del output
                else:
                    with self.tracker.training():
                        loss, metrics = loss_fn(self.module, micro_batch)
                self.backward(loss, dist.world().zero_size / count, last=index == len(micro_batches) - 1)
                self.tracker.after_backward()
                results.append(tree_map_only(Tensor, Tensor.detach, (loss, metrics)))
                del loss, metrics  # the graph is freed before the next forward
        return results

    def dry_run(self, micro_batch: Any, loss_fn: LossFn[Any]) -> None:
        """Run forward and backward of a micro-batch and discard the result. Raises PassOutOfMemory."""
        self.discard_scored()
        before, fits = PassState(self.module), False
        try:
            with watch_pass():
                self._dry_run(micro_batch, loss_fn)
            fits = True
        finally:
            if fits or dist.world().size == 1:  # several ranks do not continue after a failure
                self.discard()
                before.restore()

    def _dry_run(self, micro_batch: Any, loss_fn: LossFn[Any]) -> None:
        loss, _ = loss_fn(self.module, micro_batch)
        self.backward(loss, 1.0, last=True)

    def score(self, micro_batches: Sequence[Any], score_fn: ScoreFn) -> list[Sequence[Any]]:
        """Return `score_fn` of each micro-batch, with its tensors on the host."""
        results = list[Sequence[Any]]()
        with watch_pass():
            for micro_batch in micro_batches:
                results.append(score_fn(self.module, micro_batch))
                dist.note_work()
            return to_host(results)

    def score_to_learn(self, micro_batches: Sequence[Any], score_fn: ScoreFn) -> list[Sequence[Any]]:
        """Return `score_fn` of each micro-batch, and hold the graphs for `train`."""
        self.discard_scored()
        zero.release(self.module)
        self._before = PassState(self.module)
        self.tracker.start_update()
        results = list[Sequence[Any]]()
        self._scored = list(micro_batches)
        hook = self.module.register_forward_hook(lambda module, inputs, output: self._outputs.append(output))
        try:
            with watch_pass(holds_graphs=True):
                for micro_batch in micro_batches:
                    with self.tracker.training():
                        results.append(tree_map_only(Tensor, Tensor.detach, score_fn(self.module, micro_batch)))
                    dist.note_work()
        except Exception:
            if dist.world().size == 1:  # several ranks do not continue after a failure
                self.discard_scored()
            raise
        finally:
            hook.remove()
        assert len(self._outputs) == len(micro_batches), "score_fn must call the module once for each micro-batch"
        self.tracker.sample_waiting()
        return to_host(results)

    def discard_scored(self) -> None:
        """Discard the forwards of `score_to_learn`, and restore random state and buffers from before them."""
        if self._scored:
            self._scored, self._outputs = [], []
            self.discard()
            self._before.restore()

    def squared_norm(self) -> float | Tensor:
        """Return the sum of squares of the full model's gradients, the same number on every rank."""
        return dtensors.squared_norm([p.grad for p in self.module.parameters() if p.grad is not None])

    def all_parameters(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of the full model on every rank; `own` are those of this rank's module."""
        return iter(own)


@contextmanager
def watch_pass(*, holds_graphs: bool = False) -> Iterator[None]:
    """Raise PassOutOfMemory for every out-of-memory error inside the context."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PassOutOfMemory) or not is_out_of_memory(error):
            raise
        raise PassOutOfMemory(str(error).partition("\n")[0], holds_graphs=holds_graphs) from error


class PassState:
    """A copy of what a pass changes besides gradients: the random generators, and buffers that training writes."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._random = module, random_state()
        self._buffers = {name: buffer.clone() for name, buffer in zero.persistent_buffers(module).items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copied values back."""
        restore_random_state(self._random)
        for name, buffer in zero.persistent_buffers(self._module).items():
            buffer.copy_(self._buffers[name])


def add_up(
    results: Sequence[LossAndMetrics], maxima: Collection[str]
) -> tuple[float | Tensor, dict[str, float | Tensor]]:
    """Return the sums of losses and metrics over micro-batches; of the metrics in `maxima` the largest value.

    A maximum is not finite if one value is not finite.
    """
    total_loss: float | Tensor = 0.0
    totals: dict[str, float | Tensor] = {}
    for loss, metrics in results:
        total_loss = total_loss + loss
        for name, value in metrics.items():
            if name not in totals:
                totals[name] = value
            elif name in maxima:
                totals[name] = torch.maximum(torch.as_tensor(totals[name]), torch.as_tensor(value))
            else:
                totals[name] = totals[name] + value
    return total_loss, totals


def to_host(tree: Tree) -> Tree:
    """Return nested lists, tuples and dictionaries with their tensors on the host, with one wait per dtype."""
    leaves, spec = tree_flatten(tree)
    on_device = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.device.type != "cpu"]
    for dtype in dict.fromkeys(leaves[index].dtype for index in on_device):
        indices = [index for index in on_device if leaves[index].dtype == dtype]
        values = torch.cat([leaves[index].detach().flatten() for index in indices]).cpu()
        sizes = [leaves[index].numel() for index in indices]
        for index, elements in zip(indices, values.split(sizes), strict=True):
            leaves[index] = elements.view(leaves[index].shape)
    return cast(Tree, tree_unflatten(leaves, spec))
