"""What a DeepSpeed configuration says, as dotted keys with their values, each checked against the table.

A boolean section switch that DeepSpeed reads as absent (an empty section) is absent here too.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.deepspeed.keys import KEYS, Key
from engine.deepspeed.refusals import closest, section_of

RENAMED = {"bfloat16": "bf16"}
FREE = ("optimizer", "scheduler")
REMARK = re.compile(r"([_#]|//).*|comments?", re.IGNORECASE)  # what people call keys that JSON has no comments for
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int, float), "a whole number"),
    "number": ((int, float), "a number"),
    "text": ((str,), "text"),
    "list": ((list, tuple), "[a, b, ...]"),
    "section": ((dict,), "{key: value, ...}"),
    "any": ((object,), "a value"),
}
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)


def open_file(path: str | Path) -> dict[str, Any]:
    """A JSON file as a dictionary; comments may stand in it. Raises ValueError where there is none, or a key twice."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise ValueError(f"{path}: there is no such file (looked from {Path.cwd()})")
    try:
        found = json.loads(_without_comments(place.read_text(encoding="utf-8")), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold one JSON object")
    return found


def _without_comments(text: str) -> str:
    """JSON without the comments that DeepSpeed allows (it reads Hjson); strings, lines and columns stay as they are."""
    return COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0]), text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key} stands twice in one section; keep one")
    return dict(pairs)


class Said:
    """The dotted keys that a configuration gives values for ("auto" is none)."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        renamed = {RENAMED.get(key, key): value for key, value in raw.items()}
        self.values = {key: value for key, value in _leaves(renamed) if value != "auto"}

    def get(self, key: str) -> Any:
        """The file's value, None where it has none."""
        assert key in KEYS, key
        return self.values.get(key)

    def value(self, key: str) -> Any:
        """The file's value, else DeepSpeed's default."""
        found = self.get(key)
        return KEYS[key].default if found is None else found

    def check(self) -> None:
        """Raises ValueError for the first key that is unknown or has a value that can't be."""
        for key, value in self.values.items():
            _check(key, value)


def remarks(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted keys that are remarks."""
    for name, value in section.items():
        if REMARK.fullmatch(name):
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping):
            yield from remarks(value, f"{prefix}{name}.")


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; a section that the table knows as one is one."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if (not prefix and name in FREE) or REMARK.fullmatch(name):
            continue
        if value is None and any(known.startswith(f"{key}.") for known in KEYS):
            continue
        if isinstance(value, Mapping) and not (key in KEYS and KEYS[key].takes == "section"):
            if not any(known.startswith(f"{key}.") for known in KEYS):
                yield key, value
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _check(name: str, value: Any) -> None:
    """Refuse an unknown key, a value of the wrong kind, a value that is not offered."""
    key = KEYS.get(name)
    if key is None and any(known.startswith(f"{name}.") for known in KEYS) and not isinstance(value, Mapping):
        section_of(name, value)
    if key is None:
        raise ValueError(_unknown(name))
    if value is None:
        return
    kinds, wanted = KINDS[key.takes]
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and key.takes in ("int", "number"))
    if wrong or (key.takes == "int" and not float(value).is_integer()):
        raise ValueError(f"{name}={json.dumps(value)}: write {wanted}, as JSON")
    if key.verdict == "refused" and not _off(key, value):
        raise ValueError(f"{name}={json.dumps(value)}: {key.note}")
    if key.only and value not in key.only:
        offered = ", ".join(str(choice) for choice in key.only if choice is not None)
        raise ValueError(f"{name}={value}: here it may be {offered}")


def _off(key: Key, value: Any) -> bool:
    """True where a refused key has the value that asks for nothing."""
    if key.takes == "section":
        return not value or value.get("enabled") is False
    return value in (key.default, None, False)


def _unknown(name: str) -> str:
    sections = {key.rpartition(".")[0] for key in KEYS} - {""}
    known = [*KEYS, *FREE, *sorted(sections)]
    parent, _, leaf = name.rpartition(".")
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == parent]
    near = closest(leaf, beside)
    if near is not None:
        return f"{name}: DeepSpeed has no such key; did you mean {f'{parent}.' if parent else ''}{near}?"
    same = next((key for key in known if key.rpartition(".")[2] == leaf), None) or closest(name, known)
    meant = f"; did you mean {same}?" if same else " (docs/reference/deepspeed.md lists all)"
    return f"{name}: DeepSpeed has no such key{meant}"
