"""Refusals of a DeepSpeed configuration: an unknown name, with the closest known one, and a value of the wrong kind."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, if any is."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def refuse_unknown(given: Iterable[str], known: tuple[str, ...], section: str, what: str = "key") -> None:
    """Raise ValueError for the first name that is not known."""
    for name in given:
        if name not in known:
            near = closest(name, known)
            meant = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"{section}: DeepSpeed has no {what} {name}; {meant}")


def section_of(name: str, value: Any) -> dict[str, Any]:
    """A section, empty where there is none. Raises ValueError for anything else."""
    if value is None or value == "auto":
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={json.dumps(value)}: write a section, {{key: value, ...}}, or leave it out")
    return dict(value)


def number_of(name: str, value: Any, least: float | None = None) -> float:
    """A number, also as text (1e-5 in quotes). Raises ValueError for anything else, and for one below `least`."""
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        number = float("nan")
    if number != number or (least is not None and number < least):
        bound = "" if least is None else f", at least {least:g}"
        raise ValueError(f"{name}={json.dumps(value)}: write a number{bound}")
    return number
