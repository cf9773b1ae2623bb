"""Patterns of calls: what a result was made of, found by going backwards from it.

A pattern is a function that says whether an argument fits, and notes in `Found` which calls it went through and what
stood in its open places.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.generation.recorded.graph import Graph
from engine.generation.recorded.recording import Call, Held

CASTS = ("to", "float", "type_as", "bfloat16", "half")


@dataclass
class Found:
    """`calls` that make up a pattern, and what stands in its open places by name."""

    bound: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]


Pattern = Callable[[Graph, Any, Found], bool]


def find(graph: Graph, pattern: Pattern, argument: Any) -> Found | None:
    """What of the graph fits the pattern, ending with `argument`."""
    found = Found()
    return found if pattern(graph, argument, found) else None


def named(name: str) -> Pattern:
    """Anything; the same wherever the name stands."""

    def fits(graph: Graph, argument: Any, found: Found) -> bool:
        if name not in found.bound:
            found.bound[name] = argument
            return True
        known = found.bound[name]
        return known is argument or (type(known) is type(argument) and known == argument)

    return fits


def parameter(name: str) -> Pattern:
    """A parameter or buffer."""
    place = named(name)
    return lambda graph, argument, found: isinstance(argument, Held) and place(graph, argument, found)


def exactly(number: Any) -> Pattern:
    """This number, text or None."""
    return lambda graph, argument, found: type(argument) is type(number) and bool(argument == number)


def of(name: str, *arguments: Pattern, **named_arguments: Any) -> Pattern:
    """A call of this name with these arguments and no others."""

    def fits(graph: Graph, argument: Any, found: Found) -> bool:
        call = graph.maker(argument, name)
        if call is None or len(call.args) != len(arguments) or _told(call) != named_arguments:
            return False
        found.calls[id(call)] = call
        return all(inner(graph, each, found) for inner, each in zip(arguments, call.args, strict=True))

    return fits


def either(*patterns: Pattern) -> Pattern:
    """The first of the patterns that fits."""

    def fits(graph: Graph, argument: Any, found: Found) -> bool:
        bound, calls = dict(found.bound), dict(found.calls)
        for pattern in patterns:
            if pattern(graph, argument, found):
                return True
            found.bound, found.calls = dict(bound), dict(calls)
        return False

    return fits


def both(name: str, one: Pattern, other: Pattern) -> Pattern:
    """A call of two arguments in either order."""
    return either(of(name, one, other), of(name, other, one))


def cast(pattern: Pattern) -> Pattern:
    """What fits, in whatever type of number."""

    def through(graph: Graph, argument: Any, found: Found) -> bool:
        call = graph.maker(argument, *CASTS)
        if call is None:
            return False
        found.calls[id(call)] = call
        return pattern(graph, call.args[0], found)

    return either(through, pattern)


def joined(*parts: Pattern) -> Pattern:
    """A concatenation of the last dimension."""

    def fits(graph: Graph, argument: Any, found: Found) -> bool:
        call = graph.maker(argument, "cat")
        if call is None or not call.args or len(call.args[0]) != len(parts):
            return False
        if [*call.args[1:], *_told(call).values()] != [-1]:
            return False
        found.calls[id(call)] = call
        return all(inner(graph, each, found) for inner, each in zip(parts, call.args[0], strict=True))

    return fits


def _told(call: Call) -> dict[str, Any]:
    """Named arguments that say something."""
    return {name: value for name, value in call.kwargs.items() if value is not None and value is not False}
