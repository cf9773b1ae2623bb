"""A kernel of ours as the function of a recorded call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.generation.recorded.graph import Graph, Place, is_view, steady
from engine.generation.recorded.recording import Call, Value
from engine.kernels.ready import Ready


class Fused:
    """`prepare` makes the kernel ready; what a call gives lies in memory that the next call of it writes again.

    `views` are what a call gives: which of the written tensors, and where in it.
    """

    def __init__(self, name: str, prepare: Callable[[], Ready], views: Sequence[tuple[int, Place]]) -> None:
        self.__name__, self.prepare, self.views = name, prepare, list(views)

    def now(self) -> Callable[..., tuple[Tensor, ...]]:
        """The function, with memory of its own."""
        run, written = self.prepare()
        given = tuple(written[at].as_strided(p.shape, p.strides, p.offset) for at, p in self.views)

        def call(*args: Any) -> tuple[Tensor, ...]:
            run(*args)
            return given

        return call

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("a kernel is made ready before it is called")


def fused(
    graph: Graph, name: str, prepare: Callable[[], Ready], arguments: Sequence[Any], results: Sequence[Value]
) -> list[Call]:
    """The calls that give `results`, whole and in the order in which the kernel writes them.

    The kernel reads its arguments as contiguous, so those which might not be are made so first.
    """
    calls, firm = [], []
    for argument in arguments:
        if isinstance(argument, Value) and not steady(graph.makers.get(argument)):
            copied = graph.new(graph.forms[argument])
            calls.append(Call(Tensor.contiguous, (argument,), {}, (copied,), contiguous=True))
            argument = copied
        firm.append(argument)
    views = [(at, whole(graph, result)) for at, result in enumerate(results)]
    function = Fused(name, prepare, views)
    return [*calls, Call(function, tuple(firm), {}, tuple(results), whole=False, contiguous=True)]


def whole(graph: Graph, value: Value) -> Place:
    """Where a value would lie that is contiguous."""
    shape = graph.forms[value].shape
    return Place(value, 0, shape, torch.empty(shape, device="meta").stride())


def settle_views(graph: Graph) -> None:
    """Views of what our kernels and packed products make become one call each, or none."""
    looks = [call for call in graph.calls() if is_view(call)]
    places = {value: graph.place(value) for call in looks for value in call.results if value is not None}
    given: dict[int, list[Value]] = {}
    makers: dict[int, Call] = {}
    for call in looks:
        seen = []
        for value in call.results:
            place = places[value] if value is not None else None
            maker = None if place is None or place.base == value else graph.makers.get(place.base)
            if value is None or place is None or maker is None or not steady(maker):
                break
            if isinstance(maker.function, Fused):
                at, _ = maker.function.views[maker.results.index(place.base)]
                maker.function.views.append((at, place))
                makers[id(maker)] = maker
                given.setdefault(id(maker), []).append(value)
            else:
                where = (place.base, place.shape, place.strides, place.offset)
                seen.append(Call(torch.as_strided, where, {}, (value,)))
        else:
            graph.put(seen, at=call)
    for key, added in given.items():
        maker = makers[key]
        again = Call(maker.function, maker.args, {}, (*maker.results, *added), whole=False, contiguous=True)
        graph.put([again], at=maker)
