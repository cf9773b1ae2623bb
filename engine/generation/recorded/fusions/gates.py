"""Activations in a recording, with what they gate."""

from collections.abc import Callable
from functools import partial
from math import prod

from engine.generation.recorded.fusions.fused import fused
from engine.generation.recorded.graph import Graph, Place
from engine.generation.recorded.patterns import Found, both, exactly, find, named, of
from engine.generation.recorded.recording import Call, Value
from engine.kernels.host.gates import Kind
from engine.kernels.ready import DTYPES, Ready
from engine.kernels.rows import maker

_X = named("x")
_CUBED = both("add", _X, both("mul", of("pow", _X, exactly(3.0)), exactly(0.044715)))
_TANGENT = of("tanh", both("mul", _CUBED, exactly(0.7978845608028654)))
ACTIVATIONS = {
    Kind.SILU: of("silu", _X),
    Kind.GELU_TANH: of("gelu", _X, approximate="tanh"),
    Kind.GELU_NEW: both("mul", both("mul", _X, exactly(0.5)), both("add", _TANGENT, exactly(1.0))),
}


def fuse_gates(graph: Graph) -> None:
    """Put a call of our kernel for each activation times something, and for those that are many calls themselves."""
    make = maker("gate_rows", graph.recording.device)
    if make is None:
        return
    for kind, pattern in ACTIVATIONS.items():
        for call in graph.calls():
            found = find(graph, both("mul", pattern, named("up")), call.results[0]) if call.whole else None
            if found is None or not _put(graph, make, kind, call, found):
                found = find(graph, pattern, call.results[0]) if call.whole and kind == Kind.GELU_NEW else None
                if found is not None:
                    _put(graph, make, kind, call, found)


def _put(graph: Graph, make: Callable[..., Ready], kind: Kind, call: Call, found: Found) -> bool:
    result, x, up = call.results[0], found["x"], found.bound.get("up")
    if result is None or not isinstance(x, Value) or not graph.closed(found.calls.values(), [result]):
        return False
    read = [x] if up is None else [x, up]
    places = [graph.place(each) if isinstance(each, Value) else None for each in read]
    lying = [rows for place in places if (rows := _lying(graph, place, result)) is not None]
    if len(lying) < len(read):
        return False
    shape, dtype = graph.forms[result].shape, graph.forms[result].dtype
    prepare = partial(
        make, prod(shape[:-1]), shape[-1], dtype, kind=kind, gate=lying[0][1], up=lying[1][1] if up else None
    )
    calls = fused(graph, "gate", prepare, [base for base, _ in lying], [result])
    graph.put(calls, at=call, gone=found.calls.values())
    return True


def _lying(graph: Graph, place: Place | None, result: Value) -> tuple[Value, tuple[int, int]] | None:
    """Where the rows of a value of the result's kind lie: the base, their begin in it and their stride."""
    form = graph.forms[result]
    rows = place.rows() if place is not None and place.shape == form.shape else None
    if place is None or rows is None or graph.forms[place.base].dtype != form.dtype or form.dtype not in DTYPES:
        return None
    return place.base, (place.offset, rows[2])
