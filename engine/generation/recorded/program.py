"""A recording as a function: one line of Python a call, its constants bound once.

Names in the source are ours alone (v3, c5); whatever a call is given stands behind such a name, so nothing that a model
says is ever read as code.
"""

from collections.abc import Callable, Iterator
from typing import Any

from engine.generation.recorded.recording import Call, Held, Recording, Value


class Program:
    """Call it with the recording's inputs; returns its output. `bind` after parameters were replaced."""

    def __init__(self, recording: Recording) -> None:
        self._constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        last = _last_uses(recording)
        body = []
        for at, call in enumerate(recording.calls):
            if not call.mutates and all(r is None or r.index not in last for r in call.results):
                continue  # nobody wants it
            body.append(self._line(call))
            gone = [f"v{index}" for index, use in last.items() if use == at]
            if gone:
                body.append(f"del {', '.join(gone)}")
        inputs = ", ".join(f"v{value.index}" for value in recording.inputs)
        source = "\n    ".join([f"def run({inputs}):", *body, f"return v{recording.output.index}"])
        self._space: dict[str, Any] = {}
        self.bind()
        exec(compile(source, "<recorded step>", "exec"), self._space)  # names and commas, made above
        self._run: Callable[..., Any] = self._space["run"]

    def bind(self) -> None:
        """Look up parameters, buffers and packs again."""
        for name, constant in self._constants.items():
            self._space[name] = constant.now() if hasattr(constant, "now") else constant

    def unbind(self) -> None:
        """Let go of them until `bind`."""
        for name in self._constants:
            self._space.pop(name, None)

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)

    def _line(self, call: Call) -> str:
        arguments = [self._word(argument) for argument in call.args]
        arguments += [f"{name}={self._word(value)}" for name, value in call.kwargs.items() if name.isidentifier()]
        results = ["_" if result is None else f"v{result.index}" for result in call.results]
        left = results[0] if call.whole else f"({', '.join(results)},)"
        return f"{left} = {self._name(call.function)}({', '.join(arguments)})"

    def _word(self, argument: Any) -> str:
        """An argument in the source: values and tuples or lists of them are spelled, all else gets a name."""
        if isinstance(argument, Value):
            return f"v{argument.index}"
        if type(argument) in (tuple, list) and any(True for _ in _within(argument)):
            inside = ", ".join(self._word(item) for item in argument)
            return f"({inside},)" if type(argument) is tuple else f"[{inside}]"
        return self._name(argument)

    def _name(self, constant: Any) -> str:
        key = hash(constant) if isinstance(constant, Held) else id(constant)
        if key not in self._names:
            self._names[key] = f"c{len(self._names)}"
            self._constants[self._names[key]] = constant
        return self._names[key]


def _last_uses(recording: Recording) -> dict[int, int]:
    """Which call is the last to need each value; the output is needed after all. Unused results are left out."""
    last: dict[int, int] = {}
    for at, call in enumerate(recording.calls):
        for value in _within([*call.args, *call.kwargs.values()]):
            if isinstance(value, Value):
                last[value.index] = at
    last[recording.output.index] = len(recording.calls)
    return last


def _within(argument: Any) -> Iterator[Value | Held]:
    """The values that stand in an argument; parameters, too, as they keep it from being one constant."""
    if isinstance(argument, Value | Held):
        yield argument
    elif type(argument) in (tuple, list):
        for item in argument:
            yield from _within(item)
