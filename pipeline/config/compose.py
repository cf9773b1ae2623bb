"""Compose the configuration of each job from a command line and `conf/`, with Hydra.

Later sources override earlier ones: the configuration of the run that `actor=` names, the option files of model and
data, the recipe for the two, the other option files, the command line. The validation adds the defaults of the schema.

Hydra's compose interface is used instead of `hydra.main`: it writes no log, makes no folder and does not change the
working directory. Flags: -m (one job for each value of a list), --cfg job, --help.
"""

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config.messages import OTHER_NAMES
from pipeline.config.overrides import PLAIN_VALUE, default_options, groups, quoted, rewrite, split
from pipeline.config.recipes import LORA_RATES, Recipe, has_own_model, read_recipe, select
from pipeline.config.schema import DataConfig
from pipeline.errors import UserError
from pipeline.files import load_yaml
from pipeline.installation import CONF, TRAIN

REAL_DATA = "ultrafeedback"  # preference pairs, which serve all stages; licence MIT

KEYS_OF_ONE_RUN = {"name", "run_dir", "stage", "method", "actor", "reward_path", "teacher", "ranks", "debug"}
KEYS_OF_ONE_RUN |= {"tracking", "profile"}
"""The keys that `actor=` does not take over from the run of the actor."""
SHARES = {"data": {"stage_shares": DataConfig.model_fields["stage_shares"].default}}
"""The only mapping with a default: `data.stage_shares.sft=0.1` changes one of its keys."""


@dataclass(frozen=True)
class Job:
    """One run of a command line. `label` ("seed=1") identifies a job of a multirun; otherwise it is empty.

    `recipe` is the line that names the selected recipe and the reason, or empty. `reference` is the recipe to compare
    learning rates with.
    """

    raw: dict[str, Any]
    label: str = ""
    recipe: str = ""
    reference: Recipe | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({TRAIN} --help lists the flags)")


