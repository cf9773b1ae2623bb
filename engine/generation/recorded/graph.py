"""A recording as a graph of values: who makes and reads each, where views lie, and what calls may stand for others."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.generation.recorded.recording import Call, Form, Recording, Value

VIEWS = {
    "view",
    "reshape",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "split",
    "chunk",
    "unbind",
    "flatten",
    "unflatten",
    "narrow",
    "select",
    "expand",
    "contiguous",
    "__getitem__",
}


@dataclass(frozen=True)
class Place:
    """Where a value's numbers lie in its base, which is no view and contiguous. In numbers."""

    base: Value
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def rows(self) -> tuple[int, int, int] | None:
        """(rows, numbers of each, stride of the rows) where the last dimension lies together and the others are one."""
        size, strides = self.shape[-1], [*zip(self.shape[:-1], self.strides[:-1], strict=True)]
        apart = [(count, stride) for count, stride in strides if count > 1]
        if self.strides[-1] != 1 and size > 1:
            return None
        for (_, outer), (count, inner) in pairwise(apart):
            if outer != count * inner:
                return None
        return math.prod(count for count, _ in apart), size, apart[-1][1] if apart else size

    @property
    def packed(self) -> bool:
        """Whether it begins where its base does and lies together."""
        found = self.rows()
        return found is not None and self.offset == 0 and found[2] == found[1]


class Graph:
    """A recording that is rewritten. Only for recordings in which nothing is written in place."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.output = recording, recording.output
        self.forms = dict(recording.forms)
        self.makers: dict[Value, Call] = {}
        self.readers: dict[Value, list[Call]] = {self.output: []}
        self._order: dict[int, list[Call]] = {}  # calls that stand where one stood
        self._all: list[Call] = []  # so that no id is given twice
        for call in recording.calls:
            self._add(call)
        self._spare = 1 + max(value.index for value in (*recording.inputs, *self.makers))

    def _add(self, call: Call) -> None:
        self._all.append(call)
        self.makers |= {result: call for result in call.results if result is not None}
        for value in values([*call.args, *call.kwargs.values()]):
            self.readers.setdefault(value, []).append(call)

    def maker(self, value: Any, *names: str) -> Call | None:
        """The call that makes a value alone, if it has one of these names."""
        call = self.makers.get(value) if isinstance(value, Value) else None
        return call if call is not None and call.whole and call.name in names else None

    def closed(self, calls: Collection[Call], results: Collection[Value]) -> bool:
        """Whether nobody else reads what these calls make, but for `results`."""
        known = {id(call) for call in calls}
        made = {result for call in calls for result in call.results if result is not None} - set(results)
        if self.output in made:
            return False
        return all(id(reader) in known for value in made for reader in self.readers.get(value, ()))

    def put(self, calls: Iterable[Call], at: Call, gone: Collection[Call] = ()) -> None:
        """Let `calls` stand where `at` stands, which stays if it is one of them; drop `gone`."""
        calls = list(calls)
        kept = {id(call) for call in calls}
        dropped = [call for call in {id(c): c for c in (at, *gone)}.values() if id(call) not in kept]
        for call in dropped:
            for value in values([*call.args, *call.kwargs.values()]):
                self.readers[value] = [reader for reader in self.readers[value] if reader is not call]
            self._order.setdefault(id(call), [])
        for call in calls:
            if call is not at:
                self._add(call)
        self._order[id(at)] = calls

    def new(self, form: Form) -> Value:
        value = Value(self._spare)
        self._spare += 1
        self.forms[value] = form
        return value

    def calls(self) -> list[Call]:
        """All calls in order."""

        def standing(call: Call) -> Iterable[Call]:
            if id(call) not in self._order:
                return [call]
            return [each for other in self._order[id(call)] for each in ([call] if other is call else standing(other))]

        return [each for call in self.recording.calls for each in standing(call)]

    def finished(self) -> Recording:
        """The recording now, without what nobody reads."""
        wanted, kept = {self.output}, []
        for call in reversed(self.calls()):
            if any(result in wanted for result in call.results):
                kept.append(call)
                wanted |= set(values([*call.args, *call.kwargs.values()]))
        return replace(self.recording, calls=tuple(reversed(kept)), output=self.output, forms=self.forms)

    def place(self, value: Value, same: Mapping[Value, Value] | None = None) -> Place | None:
        """Where a value lies, by doing its views on tensors without numbers.

        `same` values count as lying where another one does: those that a kernel makes on the way.
        """
        found = self._seen(value, same or {})
        if found is None:
            return None
        base, meta = found
        return Place(base, int(meta.storage_offset()), tuple(meta.shape), tuple(meta.stride()))

    def _seen(self, value: Value, same: Mapping[Value, Value]) -> tuple[Value, Tensor] | None:
        if value in same:
            return self._seen(same[value], same)
        if value not in self.forms:
            return None
        call = self.makers.get(value)
        if call is None or not is_view(call):
            form = self.forms[value]
            return value, torch.empty(form.shape, dtype=form.dtype, device="meta")
        before = self._seen(call.args[0], same)
        if before is None:
            return None
        base, meta = before
        try:
            outcome = call.function(meta, *call.args[1:], **call.kwargs)
        except RuntimeError:  # it can't be seen so where it lies here
            return None
        after = outcome if call.whole else outcome[call.results.index(value)]
        if after.untyped_storage()._cdata == meta.untyped_storage()._cdata:
            return base, after
        return value, torch.empty(after.shape, dtype=after.dtype, device="meta")  # a copy


def is_view(call: Call) -> bool:
    """Whether a call looks at its first argument in another way, or copies it so."""
    if call.name not in VIEWS or not isinstance(call.args[0], Value):
        return False
    return not values([*call.args[1:], *call.kwargs.values()])


def values(arguments: Sequence[Any]) -> list[Value]:
    """The values that stand in arguments."""
    found = []
    for argument in arguments:
        if isinstance(argument, Value):
            found.append(argument)
        elif type(argument) in (tuple, list):
            found += values(argument)
    return found


def steady(call: Call | None) -> bool:
    """Whether a call's result is contiguous at every replay."""
    return call is not None and (call.contiguous or call.function is functional.embedding)
