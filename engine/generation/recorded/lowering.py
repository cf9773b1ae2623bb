"""A recording with fewer, larger calls that compute the same.

Linear layers become products with their packs; those that read the same value become one product; a ReLU goes into the
product before it (it commutes with rounding, so the result is the same bit for bit). What stands between the products
is joined by `fusing.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.generation.packed import Pack, PackedLinears
from engine.generation.recorded.fusing import fuse
from engine.generation.recorded.graph import values
from engine.generation.recorded.recording import Call, Form, Layer, Recording, Value

RELUS = (functional.relu, torch.relu, Tensor.relu)


def lower(recording: Recording, packs: PackedLinears, rows: int) -> Recording:
    """The recording for steps of `rows` rows."""
    kept = _without(recording)
    joined = _with_joint_products(kept, packs)
    return fuse(_with_packs(joined, packs, rows))


def _without(recording: Recording) -> Recording:
    """Leave out calls that give their first argument back."""
    same: dict[Value, Value] = {}
    calls = []
    for call in recording.calls:
        call = replace(
            call, args=_renamed(call.args, same), kwargs={key: _renamed(v, same) for key, v in call.kwargs.items()}
        )
        result = call.results[0]
        if result is not None and _gives_back(call, recording.forms):
            same[result] = call.args[0]
        else:
            calls.append(call)
    return replace(recording, calls=tuple(calls), output=same.get(recording.output, recording.output))


def _gives_back(call: Call, forms: Mapping[Value, Form]) -> bool:
    """Whether a call's result is its first argument: a dropout that is off, a cast to what it is, a view of all."""
    if call.mutates or not call.whole:
        return False
    if call.same or (call.function is functional.dropout and call.kwargs.get("training") is False):
        return True
    viewed = call.args[0] if call.args else None
    if not isinstance(viewed, Value) or not call.results[0] or forms.get(viewed) != forms[call.results[0]]:
        return False
    if call.name == "__getitem__":
        places = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        return all(place in (Ellipsis, slice(None), slice(0, None)) for place in places)
    return call.name in ("view", "reshape")


def _renamed(argument: Any, same: dict[Value, Value]) -> Any:
    if isinstance(argument, Value):
        return same.get(argument, argument)
    if type(argument) in (tuple, list):
        return type(argument)(_renamed(item, same) for item in argument)
    return argument


def _with_joint_products(recording: Recording, packs: PackedLinears) -> Recording:
    """Products that read the same value computed as one, and split."""
    if any(call.mutates for call in recording.calls):
        return recording  # the value might be another one by the time of a later product
    readers: dict[Value, list[Call]] = {}
    for call in recording.calls:
        if isinstance(call.function, Layer):
            readers.setdefault(call.args[0], []).append(call)
    times = [call.function.layer for call in recording.calls if isinstance(call.function, Layer)]
    first: dict[int, Call] = {}  # by the call it takes the place of
    gone: set[int] = set()
    for value, calls in readers.items():
        results = {call.function.layer: call.results[0] for call in calls if isinstance(call.function, Layer)}
        alone = len(calls) == 1 or any(times.count(layer) > 1 for layer in results)
        layers = None if alone else packs.joinable([*results])
        if layers is not None:
            given = tuple(results[layer] for layer in layers)
            first[id(calls[0])] = Call(_Joint(tuple(layers)), (value,), {}, given, whole=False)
            gone |= {id(call) for call in calls[1:]}
    calls = [first.get(id(call), call) for call in recording.calls if id(call) not in gone]
    return replace(recording, calls=tuple(calls))


@dataclass(frozen=True)
class _Joint:
    """Several layers that read the same value, as the function of a call."""

    layers: tuple[nn.Module, ...]
    __name__ = "joint"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a joint call is put into words before it is called")


def _with_packs(recording: Recording, packs: PackedLinears, rows: int) -> Recording:
    """Layers put into words, each with the ReLU that follows it."""
    used = _uses(recording)
    spare = max(value.index for value in used) + 1
    relus = {
        call.args[0]: call
        for call in recording.calls
        if call.function in RELUS and isinstance(call.args[0], Value) and used[call.args[0]] == 1
    }
    calls: list[Call] = []
    forms = dict(recording.forms)
    absorbed: set[int] = set()
    for call in recording.calls:
        if isinstance(call.function, _Joint):
            pack, product = packs.join(call.function.layers), Value(spare + len(calls))
            if pack.pays(rows):
                forms[product] = Form((*forms[call.args[0]].shape[:-1], sum(pack.outs)), pack.dtype)
                calls.append(_product(call.args[0], pack, False, product))
                calls.append(Call(Tensor.split, (product, list(pack.outs), -1), {}, call.results, whole=False))
            else:
                calls += _each(pack, call)
        elif isinstance(call.function, Layer):
            pack, result = packs.of(call.function.layer), call.results[0]
            relu = relus.get(result) if result is not None and pack.pays(rows) else None
            if relu is not None:
                absorbed.add(id(relu))
                result = relu.results[0]
            single = _product(call.args[0], pack, relu is not None, result)
            calls += [single] if pack.pays(rows) else _each(pack, call)
        elif id(call) not in absorbed:
            calls.append(call)
    return replace(recording, calls=tuple(calls), forms=forms)


def _each(pack: Pack, call: Call) -> list[Call]:
    """The layers of a pack one by one, for numbers of rows at which it does not pay."""
    layers = zip(pack.layers, call.results, strict=True)
    return [Call(partial(pack.forward, layer), call.args, {}, (result,)) for layer, result in layers]


def _product(value: Any, pack: Pack, relu: bool, result: Value | None) -> Call:
    return Call(pack.product, (value, relu), {}, (result,), contiguous=True)


def _uses(recording: Recording) -> dict[Value, int]:
    """How often each value is read; the inputs and the output once more."""
    used: dict[Value, int] = dict.fromkeys((*recording.inputs, recording.output), 1)
    for call in recording.calls:
        for result in call.results:
            if result is not None:
                used.setdefault(result, 0)
        for value in values([*call.args, *call.kwargs.values()]):
            used[value] = used.get(value, 0) + 1
    return used
