"""Rewrite the tokens of a command line as Hydra overrides.

A user types KEY=VALUE: `model=opt-1.3b` selects an option file of `conf/`, and `reward.lr=1e-5` sets a key. Hydra needs
`+` before a key that no file contains, quotes around an unusual path, and `+model@reward_model` for a second model.
This file adds them. It raises an error for a token that is not KEY=VALUE and for an unknown option. The schema checks
keys and values (`check.py`).
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config.messages import closest, inner_section, is_text
from pipeline.config.schema import RunConfig
from pipeline.config.stages import STAGES
from pipeline.errors import UserError
from pipeline.files import load_yaml
from pipeline.installation import CONF, TRAIN

REPLACED_MAPPINGS = {"architecture", "tensor_plan", "options"}
"""Mappings that replace the mapping of the option file. Hydra would merge the two."""
LOCATIONS = {"model": ("path", "hub"), "data": ("path", "sources"), "reward_model": ("path", "hub")}
"""The keys that select a user's own model or data. The first one that is set gives the name."""
PLAIN_VALUE = re.compile(r"[\w./\-+:@%]*", re.ASCII)


@cache
def text_keys(section: type[BaseModel] = RunConfig) -> frozenset[str]:
    """Return the names of the keys whose value is a text or the path of a file, in a section and below it."""
    names = {"deepspeed"}
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        names |= set() if inner is None else text_keys(inner)
        names |= {name} if is_text(field.annotation) else set()
    return frozenset(names)


def groups() -> dict[str, list[str]]:
    """Return the groups of `conf/` (its folders) with their options (their files)."""
    folders = sorted(folder for folder in CONF.iterdir() if folder.is_dir())
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def default_options() -> dict[str, str | None]:
    """Return the default option of each group, from conf/config.yaml."""
    entries = [entry for entry in read_option(CONF / "config.yaml")["defaults"] if isinstance(entry, dict)]
    return {key: value for entry in entries for key, value in entry.items() if not key.startswith("override hydra/")}


@cache
def read_option(file: Path) -> dict[str, Any]:
    """Return the content of a file of `conf/`. Each process reads a file once; do not change the result."""
    content: dict[str, Any] = load_yaml(file.read_text(encoding="utf-8"))
    return content


def split(token: str) -> tuple[str, str, str | None]:
    """Split a token: "++ppo.lr=1" -> ("++", "ppo.lr", "1"). Without "=" the value is None."""
    match = re.fullmatch(r"(\+\+|\+|~)?([^=]*)(?:=(.*))?", token, flags=re.DOTALL)
    assert match is not None
    return match[1] or "", match[2].strip(), match[3]


def rewrite(tokens: Sequence[str]) -> list[str]:
    """Return the tokens of one job as Hydra overrides.

    Raises UserError for a token that is not KEY=VALUE, an option that a group does not have, two places of data,
    and a name without the selection of its model or data.
    """
    options = groups()
    values = {key: value for _, key, value in map(split, tokens)}
    is_set = {key for key, value in values.items() if value not in (None, "null")}
    if "data.path" in is_set and any(f"{key}.".startswith("data.sources.") for key in is_set):
        raise UserError(
            f"data.path={values['data.path']} and data.sources are both set, but data.path replaces data.sources: "
            "remove one of them, or add the file to data.sources as {path: FILE}"
        )
    sections = {".".join(key.split(".")[:2]) for key in values}
    for group, locations in LOCATIONS.items():
        name = values.get(f"{group}.name")
        others = (f"{group}.{key}" for key in (*locations, "architecture"))
        if name and sections.isdisjoint((group, f"model@{group}", "actor", *others)):
            own = " or ".join(f"{group}.{key}={key.upper()}" for key in locations)
            remedy = f"{group}={name}" if name in options["data" if group == "data" else "model"] else own
            raise UserError(f"{group}.name={name} is only a name and selects nothing: set {remedy}")
    rewritten = [new for token in tokens for new in (*_clear_mapping(token), _rewrite_token(token, options))]
    return rewritten + _implied(tokens, values.keys())


def _clear_mapping(token: str) -> Iterator[str]:
    """Yield an override that removes the option's mapping, if the token sets another mapping."""
    prefix, key, value = split(token)
    if prefix != "~" and key.rsplit(".", 1)[-1] in REPLACED_MAPPINGS and (value or "").startswith("{"):
        yield f"++{key}=null"


