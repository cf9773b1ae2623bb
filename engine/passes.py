"""Forward and backward passes of one module over the micro-batches of a step.

PPO scores a rollout with the models that learn, and then takes its first step on the same sequences with the same
parameters: the forward of the scoring is the forward of the update. `score_to_learn` holds the graphs of all
micro-batches until `learn` makes the losses and the backwards. The price is memory: the activations of a whole step.

Pipeline parallelism runs several micro-batches at once: `engine/pipeline_passes.py` overrides these methods.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from engine.config import EngineConfig
from engine.figures import detached, on_host
from engine.loading import persistent_buffers
from engine.memory.tracker import MemoryTracker
from engine.oom import watch_pass
from engine.optim import Gradients
from engine.parallel import dist, zero
from engine.precision import LossScaler

Learned = tuple[Tensor, dict[str, float | Tensor]]  # the loss and the metrics of a micro-batch, all of them sums
LossFn = Callable[[nn.Module, Any], Learned]
Work = Callable[[nn.Module, Any], Sequence[Any]]  # the results of a micro-batch, one for each row


class Passes:
    """The passes of one module. `discard` throws away the gradients and the gathered parameters of half a step."""

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        tracker: MemoryTracker,
        scaler: LossScaler,
        discard: Callable[[], None],
    ) -> None:
        self.module = module
        self._config, self._tracker, self._scaler, self._discard = config, tracker, scaler, discard
        self._scored: list[Any] = []  # the micro-batches whose graphs are held
        self._outputs: list[Any] = []  # what the module returned for each of them
        self._before = PassState(module)  # before their forwards

    def prepare(self, *, last: bool) -> None:
        """Prepare the coming forward and backward. `last` is True for the last micro-batch of a step."""
        zero.before_micro_batch(self.module, stage=self._config.zero_stage, last=last)

    def backward(self, loss: Tensor, factor: float, *, last: bool) -> None:
        """Add the gradient of `factor` times a loss, averaged over ranks."""
        (loss * (factor * self._scaler.scale)).backward()
        zero.after_micro_batch(self.module, last=last)

    def learn(self, micro_batches: Sequence[Any], loss_fn: LossFn, count: float) -> list[Learned]:
        """Run forward and backward of all micro-batches of a step; their gradients are those of the sum over `count`.

        Micro-batches that `score_to_learn` has just scored need no second forward.
        """
        if self._scored and [id(batch) for batch in self._scored] != [id(batch) for batch in micro_batches]:
            self.forget()
        outputs, self._scored, self._outputs = self._outputs, [], []
        held = bool(outputs)
        if not held:
            self._tracker.start_update()
        learned = list[Learned]()
        with watch_pass(holds_graphs=held):
            for index, micro_batch in enumerate(micro_batches):
                last = index == len(micro_batches) - 1
                self.prepare(last=last)
                if held:
                    loss, metrics = loss_fn(cast("nn.Module", _Replayed(outputs.pop(0))), micro_batch)
                else:
                    with self._tracker.training():
                        loss, metrics = loss_fn(self.module, micro_batch)
                self.backward(loss, dist.world().zero_size / count, last=last)
                self._tracker.after_backward()
                learned.append((loss.detach(), detached(metrics)))
                del loss, metrics  # the graph is freed before the next forward
        return learned

    def dry_run(self, micro_batch: Any, loss_fn: LossFn) -> None:
        """Run forward and backward of a micro-batch and discard the result. Raises PassOutOfMemory."""
        self.forget()
        before, fits = PassState(self.module), False
        try:
            with watch_pass():
                self._dry_run(micro_batch, loss_fn)
            fits = True
        finally:
            if fits or dist.world().size == 1:  # several ranks do not continue after a failure
                self._discard()
                before.restore()

    def _dry_run(self, micro_batch: Any, loss_fn: LossFn) -> None:
        self.prepare(last=True)
        loss, _ = loss_fn(self.module, micro_batch)
        self.backward(loss, 1.0, last=True)

    def score(self, micro_batches: Sequence[Any], work: Work) -> list[Sequence[Any]]:
        """Return `work` of each micro-batch, with its tensors on the host."""
        with watch_pass():
            return on_host([work(self.module, micro_batch) for micro_batch in micro_batches])

    def score_to_learn(self, micro_batches: Sequence[Any], work: Work) -> list[Sequence[Any]] | None:
        """Return `work` of each micro-batch, and hold the graphs for `learn`. None if that is not supported."""
        self.forget()
        zero.release(self.module)
        self._before = PassState(self.module)
        self._tracker.start_update()
        results = list[Sequence[Any]]()
        hook = self.module.register_forward_hook(lambda module, inputs, output: self._outputs.append(output))
        try:
            with watch_pass(holds_graphs=True):
                for index, micro_batch in enumerate(micro_batches):
                    self.prepare(last=index == len(micro_batches) - 1)
                    with self._tracker.training():
                        results.append(tree_map_only(Tensor, Tensor.detach, work(self.module, micro_batch)))
        finally:
            hook.remove()
        assert len(self._outputs) == len(micro_batches), "work calls the module once for each micro-batch"
        self._tracker.sample_waiting()
        self._scored = list(micro_batches)
        return on_host(results)

    def forget(self) -> None:
        """Discard the forwards of `score_to_learn`: random state and buffers are as before them."""
        if self._scored:
            self._scored, self._outputs = [], []
            self._discard()
            self._before.restore()

    def gradients(self) -> Gradients:
        """Return the gradients of this rank's parameters; their norm is that of the whole model."""
        return Gradients(self.module)

    def metrics_of_step(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of this rank's micro-batches, on every rank that computed a part of them."""
        return metrics

    def all_parameters(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) of the whole model on every rank; `own` are those of this rank's module."""
        return iter(own)


class _Replayed:
    """A stand-in for the module: returns what the module returned for the same micro-batch before."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._output


class PassState:
    """A copy of what a pass changes besides gradients: the random generators, and buffers that training writes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._random = torch.get_rng_state()
        self._device_random = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._buffers = {name: buffer.clone() for name, buffer in persistent_buffers(module).items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copied values back."""
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)
        for name, buffer in persistent_buffers(self._module).items():
            buffer.copy_(self._buffers[name])
