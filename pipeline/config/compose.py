"""From a command line to plain dictionaries: Hydra composes `conf/`, one dictionary a job.

The order, later wins: the schema's defaults; what the run of `actor=` was configured with; the option files
of model and data; the recipe for the two, where there is one; the other option files; the command line.

Hydra's compose interface is used, not `hydra.main`: nothing is logged, no folder is made, no directory
changed, and a mistake ends in one line. Flags: -m (one job for each value of a list), --cfg job, --help.
"""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from pipeline.config.overrides import default_options, groups, quoted, rewrite, split
from pipeline.config.schema import RunConfig
from pipeline.errors import UserError
from pipeline.installation import CONF, TRAIN


@dataclass(frozen=True)
class Command:
    """What a command line asks for, before any value is looked at."""

    overrides: tuple[str, ...]
    help: bool = False
    show: bool = False
    package: str | None = None
    multirun: bool = False


@dataclass(frozen=True)
class Job:
    """One run of a command line. `label` tells the jobs of a multirun apart ("seed=1"), and is empty otherwise."""

    raw: dict[str, Any]
    label: str = ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({TRAIN} --help lists the flags)")


def parse_command(argv: Sequence[str]) -> Command:
    """Split flags from overrides. Raises UserError for a flag that does not exist."""
    parser = _Parser(add_help=False, allow_abbrev=False, prog=TRAIN)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    flags, overrides = parser.parse_known_args(list(argv))
    return Command(tuple(overrides), flags.help, flags.cfg is not None, flags.package, flags.multirun)


def compose_jobs(command: Command) -> list[Job]:
    """The configuration of each job, not yet validated. One job without -m."""
    if not command.multirun:
        return [Job(compose(command.overrides))]
    combinations = [_sweep_values(token) for token in command.overrides]
    swept = [len(values) > 1 for values in combinations]
    jobs = []
    for tokens in itertools.product(*combinations):
        label = ",".join(token for token, varies in zip(tokens, swept, strict=True) if varies)
        jobs.append(Job(compose(tokens), label))
    return jobs


def _sweep_values(token: str) -> list[str]:
    """`seed=1,2` -> [`seed=1`, `seed=2`]; a token that does not sweep -> itself."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if split(token)[2] is None:
        return [token]
    try:
        override = OverridesParser.create().parse_override(token)
    except HydraException:
        return [token]
    if not override.is_sweep_override():
        return [token]
    prefix, key, _ = split(token)
    return [f"{prefix}{key}={value}" for value in override.sweep_string_iterator()]


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """One configuration as a plain dictionary, interpolations resolved. Raises UserError with advice."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    inherited, replaced = _inherited(overrides)
    tokens = rewrite([*replaced, *overrides])
    tokens += _recipe(overrides, skip=bool(inherited))
    ConfigStore.instance().store("schema", _merged(defaults(RunConfig), inherited), provider="schema")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            raw = OmegaConf.to_container(hydra_compose("config", overrides=tokens), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as problem:
        raise UserError(_explain(problem)) from problem
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def _explain(problem: Exception) -> str:
    lines = [line for line in str(problem).splitlines() if line.strip() and not line.startswith("See http")]
    text = " ".join(line.strip() for line in lines[:4])
    if "mismatched input" in text or "token recognition" in text or "no viable alternative" in text:
        text += "; a value with special characters needs quotes, \"key='some value'\""
    if "sweep" in text:
        text = lines[0].replace("++", "")
        text += ": write [1,2] for a list, quotes for one value, or add -m to run every value"
    return f"cannot read the command line: {text}"


def defaults(section: type[BaseModel]) -> dict[str, Any]:
    """The schema's defaults as a nested dictionary; required keys are left out."""
    found: dict[str, Any] = {}
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[key] = defaults(field.annotation)
        elif not field.is_required():
            found[key] = field.get_default()
    return found


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(base[key], over[key])
        for key in base.keys() & over.keys()
        if isinstance(over[key], dict) and isinstance(base[key], dict)
    }
    return {**base, **over, **both}


def _recipe(overrides: Sequence[str], skip: bool) -> list[str]:
    """The recipe that fits: `<model>-<data>.yaml`, `<data>.yaml` (the default model only), `<model>.yaml`, or none."""
    values = {key: value for _, key, value in map(split, overrides)}
    if "recipe" in values:
        return []
    own_model = "model" not in values and values.keys() & {"model.path", "model.hub"}
    own_data = "data" not in values and values.keys() & {"data.path", "data.sources"}
    usual = default_options()
    model, data = values.get("model", usual["model"]), values.get("data", usual["data"])
    names = [f"{model}-{data}", *([data] if model == usual["model"] else []), model]
    found = next((name for name in (names[-1:] if own_data else names) if name in groups().get("recipe", [])), None)
    return [f"recipe={found}"] if found and not own_model and not skip else []


def _inherited(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Where `actor=` names a stage of an earlier run: that run's settings, and the tokens that make room for them.

    PPO or DPO on somebody's SFT model must not silently read the default data with the default model's settings. A
    model folder from elsewhere brings no settings; it becomes `model.path`, unless a model was named.
    """
    import yaml

    values = {key: value for _, key, value in map(split, overrides)}
    actor = (values.get("actor") or "").strip("'\"")
    if not actor or actor == "null":
        return {}, []
    folder = Path(actor).expanduser()
    home = next((place for place in (folder, folder.parent) if (place / "config.yaml").is_file()), None)
    own_model = values.keys() & {"model", "model.path", "model.hub"}
    if home is None:
        return {}, [] if own_model else [f"model.path={quoted(str(folder))}"]
    settings = yaml.safe_load((home / "config.yaml").read_text(encoding="utf-8"))
    for key in ("name", "run_dir", "stage", "method", "actor", "reward_path", "ranks", "debug", "tracking", "profile"):
        settings.pop(key, None)
    settings.get("rollout", {}).pop("selfcheck_every", None)  # the former name of a key
    own = {"model": own_model, "data": values.keys() & {"data", "data.path", "data.sources"}}
    for group in (group for group, given in own.items() if given):
        settings.pop(group, None)
    kept = [group for group in default_options() if group != "tracking" and group not in values]
    return settings, [f"~{group}" for group in kept if not own.get(group)]
