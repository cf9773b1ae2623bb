"""Rotary embeddings in a recording: angles from a table, each turn of heads in one call, with the norm before it."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.generation.recorded.fusions.fused import fused
from engine.generation.recorded.fusions.norms import Norm, norm_of
from engine.generation.recorded.graph import Graph, Place, is_view
from engine.generation.recorded.patterns import Found, both, cast, either, exactly, find, joined, named, of, parameter
from engine.generation.recorded.recording import Call, Form, Value
from engine.kernels.ready import DTYPES
from engine.kernels.rows import maker

_X = named("x")
_ACROSS = joined(of("neg", of("__getitem__", _X, named("second"))), of("__getitem__", _X, named("first")))
TURN = both("add", both("mul", _X, named("cosines")), both("mul", _ACROSS, named("sines")))

_ALL = slice(None)
_POSITIONS = of("__getitem__", named("positions"), exactly((Ellipsis, None)))
_ROW = of("__getitem__", named("positions"), exactly((_ALL, None, _ALL)))
_EACH = of("__getitem__", parameter("frequencies"), exactly((None, _ALL, None)))
_COLUMN = of("expand", cast(_EACH), exactly(1), exactly(-1), exactly(1))
_ANGLE = either(
    both("mul", cast(_POSITIONS), cast(parameter("frequencies"))),
    of("transpose", of("matmul", cast(_COLUMN), cast(_ROW)), exactly(1), exactly(2)),  # older transformers
)
_ANGLES = joined(_ANGLE, _ANGLE)
COSINES, SINES = (cast(either(of("mul", of(n, _ANGLES), named("scale")), of(n, _ANGLES))) for n in ("cos", "sin"))


class Room(Protocol):
    """A step, which knows how many tokens a sequence may have in it."""

    @property
    def capacity(self) -> int: ...


class Table:
    """Cosines and sines of the angles of all positions so far, as the function of a call.

    Made by the operators that the model calls, so they are the same. Frequencies are asked for anew after a flip.
    """

    __name__ = "angles"

    def __init__(self, dtype: torch.dtype, scale: float) -> None:
        self.dtype, self.scale = dtype, scale
        self._cosines = self._sines = torch.empty(0)

    def now(self) -> "Table":
        return Table(self.dtype, self.scale)

    def __call__(self, positions: Tensor, step: Room, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """positions (1, N), frequencies (half,) -> cosines and sines (1, N, 2 half)."""
        if step.capacity > len(self._cosines):
            angles = torch.arange(step.capacity, device=frequencies.device).float()[:, None] * frequencies.float()
            angles = torch.cat((angles, angles), -1)
            self._cosines, self._sines = ((f * self.scale).to(self.dtype) for f in (angles.cos(), angles.sin()))
        return functional.embedding(positions, self._cosines), functional.embedding(positions, self._sines)


def fuse_angles(graph: Graph) -> None:
    """Look cosines and sines up where they are computed from the step's positions."""
    _, positions, step = graph.recording.inputs
    pairs: dict[tuple[object, object], dict[str, tuple[Value, Found]]] = {}
    for call in graph.calls():
        for name, pattern in (("cos", COSINES), ("sin", SINES)):
            value = call.results[0] if call.whole else None
            found = None if value is None else find(graph, pattern, value)
            if found is not None and value is not None and found["positions"] == positions:
                pairs.setdefault((found["frequencies"], found.bound.get("scale", 1.0)), {})[name] = value, found
    for (frequencies, scale), pair in pairs.items():
        values = [value for value, _ in pair.values()]
        calls = {key: call for _, found in pair.values() for key, call in found.calls.items()}
        forms = {graph.forms[value] for value in values}
        if len(pair) == 2 and len(forms) == 1 and isinstance(scale, float) and graph.closed(calls.values(), values):
            results = (pair["cos"][0], pair["sin"][0])
            made = Table(forms.pop().dtype, scale)
            looked_up = Call(made, (positions, step, frequencies), {}, results, whole=False, contiguous=True)
            graph.put([looked_up], at=graph.makers[values[0]], gone=calls.values())


@dataclass(frozen=True)
class Turn:
    """Heads x (1, heads, N, turned), in place `at`, that turn; `size` is that of whole heads."""

    result: Value
    at: Place
    size: int
    cosines: Value
    sines: Value
    calls: tuple[Call, ...]
    norm: Norm | None = None


