"""Recording a forward: the flat list of calls that a module made, without the module around them.

A decode step of a small batch is a few hundred short operations; finding them through modules, keyword arguments and
hooks takes as long as some of them do. So one step is watched (`TorchFunctionMode`) and what it called is kept, to be
called again on other tokens (`program.py`). That is right only where the calls don't depend on the tokens. A module
that asks for a number, or for what has a size that numbers decide, is refused here; what slips through shows when the
first replay is held against the module (`steps.py`).

Left out: forwards that need a gradient; control flow that depends on values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
Function = TypeVar("Function", bound=Callable[..., Any])

# What says something of a tensor without looking at its numbers: a recording is for fixed shapes, so need not keep it.
ABOUT = {
    "__get__",
    "__hash__",
    "__len__",
    "__format__",
    "__repr__",
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "get_device",
    "element_size",
    "type",
    "is_inference",
    "is_same_size",
    "data_ptr",
}
SIZED_BY_NUMBERS = {
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "bincount",
    "histc",
    "repeat_interleave",
    "tolist",
}


class Unrecordable(Exception):
    """The forward does something that can't be recorded."""


@dataclass(frozen=True)
class Value:
    """A tensor, or the step, that is another one at each replay."""

    index: int


@dataclass(frozen=True)
class Held:
    """A parameter or buffer, found where it lies: it may be another tensor after a flip."""

    owner: nn.Module
    kind: str
    leaf: str

    def now(self) -> Tensor:
        found: Tensor = getattr(self.owner, self.kind)[self.leaf]
        return found


@dataclass(frozen=True)
class Form:
    """What a value is at every replay; how it lies in memory is not said."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """`results` has a value for each tensor that `function` gave, None for what was none; one alone is `whole`.

    `same`: it gave its first argument back. `contiguous`: its results are so at every replay.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Value | None, ...]
    whole: bool = True
    same: bool = False
    contiguous: bool = False

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "")

    @property
    def mutates(self) -> bool:
        """Whether it may write into one of its arguments."""
        name = self.name
        in_place = name.endswith("_") and not name.endswith("__")
        return in_place or name == "__setitem__" or name.startswith("__i") or self.kwargs.get("out") is not None


@dataclass(frozen=True)
class Layer:
    """A linear layer with packed weights, as the function of a call."""

    layer: nn.Module
    __name__: ClassVar[str] = "layer"

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("a layer is put into words before it runs")


@dataclass(frozen=True)
class Recording:
    """Calls in order; `inputs` are the values that a replay is given, `output` is what it returns."""

    calls: tuple[Call, ...]
    inputs: tuple[Value, ...]
    output: Value
    forms: Mapping[Value, Form] = field(default_factory=dict)
    device: torch.device = CPU


class Recorder(TorchFunctionMode):
    """Watches what is called while it is entered, by one forward of `module` on `inputs`."""

    active: ClassVar["Recorder | None"] = None

    def __init__(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.inputs = tuple(Value(index) for index in range(len(inputs)))
        self._known: dict[int, Value] = {id(value): at for value, at in zip(inputs, self.inputs, strict=True)}
        self._alive: list[Any] = list(inputs)  # so that no id is given twice
        self._held = {
            id(tensor): Held(owner, kind, leaf)
            for owner in module.modules()
            for kind in ("_parameters", "_buffers")
            for leaf, tensor in getattr(owner, kind).items()
            if tensor is not None
        }
        self._inside = False

    def finish(self, output: Tensor) -> Recording:
        """What was recorded, of which `output` is the result."""
        if id(output) not in self._known:
            raise Unrecordable("its output comes from elsewhere")
        forms = {
            Value(index): Form(tuple(tensor.shape), tensor.dtype)
            for index, tensor in enumerate(self._alive)
            if isinstance(tensor, Tensor)
        }
        return Recording(tuple(self.calls), self.inputs, self._known[id(output)], forms, output.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], as_: Any = None
    ) -> Any:
        """Call a function; what it calls itself is not recorded. `as_` stands for it in the recording."""
        was_inside, self._inside = self._inside, True
        try:
            outcome = function(*args, **kwargs)
        finally:
            self._inside = was_inside
        if not self._inside:
            self._note(as_ or function, args, kwargs, outcome)
        return outcome

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block calls are recorded."""
        Recorder.active = self
        try:
            with self:
                yield
        finally:
            Recorder.active = None

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outcome: Any) -> None:
        name = getattr(function, "__name__", str(function))
        whole = not isinstance(outcome, tuple | list)
        results = [outcome] if whole else list(outcome)
        if not any(isinstance(result, Tensor) for result in results):
            if name in ABOUT or not any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
                return
            raise Unrecordable(f"it asks a tensor for {name}")
        if name in SIZED_BY_NUMBERS or (name == "where" and len(args) + len(kwargs) == 1) or _by_mask(name, args):
            raise Unrecordable(f"numbers decide the size of {name}")
        if not all(result is None or isinstance(result, Tensor) for result in results):
            raise Unrecordable(f"{name} gives more than tensors")
        told, named = self._refer(args), {key: self._refer(value) for key, value in kwargs.items()}
        function, told = _plain(function, told)
        same = whole and bool(args) and outcome is args[0]
        self.calls.append(Call(function, told, named, tuple(self._new(r) for r in results), whole, same))

    def _new(self, tensor: Tensor | None) -> Value | None:
        if tensor is None:
            return None
        value = Value(len(self._alive))
        self._alive.append(tensor)
        self._known[id(tensor)] = value
        return value

    def _refer(self, argument: Any) -> Any:
        """An argument with what changes from replay to replay replaced."""
        if id(argument) in self._known:
            return self._known[id(argument)]
        if isinstance(argument, Tensor):
            if id(argument) in self._held:
                return self._held[id(argument)]
            raise Unrecordable("it uses a tensor that is neither parameter nor buffer nor computed")
        if isinstance(argument, tuple | list) and type(argument) in (tuple, list):
            return type(argument)(self._refer(item) for item in argument)
        if isinstance(argument, slice) and any(isinstance(p, Tensor) for p in (argument.start, argument.stop)):
            raise Unrecordable("a number of a tensor bounds a slice")
        if isinstance(argument, dict):
            raise Unrecordable("it hands over a table")
        return argument


def recorded_whole(function: Function) -> Function:
    """A function of ours that a recording takes as one call."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = Recorder.active
        return function(*args, **kwargs) if recorder is None else recorder.call(function, args, kwargs)

    return call  # type: ignore[return-value]


def _plain(function: Any, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Attributes (`x.T`) are asked for by name; their getters are no functions to keep."""
    if getattr(function, "__name__", "") == "__get__":
        return getattr, (args[0], function.__self__.__name__)
    return function, args


def _by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a mask picks elements, whose number it decides."""
    if name != "__getitem__":
        return False
    places = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(place, Tensor) and place.dtype in (torch.bool, torch.uint8) for place in places)
