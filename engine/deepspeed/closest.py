"""Refusing an unknown name with the closest known one."""

import difflib
from collections.abc import Iterable


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
