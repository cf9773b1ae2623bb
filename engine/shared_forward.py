"""Forwards that a step's scoring and its learning have in common: their graphs wait until the losses are known.

PPO asks the models that learn what they say of a rollout, and then takes its first step on the same sequences, with the
same parameters: the forward of the one is the forward of the other. What is kept meanwhile is memory: the activations
of all of a step's micro-batches. Where that runs out on any rank, all let go and do the two apart from then on.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from engine.figures import detached
from engine.healing import Healer, OneByOne, Pass, Portion, State
from engine.ledger import Ledger
from engine.parallel import dist, zero

Learned = tuple[Tensor, dict[str, float | Tensor]]


class SharedForward:
    """The forwards of one module that wait for their losses; none do most of the time.

    `fits` is False once memory ran out with them. `begin` and `backward` are the engine's, `discard` throws away what
    half a step left.
    """

    def __init__(
        self,
        module: nn.Module,
        ledger: Ledger,
        healer: Healer,
        discard: Callable[[], None],
        begin: Callable[..., None],
        backward: Callable[..., None],
    ) -> None:
        self.fits = True
        self._module, self._ledger, self._healer, self._discard = module, ledger, healer, discard
        self._begin, self._backward = begin, backward
        self._passes = OneByOne()
        self._made: list[tuple[Portion[Any], Any]] = []  # micro-batches, and what the module's forward gave
        self._before = State(module)  # what it was given in
        self._under_way = ledger.under_way(trains=False)

    def score(
        self, micro_batches: Sequence[Any], work: Callable[[nn.Module, Any], Sequence[Any]]
    ) -> list[Sequence[Any]] | None:
        """`work` on each micro-batch, which calls the module once. None, on every rank, where they are to be scored
        apart: memory ran out, or a micro-batch has to be cut, or can't be.
        """
        self.forget()
        if not self.fits or not micro_batches or not all(isinstance(batch, Portion) for batch in micro_batches):
            return None
        largest = max(batch.size for batch in micro_batches)
        if self._healer.limit is not None and dist.max_over_ranks(largest) > self._healer.limit:
            return None
        zero.release(self._module)
        before, forward = State(self._module), partial(self._forward, work)
        if not self._knows(micro_batches[0].nothing(), len(micro_batches), forward, before):
            return None
        self._ledger.begin()
        self._under_way = self._ledger.under_way(trains=True)
        found = self._through("forward", micro_batches, forward, before)
        if found is None:
            return None
        self._under_way.height(waits=True)
        self._made = [(batch, output) for batch, (output, _) in zip(micro_batches, found, strict=True)]
        self._before = before
        return [rows for _, rows in found]

    def learn(
        self, micro_batches: Sequence[Any], loss_fn: Callable[[nn.Module, Any], Learned], count: float
    ) -> list[Learned] | None:
        """Losses and backwards of the micro-batches that were scored; None where nothing waits for these, or memory
        ran out. Then nothing is left of them.
        """
        made, self._made = self._made, []
        if not made:
            return None
        if [id(batch) for batch, _ in made] != [id(batch) for batch in micro_batches]:
            self._made = made
            self.forget()
            return None
        outputs = [output for _, output in made]
        del made
        backward = partial(self._backward_of, outputs, loss_fn, count)
        return self._through("backward", micro_batches, backward, self._before)

    @property
    def waits(self) -> bool:
        """Whether forwards wait for their losses."""
        return bool(self._made)

    def forget(self) -> None:
        """Let go of what waits, as if it had not been."""
        if self._made:
            self._made = []
            self._discard()
            self._before.restore()

    def _through(
        self, name: str, micro_batches: Sequence[Any], work: Callable[[Any, Pass], Any], before: State
    ) -> list[Any] | None:
        """The results, or None where memory ran out on any rank; then all is as before the forwards."""
        results, report = self._passes.attempt(name, micro_batches, work, again=False)
        if dist.max_over_ranks(float(report.failed)) == 0:
            return results
        del results
        self.fits = False
        self._under_way.forget()
        self._discard()
        before.restore()
        if dist.world().leads:
            print(
                "memory: it ran out while forwards were kept from scoring to learning; from now on the two are done "
                "apart, with the same result",
                flush=True,
            )
        return None

    def _forward(
        self, work: Callable[[nn.Module, Any], Sequence[Any]], batch: Any, which: Pass
    ) -> tuple[Any, Sequence[Any]]:
        """What the module gave, and the rows that `work` made of it."""
        self._begin(last=which.last)
        once = _Once(self._module)
        with self._ledger.gathering(first=which.first), self._under_way.forward():
            rows = work(cast("nn.Module", once), batch)
        assert once.output is not None, "a forward that is kept is a call of the module, with nothing in it too"
        return once.output, tree_map_only(Tensor, Tensor.detach, rows)

    def _backward_of(
        self, outputs: list[Any], loss_fn: Callable[[nn.Module, Any], Learned], count: float, batch: Any, which: Pass
    ) -> Learned:
        """The loss of the next of `outputs`, which is let go of, and its backward."""
        self._begin(last=which.last)
        loss_sum, metrics = loss_fn(cast("nn.Module", _Given(outputs.pop(0))), batch)
        self._backward(loss_sum, count=count, last=which.last)
        self._ledger.after_backward()
        return loss_sum.detach(), detached(metrics)

    def _knows(self, nothing: Portion[Any], count: int, forward: Callable[[Any, Pass], Any], before: State) -> bool:
        """Find out by passes over nothing which collectives the passes to come have, where that is not known yet."""
        if self._passes.knows("forward", count) and self._passes.knows("backward", count):
            return True
        many = [nothing] * min(count, 3)
        made = self._through("forward", many, forward, before)
        if made is None:
            return False
        backward = partial(self._backward_of, [output for output, _ in made], _sum_of_output, 1.0)
        if self._through("backward", many, backward, before) is None:
            return False
        self._discard()
        before.restore()
        return True


def _sum_of_output(module: nn.Module, _: Any) -> Learned:
    """A loss that asks for the gradient of all that a module gave."""
    leaves = [leaf for leaf in tree_flatten(module())[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sum().float() for leaf in leaves]).sum(), {}


class _Once:
    """A module to be called one time; `output` is what that gave."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.output = module, cast("Any", None)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        assert self.output is None, "a forward that is kept is one call of the module"
        self.output = self._module(*inputs, **keywords)
        return self.output


class _Given:
    """In a module's place: it gives what the module gave to the same micro-batch before."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._output
