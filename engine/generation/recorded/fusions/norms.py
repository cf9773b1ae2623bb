"""Norms in a recording, each with the residual sums before it."""

from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from engine.generation.recorded.fusions.fused import fused
from engine.generation.recorded.graph import Graph
from engine.generation.recorded.patterns import Found, both, cast, exactly, find, named, of, parameter
from engine.generation.recorded.recording import Call, Held, Value
from engine.kernels.host.norms import MOST, Kind
from engine.kernels.ready import DTYPES
from engine.kernels.rows import maker

_WIDE = cast(named("x"))
_SCALE = of("rsqrt", both("add", of("mean", of("pow", _WIDE, exactly(2)), exactly(-1), keepdim=True), named("eps")))
_SCALED = both("mul", _WIDE, _SCALE)
RMS = both("mul", parameter("weight"), cast(_SCALED))
RMS_ONE = cast(both("mul", _SCALED, both("add", cast(parameter("weight")), exactly(1.0))))


@dataclass(frozen=True)
class Norm:
    """A norm of x (..., D) as it was recorded, over its last dimension."""

    kind: Kind
    x: Value
    result: Value
    weight: Held
    bias: Held | None
    eps: float
    calls: tuple[Call, ...]


def norm_of(graph: Graph, result: Value) -> Norm | None:
    """The norm that `result` is, if nobody else reads what is computed on the way."""
    call = graph.maker(result, "layer_norm")
    if call is not None:
        norm = _layer_norm(call)
    else:
        norm = next((_rms(kind, result, found) for kind, found in _spelled(graph, result)), None)
    if norm is None or not isinstance(norm.x, Value) or norm.x not in graph.forms:
        return None
    form, parameters = graph.forms[norm.x], [norm.weight.now(), *([norm.bias.now()] if norm.bias else [])]
    fits = form == graph.forms[result] and form.dtype in DTYPES and form.shape[-1] <= MOST
    fits = fits and all(p.shape == form.shape[-1:] and p.dtype == form.dtype for p in parameters)
    fits = fits and all(p.is_contiguous() for p in parameters)
    squares = [each for call in norm.calls if call.name in ("pow", "mean") for each in call.results]
    fits = fits and all(graph.forms[each].dtype == torch.float32 for each in squares if each is not None)
    return norm if fits and graph.closed(norm.calls, [result]) else None


def _spelled(graph: Graph, result: Value) -> list[tuple[Kind, Found]]:
    found = [(Kind.RMS, find(graph, RMS, result)), (Kind.RMS_ONE, find(graph, RMS_ONE, result))]
    return [(kind, each) for kind, each in found if each is not None and isinstance(each["eps"], float)]


def _rms(kind: Kind, result: Value, found: Found) -> Norm:
    return Norm(kind, found["x"], result, found["weight"], None, found["eps"], tuple(found.calls.values()))


def _layer_norm(call: Call) -> Norm | None:
    weight, bias, eps = (call.kwargs.get(name) for name in ("weight", "bias", "eps"))
    if len(call.args) != 2 or len(call.args[1]) != 1 or not isinstance(eps, float) or call.results[0] is None:
        return None
    if not isinstance(weight, Held) or not isinstance(bias, Held):
        return None
    return Norm(Kind.LAYER, call.args[0], call.results[0], weight, bias, eps, (call,))


def fuse_norms(graph: Graph) -> None:
    """Put a call of our kernel for each norm that lies in rows, and for the sums that make these."""
    make = maker("norm_rows", graph.recording.device)
    if make is None:
        return
    for call in graph.calls():
        norm = norm_of(graph, call.results[0]) if call.whole and call.results[0] is not None else None
        place = graph.place(norm.x) if norm is not None else None
        if norm is None or place is None or not place.packed:
            continue
        base = graph.forms[place.base]
        if prod(base.shape) != prod(place.shape) or base.dtype != graph.forms[norm.x].dtype:
            continue
        sums = _sums(graph, place.base)
        parts = [place.base] if not sums else _parts(graph, sums)
        prepare = partial(make, place.shape, base.dtype, parts=len(parts), kind=norm.kind, eps=norm.eps)
        results = [norm.result] if not sums else [place.base, norm.result]
        calls = fused(graph, "norm", prepare, [norm.weight, norm.bias, *parts], results)
        graph.put(calls, at=sums[0] if sums else call, gone=[*norm.calls, *sums])


def _sums(graph: Graph, total: Value) -> list[Call]:
    """The plus that makes a value, then the one before it that is made for it alone."""
    last = _plus(graph, total)
    if last is None:
        return []
    before = [each for part in last.args if (each := _plus(graph, part)) is not None]
    return [last, *[each for each in before if graph.closed([each, last], [total])][:1]]


def _plus(graph: Graph, total: Value) -> Call | None:
    """The call that makes a value by adding two of its kind."""
    call = graph.maker(total, "add")
    if call is None or call.kwargs or len(call.args) != 2 or call.args[0] == call.args[1]:
        return None
    return call if all(graph.forms.get(part) == graph.forms[total] for part in call.args) else None


def _parts(graph: Graph, sums: list[Call]) -> list[Value]:
    """What is summed, in order."""
    first, *others = sums[::-1]
    parts = list(first.args)
    for call in others:
        parts += [part for part in call.args if part != first.results[0]]
    return parts