def _rewrite_token(token: str, options: dict[str, list[str]]) -> str:
    prefix, key, value = split(token)
    if key.startswith(("hydra.", "hydra/")):
        advice = "; run_dir=FOLDER or name= sets the run folder" if "dir" in key else ""
        raise UserError(f"{token}: Hydra only reads conf/, so its own settings have no effect: remove it{advice}")
    if prefix == "~":
        return token
    if value is None or not key or key.startswith("-"):
        raise UserError(_not_a_pair(token, options))
    if key == "reward" and value not in options["reward"] and not _is_misspelt(value, options["reward"]):
        return f"++reward_path={quoted(value)}"
    if key in ("reward_model", "model@reward_model"):
        _check_option("reward_model", value, options["model"])
        return f"+model@reward_model={value}"
    if key in options:
        _check_option(key, value, options[key])
        return f"{key}={value}"
    leaf = key.rsplit(".", 1)[-1]
    return f"++{key}={quoted(value) if leaf in text_keys() else value}"


def _implied(tokens: Iterable[str], keys: Collection[str]) -> list[str]:
    """Return overrides that other tokens imply.

    A user's own model or data removes the default option, and its path gives the name. method=distill selects
    ppo=distill.
    """
    values = {key: value for _, key, value in map(split, tokens) if value}
    extra = ["ppo=distill"] if values.get("method") == "distill" and "ppo" not in keys else []
    for group, names in LOCATIONS.items():
        own = next((values[f"{group}.{name}"] for name in names if f"{group}.{name}" in values), None)
        if own is None or group in keys:
            continue
        if group in ("model", "data"):
            extra.append(f"~{group}")
        if f"{group}.name" not in keys:
            extra.append(f"++{group}.name={quoted(_stem(own))}")
    return extra


def _stem(location: str) -> str:
    """Return a short name for a path or hub id: "/a/chats.jsonl" -> "chats".

    A list of sources gets the names of its first three sources. The default is "own".
    """
    if location.startswith("["):
        paths = re.findall(r"\b(?:path|hub|builtin):\s*['\"]?([^,}\]'\"]+)", location)
        return "+".join(dict.fromkeys(_stem(path.strip()) for path in paths[:3])) or "own"
    last = os.path.basename(location.strip("'\"").rstrip("/"))
    name = re.sub(r"\.(jsonl?|parquet|arrow|csv|tsv)(\.(gz|zst|bz2|xz))?$", "", last)
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "own"


def quoted(value: str) -> str:
    """Quote a text value for Hydra's grammar. Quoted values, lists and interpolations stay unchanged.

    Text that begins with a digit may look like a number: `name=1.10` would become 1.1.
    """
    is_plain = PLAIN_VALUE.fullmatch(value) is not None and not value[:1].isdigit()
    if is_plain or value[:1] in "'\"[{" or "${" in value:
        return value
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return f"'{escaped}'"


def _check_option(group: str, value: str, options: list[str]) -> None:
    if value in options:
        return
    close = closest(value, options)
    advice = f" Did you mean {group}={close}?" if close else ""
    own = ""
    if group in ("model", "reward_model", "data"):
        own = f"; for your own, set {group}.path={value if os.path.exists(value) else 'PATH'}"
    elif group == "reward":
        own = "; for a trained reward model, set reward=FOLDER"
    raise UserError(f"{group}={value} is not an option of {group}.{advice} Options: {', '.join(options)}{own}")


def _is_misspelt(value: str, options: list[str]) -> bool:
    """Return whether a value that may be a folder is close to an option instead."""
    return "/" not in value and not os.path.exists(value) and closest(value, options) is not None


def _not_a_pair(token: str, options: dict[str, list[str]]) -> str:
    if token.startswith("-"):
        return f"{token} is not a flag: write settings as KEY=VALUE, without dashes ({TRAIN} --help lists them)"
    candidates = [f"{group}={token}" for group, names in options.items() if token in names]
    advice = 'a value with a space in it needs quotes, "KEY=VALUE"'
    if token in ("plan", *STAGES):
        candidates.append(f"stage={token}")
    if os.path.exists(token):
        candidates.append(f"data.path={token}")
    if candidates:
        advice = f"did you mean {' or '.join(candidates)}?"
    return f"'{token}' is not KEY=VALUE: {advice}"
