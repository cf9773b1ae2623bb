"""The command line, token by token, in the grammar that Hydra understands.

A person types KEY=VALUE: `model=opt-1.3b` chooses an option file of `conf/`, `reward.lr=1e-5` sets a key.
Hydra needs more said: `+` for a key that no file mentions, quotes around an unusual path, `+model@reward_model`
for a second model. This file adds that, and refuses what names no group, option or key=value pair.
It leaves keys and values alone: the schema judges those (`check.py`).
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

import yaml

from pipeline.errors import UserError
from pipeline.installation import CONF, TRAIN

PATH_KEYS = {
    "path",
    "eval_path",
    "hub",
    "name",
    "run_dir",
    "actor",
    "reward_path",
    "tokenizer",
    "chat_template",
    "reward_function",
    "judge",
}
WHOLE = {"architecture", "tensor_plan"}
"""Mappings that a person who writes one means as a whole: Hydra would mix it with the option's."""
PLAIN_VALUE = re.compile(r"[\w./\-+:@%]*", re.ASCII)


def groups() -> dict[str, list[str]]:
    """Every group of `conf/` with its options, as files stand there."""
    folders = sorted(folder for folder in CONF.iterdir() if folder.is_dir())
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def default_options() -> dict[str, str | None]:
    """The option that each group has without the command line, from conf/config.yaml."""
    entries = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return {key: value for entry in entries if isinstance(entry, dict) for key, value in entry.items()}


def split(token: str) -> tuple[str, str, str | None]:
    """A token as (prefix, key, value): "++ppo.lr=1" -> ("++", "ppo.lr", "1"). Without "=" the value is None."""
    match = re.fullmatch(r"(\+\+|\+|~)?([^=]*)(?:=(.*))?", token, flags=re.DOTALL)
    assert match is not None
    return match[1] or "", match[2].strip(), match[3]


def rewrite(tokens: Sequence[str]) -> list[str]:
    """The tokens of one job as Hydra overrides.

    Raises UserError for a token that is not KEY=VALUE and for an option that a group does not have.
    """
    options = groups()
    given = {split(token)[1] for token in tokens}
    rewritten = [new for token in tokens for new in (*_emptied(token), _rewrite_token(token, options))]
    return rewritten + _implied(tokens, given)


def _emptied(token: str) -> Iterator[str]:
    """What takes away the option's mapping, where the token brings another."""
    prefix, key, value = split(token)
    if prefix != "~" and key.rsplit(".", 1)[-1] in WHOLE and (value or "").startswith("{"):
        yield f"++{key}=null"


def _rewrite_token(token: str, options: dict[str, list[str]]) -> str:
    prefix, key, value = split(token)
    if key.startswith(("hydra.", "hydra/")):
        place = "; run_dir=FOLDER, or name=, says where a run is" if "dir" in key else ""
        raise UserError(f"{token}: Hydra only reads conf/ here, its own settings have no effect: leave it out{place}")
    if prefix == "~":
        return token
    if value is None or not key:
        raise UserError(_not_a_pair(token, options))
    if key == "reward" and value not in options["reward"]:
        return f"++reward_path={quoted(value)}"
    if key in ("reward_model", "model@reward_model"):
        _check_option("reward_model", value, options["model"])
        return f"+model@reward_model={value}"
    if key in options:
        _check_option(key, value, options[key])
        return f"{key}={value}"
    leaf = key.rsplit(".", 1)[-1]
    return f"++{key}={quoted(value) if leaf in PATH_KEYS else value}"


def _implied(tokens: Iterable[str], given: set[str]) -> list[str]:
    """A model or data set of one's own needs no option file: leave the default one out, name it after its folder."""
    extra: list[str] = []
    values = {key: value for _, key, value in map(split, tokens) if value}
    for group, keys in {"model": ("path", "hub"), "data": ("path", "sources"), "reward_model": ("path", "hub")}.items():
        own = next((values[f"{group}.{key}"] for key in keys if f"{group}.{key}" in values), None)
        if own is None or group in given:
            continue
        if group in ("model", "data"):
            extra.append(f"~{group}")
        if f"{group}.name" not in given:
            extra.append(f"++{group}.name={quoted(_stem(own))}")
    return extra


def _stem(location: str) -> str:
    """A short name for a path or hub id: "/a/chats.jsonl" -> "chats"; of a list of sources, theirs; "own" for anything
    without one.
    """
    if location.startswith("["):
        places = re.findall(r"\b(?:path|hub|builtin):\s*['\"]?([^,}\]'\"]+)", location)
        return "+".join(dict.fromkeys(_stem(place.strip()) for place in places[:3])) or "own"
    last = os.path.basename(location.strip("'\"").rstrip("/"))
    name = re.sub(r"\.(jsonl?|parquet|arrow|csv|tsv)(\.(gz|zst|bz2|xz))?$", "", last)
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "own"


def quoted(value: str) -> str:
    """A text value so that Hydra reads it whole. Quoted values, lists and interpolations are left as they are."""
    if PLAIN_VALUE.fullmatch(value) or value[:1] in "'\"[{" or "${" in value:
        return value
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return f"'{escaped}'"


def _check_option(group: str, value: str, options: list[str]) -> None:
    if value in options:
        return
    if value.startswith("[") or value in ("null", "none", ""):
        without = "" if group in ("model", "reward_model", "data") else f", or none by ~{group}"
        raise UserError(f"{group}={value} names no option; choose one of {', '.join(options)}{without}")
    close = closest(value, options)
    advice = f" Did you mean {group}={close}?" if close else ""
    own = ""
    if group in ("model", "reward_model", "data"):
        own = f"; your own is {group}.path={value if os.path.exists(value) else 'PATH'}"
    raise UserError(f"{group}={value} is no option of {group}.{advice} Options: {', '.join(options)}{own}")


def _not_a_pair(token: str, options: dict[str, list[str]]) -> str:
    if token.startswith("-"):
        return f"{token} is no flag: options are written KEY=VALUE, without dashes ({TRAIN} --help lists them)"
    homes = [f"{group}={token}" for group, names in options.items() if token in names]
    meant = f"did you mean {' or '.join(homes)}?" if homes else 'a value with a space in it needs quotes, "KEY=VALUE"'
    return f"'{token}' is not KEY=VALUE: {meant}"


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """The most similar candidate, or None where nothing comes near."""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return near[0] if near else None