def parse_command(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags of a command line, and its other words as `overrides`. Raises UserError for an unknown flag."""
    parser = _Parser(add_help=False, allow_abbrev=False, prog=TRAIN)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-m", "--multirun", action="store_true")
    flags, overrides = parser.parse_known_args(list(argv))
    flags.overrides = tuple(overrides)
    return flags


def compose_jobs(command: argparse.Namespace) -> list[Job]:
    """Return the configuration of each job, before validation. Without -m there is one job."""
    if not command.multirun:
        return [_compose_job(command.overrides)]
    combinations = [_sweep_values(token) for token in command.overrides]
    swept = [len(values) > 1 for values in combinations]
    jobs = []
    for tokens in itertools.product(*combinations):
        label = ",".join(token for token, varies in zip(tokens, swept, strict=True) if varies)
        jobs.append(_compose_job(tokens, label))
    return jobs


def _recipe_line(recipe: Recipe, keys: Set[str]) -> str:
    """Return the line that names the recipe, and one about the default model if it trains on other data by default.

    keys: those of the command line
    """
    line = f"recipe={recipe.name}: {recipe.reason} (the command line overrides it; ~recipe removes it)"
    if keys & {"actor", "model", "model.path", "model.hub"} or not keys & {"data.path", "data.sources"}:
        return line
    model = default_options()["model"]
    return f"model={model}, the default, has random weights: set model.path=FOLDER for a base model\n{line}"


def _sweep_values(token: str) -> list[str]:
    """Expand a sweep: `seed=1,2` -> [`seed=1`, `seed=2`]. A list with the token itself if it is not a sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if split(token)[2] is None:
        return [token]
    try:
        override = OverridesParser.create().parse_override(token)
        if not override.is_sweep_override():
            return [token]
        values = list(zip(override.sweep_iterator(), override.sweep_string_iterator(), strict=True))
    except (HydraException, ValueError):  # of a sweep, too: glob() needs Hydra's own launcher
        return [token]
    prefix, key, _ = split(token)
    return [f"{prefix}{key}={_typed(value) if isinstance(value, str) else text}" for value, text in values]


def _typed(value: str) -> str:
    """Return a text of a sweep as a user types it. Hydra would escape its colons and spaces."""
    return value if PLAIN_VALUE.fullmatch(value) else quoted(value)


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return one configuration as a dictionary with resolved interpolations. Raises UserError with advice."""
    return _compose_job(overrides).raw


def _compose_job(overrides: Sequence[str], label: str = "") -> Job:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    inherited, replaced = _inherited(overrides)
    tokens = [*replaced, *overrides]
    rewritten = [*rewrite(tokens), *_real_data(tokens, skip="data" in inherited)]
    recipe = _find_recipe(tokens, inherited)
    store = ConfigStore.instance()
    store.store("inherited", OmegaConf.merge(SHARES, inherited), provider="inherited")
    keys = {key for _, key, _ in map(split, overrides)}
    line = ""
    if recipe is not None and "recipe" not in keys and not inherited:
        store.store("chosen", recipe.settings, group="recipe", package="_global_", provider="recipe")
        rewritten.append("recipe=chosen")
        line = _recipe_line(recipe, keys)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            raw = OmegaConf.to_container(hydra_compose("config", overrides=rewritten), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError) as problem:
        raise UserError(_explain(problem)) from problem
    assert isinstance(raw, dict)
    if not any(key.partition(".")[0] == LORA_RATES for key in keys):
        raw.pop(LORA_RATES, None)  # read by the options lora.yaml; otherwise no key, which the validation reports
    return Job({str(key): value for key, value in raw.items()}, label, line, recipe)


def _explain(problem: Exception) -> str:
    """Return a message about a command line that Hydra cannot read or apply."""
    from hydra.errors import OverrideParseException

    if isinstance(problem, OverrideParseException):
        word = problem.override.lstrip("+")
        advice = (
            "a key has the letters a to z, digits, _ and . only; close each quote and bracket, and write a value with "
            "special characters in quotes, \"key='some value'\""
        )
        if "{" in word:
            advice += (
                "; a name before a colon has no quotes, and a backslash before brackets, = : and ,: "
                "{size \\(cm\\): value}; write columns with other letters into conf/data/NAME.yaml"
            )
        return f"cannot read {word}: {advice}"
    text = " ".join(line.strip() for line in str(problem).splitlines()).replace("++", "")
    if "sweep" in text:
        text = (
            text.partition(" 1. ")[0] + ": write [1,2] for a list, quotes for one value, or add -m to run every value"
        )
    if "Could not delete" in text:
        text += " No option or recipe sets this key: remove the word with ~"
    return f"cannot read the command line: {text}"


def _real_data(overrides: Sequence[str], skip: bool) -> list[str]:
    """Return the override that selects real preferences for any model but the default one.

    The demo's generated data teach rude answers on purpose, so only the demo's own model trains on them by default.
    """
    values = {key: value for _, key, value in map(split, overrides)}
    is_default = values.get("model") in (None, default_options()["model"]) and not has_own_model(values)
    has_data = bool(values.keys() & {"data", "data.path", "data.sources"})
    return [] if skip or has_data or is_default else [f"data={REAL_DATA}"]


def _find_recipe(tokens: Sequence[str], inherited: Mapping[str, Any]) -> Recipe | None:
    """Return the recipe of the command line, or the one for the model.

    The model and the data of the run that `actor=` names count if the command line selects no others.
    """
    values = {key: value for _, key, value in map(split, [*tokens, *_real_data(tokens, skip=False)])}
    for group in ("model", "data"):
        if group in inherited:
            values.pop(group, None)
            values |= _selection(group, inherited[group])
    named = values.get("recipe")
    return read_recipe(named, "selected with recipe=") if named else select(values)


def _selection(group: str, settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the keys of a command line that select a model or data with these settings."""
    if settings["name"] in groups().get(group, []) and not settings.get("path"):
        return {group: settings["name"]}
    return {f"{group}.{key}": settings[key] for key in ("path", "hub") if settings.get(key)}


def _inherited(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the run that `actor=` names, and overrides that remove the groups that they replace.

    With the settings of that run, PPO and DPO read the data and the model that their start model was trained with. A
    model folder outside of a run has no settings: it becomes `model.path`, unless the command line selects a model.
    """
    values = {key: value for _, key, value in map(split, overrides)}
    actor = (values.get("actor") or "").strip("'\"")
    if not actor or actor == "null":
        return {}, []
    folder = Path(os.path.expanduser(actor))
    found = (_settings_of_run(path / "config.yaml") for path in (folder, folder.parent))
    settings = next((settings for settings in found if settings is not None), None)
    own_model = values.keys() & {"model", "model.path", "model.hub"}
    if settings is None:
        return {}, [] if own_model else [f"model.path={quoted(str(folder))}"]
    for key in KEYS_OF_ONE_RUN:
        settings.pop(key, None)
    for key in OTHER_NAMES:  # earlier versions wrote some of these keys
        group, _, leaf = key.rpartition(".")
        settings.get(group, {}).pop(leaf, None)
    if values.get("method") == "distill":
        values.setdefault("ppo", "distill")  # `rewrite` selects this option
    own = {"model": own_model, "data": values.keys() & {"data", "data.path", "data.sources"}}
    for group in (group for group, keys in own.items() if keys):
        settings.pop(group, None)
    inherited = [group for group in default_options() if group != "tracking" and group not in values]
    return settings, [f"~{group}" for group in inherited if not own.get(group)]


def _settings_of_run(file: Path) -> dict[str, Any] | None:
    """Return the settings in the config.yaml of a stage; None without the file, and for a file of another program."""
    import yaml

    if not file.is_file():
        return None
    try:
        settings = load_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as problem:
        raise UserError(
            f"{file} cannot be read as YAML ({problem}): repair it, or copy the model elsewhere"
        ) from problem
    groups_of_run = [settings.get(group) for group in ("model", "data")] if isinstance(settings, dict) else [None]
    return settings if all(isinstance(group, dict) and "name" in group for group in groups_of_run) else None
