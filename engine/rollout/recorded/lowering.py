"""A recording with fewer, larger calls that compute the same.

Linear layers become products with their packs; those that read the same value become one product; a ReLU goes into the
product before it (it commutes with rounding, so the result is the same bit for bit).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.rollout.packed import Pack, PackedLinears
from engine.rollout.recorded.recording import Call, Layer, Recording, Value

RELUS = (functional.relu, torch.relu, Tensor.relu)


def lower(recording: Recording, packs: PackedLinears, rows: int) -> Recording:
    """The recording for steps of `rows` rows."""
    kept = _without(recording, _is_dropout)
    joined = _with_joint_products(kept, packs)
    return replace(joined, calls=tuple(_with_packs(joined, packs, rows)))


def _is_dropout(call: Call) -> bool:
    return call.function is functional.dropout and call.kwargs.get("training") is False


def _without(recording: Recording, drop: Callable[[Call], bool]) -> Recording:
    """Leave out calls that give their first argument back."""
    same: dict[Value, Value] = {}
    calls = []
    for call in recording.calls:
        call = replace(
            call, args=_renamed(call.args, same), kwargs={key: _renamed(v, same) for key, v in call.kwargs.items()}
        )
        if drop(call) and call.results[0] is not None:
            same[call.results[0]] = call.args[0]
        else:
            calls.append(call)
    return replace(recording, calls=tuple(calls), output=same.get(recording.output, recording.output))


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
        layers = [call.function.layer for call in calls if isinstance(call.function, Layer)]
        kinds = {packs.of(layer).dtype for layer in layers}
        if len(calls) > 1 and len(kinds) == 1 and all(times.count(layer) == 1 for layer in layers):
            results = tuple(call.results[0] for call in calls)
            first[id(calls[0])] = Call(_Joint(tuple(layers)), (value,), {}, results, whole=False)
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


def _with_packs(recording: Recording, packs: PackedLinears, rows: int) -> list[Call]:
    """Layers put into words, each with the ReLU that follows it."""
    used = _uses(recording)
    spare = max(value.index for value in used) + 1
    relus = {
        call.args[0]: call
        for call in recording.calls
        if call.function in RELUS and isinstance(call.args[0], Value) and used[call.args[0]] == 1
    }
    calls: list[Call] = []
    absorbed: set[int] = set()
    for call in recording.calls:
        if isinstance(call.function, _Joint):
            pack, product = packs.join(call.function.layers), Value(spare + len(calls))
            if pack.pays(rows):
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
    return calls


def _each(pack: Pack, call: Call) -> list[Call]:
    """The layers of a pack one by one, for numbers of rows at which it does not pay."""
    layers = zip(pack.layers, call.results, strict=True)
    return [Call(partial(pack.forward, layer), call.args, {}, (result,)) for layer, result in layers]


def _product(value: Any, pack: Pack, relu: bool, result: Value | None) -> Call:
    return Call(pack.product, (value, relu), {}, (result,))


def _uses(recording: Recording) -> dict[Value, int]:
    """How often each value is read; the inputs and the output once more."""
    used: dict[Value, int] = dict.fromkeys((*recording.inputs, recording.output), 1)
    for call in recording.calls:
        for result in call.results:
            if result is not None:
                used.setdefault(result, 0)
        for value in _values([*call.args, *call.kwargs.values()]):
            used[value] = used.get(value, 0) + 1
    return used


def _values(arguments: Sequence[Any]) -> list[Value]:
    found = []
    for argument in arguments:
        if isinstance(argument, Value):
            found.append(argument)
        elif type(argument) in (tuple, list):
            found += _values(argument)
    return found