def fuse_rotary(graph: Graph) -> None:
    """Put a call of our kernel for each turn of heads."""
    make = maker("turn_heads", graph.recording.device)
    if make is None:
        return
    for call in graph.calls():
        turn = _turn(graph, call.results[0]) if call.name == "add" and call.results[0] is not None else None
        if turn is None:
            continue
        (_, heads, tokens, _), (_, head_stride, token_stride, last) = turn.at.shape, turn.at.strides
        if last != 1 or not graph.closed(turn.calls, [turn.result]):
            continue
        dtype, norm = graph.forms[turn.result].dtype, turn.norm
        prepare = partial(
            make,
            tokens,
            heads,
            turn.size,
            dtype,
            turned=turn.at.shape[-1],
            at=(turn.at.offset, token_stride, head_stride),
            kind=None if norm is None else norm.kind,
            eps=0.0 if norm is None else norm.eps,
        )
        written = graph.new(Form((1, tokens, heads, turn.size), dtype))
        arguments = [turn.at.base, turn.cosines, turn.sines, *([norm.weight] if norm is not None else [])]
        seen = Call(Tensor.transpose, (written, 1, 2), {}, (turn.result,))
        graph.put(
            [*fused(graph, "rotary", prepare, arguments, [written]), seen],
            at=graph.makers[turn.result],
            gone=turn.calls,
        )


def _turn(graph: Graph, turned: Value) -> Turn | None:
    """The turn that ends with `turned`, or with what it is joined to."""
    found = find(graph, TURN, turned)
    if found is None:
        return None
    form, place = graph.forms.get(found["x"]), graph.place(found["x"])
    if form is None or place is None or len(form.shape) != 4 or form.shape[0] != 1 or form.dtype not in DTYPES:
        return None
    half = form.shape[-1] // 2
    halves = found["first"] == (Ellipsis, slice(None, half)) and found["second"] == (Ellipsis, slice(half, None))
    angles = [_angle(graph, found[name], (1, 1, *form.shape[2:]), form.dtype) for name in ("cosines", "sines")]
    if not halves or form.shape[-1] % 2 or graph.forms[turned] != form or None in angles:
        return None
    cosines, sines = (value for value in angles if value is not None)
    calls = tuple(found.calls.values())
    part = _part(graph, turned, place)
    if part is not None:
        join, size = part
        if join.results[0] is None:
            return None
        return Turn(join.results[0], place, size, cosines, sines, (*calls, join))
    turn = Turn(turned, place, form.shape[-1], cosines, sines, calls)
    return _with_norm(graph, found["x"], turn) or turn


def _angle(graph: Graph, value: Value, shape: tuple[int, ...], dtype: torch.dtype) -> Value | None:
    """The value whose numbers are those of cosines or sines, one row a token."""
    place = graph.place(value) if isinstance(value, Value) else None
    fits = place is not None and place.packed and place.shape == shape and graph.forms[place.base].dtype == dtype
    return place.base if fits and place is not None else None


def _part(graph: Graph, turned: Value, place: Place) -> tuple[Call, int] | None:
    """The call that joins what turned with what is left of the heads, and their size."""
    readers = graph.readers.get(turned, [])
    join = readers[0] if len(readers) == 1 and readers[0].name == "cat" else None
    if join is None or len(join.args[0]) != 2 or join.args[0][0] != turned:
        return None
    rest = graph.place(join.args[0][1])
    last = [*join.args[1:], *join.kwargs.values()] == [-1]
    if (
        rest is None
        or not last
        or (rest.base, rest.strides, rest.shape[:-1])
        != (
            place.base,
            place.strides,
            place.shape[:-1],
        )
    ):
        return None
    return (join, place.shape[-1] + rest.shape[-1]) if rest.offset == place.offset + place.shape[-1] else None


def _with_norm(graph: Graph, x: Value, turn: Turn) -> Turn | None:
    """The turn with the norm of its heads, where these are made for it alone."""
    norm = norm_of(graph, turn.at.base)
    if norm is None or norm.bias is not None or graph.forms[norm.x].shape[-1] != turn.size:
        return None
    place = graph.place(x, same={norm.result: norm.x})
    views, at = [], x
    while at != norm.result:
        view = graph.makers[at]
        assert is_view(view)
        views.append(view)
        at = view.args[0]
    calls = (*turn.calls, *views, *norm.calls)
    if place is None or not graph.closed(calls, [turn.result]):
        return None
    return Turn(turn.result, place, turn.size, turn.cosines, turn.sines, calls, norm)
