"""Select the recipe of `conf/recipe` for a command line: by the model and its data, or by the number of parameters.

A recipe contains learning rates, batch sizes, epochs, lengths and the KL coefficient, each with its source in the file.
Its mapping `lora_lr` holds the learning rates of adapters, which the options `sft=lora`, `ppo=lora` and so on read.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.config.overrides import default_options, groups, read_option
from pipeline.config.stages import stages_to_run
from pipeline.errors import UserError
from pipeline.installation import CONF
from pipeline.models.folder import model_folder

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

SIZE_CLASSES = ((0.5e9, "up-to-0.5b"), (3e9, "0.5b-to-3b"), (15e9, "3b-to-15b"), (math.inf, "above-15b"))
"""The largest number of parameters of each size class, and its recipe."""
UNKNOWN_SIZE = "3b-to-15b"
LORA_RATES = "lora_lr"
RATE_FACTOR = 3.0  # a learning rate is usual between a third and three times the value of the recipe
PLAIN_DPO = ("sigmoid", "robust", "apo_zero", "ipo")  # the values of dpo.loss that a recipe's learning rate suits
LENGTH_SECTIONS = ("sft", "reward", "dpo", "ppo")  # their max_length; the lengths of `rollout` have other names
SCORER_SETTINGS = (("reward", "lr"), ("ppo", "critic_lr"), (LORA_RATES, "reward"))
"""The settings of reward model and critic, which depend on the size of `reward_model`."""


@dataclass(frozen=True)
class Recipe:
    """A recipe with the reason for its selection. `settings`: values by section, and `lora_lr`."""

    name: str
    reason: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Rate:
    """A learning rate of a configuration. `usual`: the value of a recipe, or None if the recipe does not apply."""

    key: str
    value: float
    usual: float | None

    @property
    def range(self) -> tuple[float, float]:
        """The learning rates near the value of the recipe."""
        usual = self.usual or 0.0
        return usual / RATE_FACTOR, usual * RATE_FACTOR

    @property
    def is_usual(self) -> bool:
        """Whether the rate is in the range, or there is no range."""
        low, high = self.range
        return self.usual is None or low <= self.value <= high


def compare_rates(config: "RunConfig", recipe: Recipe | None) -> list[Rate]:
    """Return the learning rates of the stages of a run, each with the value of a recipe."""
    rates = []
    for stage in stages_to_run(config):
        section = getattr(config, stage)
        applies = recipe is not None and not (stage == "dpo" and config.dpo.loss not in PLAIN_DPO)
        rates.append(Rate(f"{stage}.lr", section.lr, _usual(recipe, stage, section.lora.rank) if applies else None))
        if stage == "ppo" and config.ppo.advantage == "gae":
            usual = (recipe.settings.get("ppo") or {}).get("critic_lr") if recipe is not None else None
            rates.append(Rate("ppo.critic_lr", config.ppo.critic_lr, usual))
    return rates


def rate_warnings(rates: Sequence[Rate], recipe: Recipe | None) -> list[str]:
    """Return a message for each learning rate that is not usual."""
    name = "" if recipe is None else recipe.name
    found = []
    for rate in rates:
        if rate.usual and not rate.is_usual:
            factor = float(f"{rate.value / rate.usual:.2g}")
            found.append(
                f"{rate.key}={rate.value:g} is {factor:g} times the {rate.usual:g} of recipe={name}: set "
                f"{rate.key}={rate.usual:g}, or watch the first steps"
            )
    return found


def _usual(recipe: Recipe | None, stage: str, rank: int) -> float | None:
    """Return the learning rate of a recipe for a stage; with adapters of a rank above 0, the rate of adapters."""
    settings = {} if recipe is None else recipe.settings
    return settings.get(LORA_RATES, {}).get(stage) if rank else settings.get(stage, {}).get("lr")


def select(values: Mapping[str, str | None]) -> Recipe | None:
    """Return the recipe for the values of a command line. None if `conf/recipe` has none.

    The first that exists counts: `<model>-<data>.yaml`, `<data>.yaml` (only for the default model), `<model>.yaml`,
    the recipe of the model's size class. A model whose size is unknown without network gets `UNKNOWN_SIZE`. A separate
    `reward_model` gets the learning rates of its own size.
    """
    default = default_options()
    model, scorer = values.get("model", default["model"]), values.get("reward_model", values.get("model@reward_model"))
    has_own_data = "data" not in values and values.keys() & {"data.path", "data.sources"}
    data = None if has_own_data else values.get("data", default["data"])
    names = [f"{model}-{data}", *([data] if model == default["model"] else []), model]
    found = _of_model(values, "model", [] if has_own_model(values) else names)
    if found is None:
        return None
    recipe = _within(read_recipe(*found), _positions(_architecture(values, "model") or {}))
    if scorer is None and not values.keys() & {"reward_model.path", "reward_model.hub"}:
        return recipe
    found = _of_model(values, "reward_model", [] if scorer is None else [f"{scorer}-{data}", scorer])
    if found is None or found[0] == recipe.name:
        return recipe
    return _with_scorer(recipe, read_recipe(*found))


def has_own_model(values: Mapping[str, str | None]) -> bool:
    """Return whether a folder or a hub id replaces the default model."""
    return "model" not in values and bool(values.keys() & {"model.path", "model.hub"})


def read_recipe(name: str, reason: str) -> Recipe:
    """Read a file of `conf/recipe`."""
    return Recipe(name, reason, _read_settings(CONF / "recipe" / f"{name}.yaml"))


@cache
def _read_settings(file: Path) -> dict[str, Any]:
    """Return the content of a recipe, which each process reads once. Callers do not change it."""
    from omegaconf import OmegaConf  # reads 1e-5 as a number, which PyYAML does not

    content = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(content, dict), f"{file} has no settings"
    return {str(key): value for key, value in content.items()}


def _of_model(values: Mapping[str, str | None], group: str, names: Sequence[str | None]) -> tuple[str, str] | None:
    """Return the name and the reason of the recipe for the model of a group ("model" or "reward_model").

    names: recipes made for the model, the last one for any data; the first that exists counts
    """
    recipes = groups().get("recipe", [])
    named = next((name for name in names if name in recipes), None)
    if named:
        return named, f"made for {group}={names[-1]}"
    fields = _architecture(values, group)
    count = parameter_count(fields or {})
    if count is None:
        name, reason = UNKNOWN_SIZE, "the configuration of the model has no usable sizes"
        if fields is None:
            reason = "the size of the model is unknown without network"
    else:
        name = next(name for most, name in SIZE_CLASSES if count <= most)
        size = f"{count / 1e9:.2g} B" if count >= 1e8 else f"{count / 1e6:.2g} M"
        reason = f"the model has about {size} parameters"
    return (name, reason) if name in recipes else None


def _with_scorer(recipe: Recipe, scorer: Recipe) -> Recipe:
    """Return a recipe with the learning rates of another one for reward model and critic."""
    settings = dict(recipe.settings)
    for section, key in SCORER_SETTINGS:
        value = scorer.settings.get(section, {}).get(key)
        if value is not None:
            settings[section] = {**settings.get(section, {}), key: value}
    reason = scorer.reason.replace("the model has", "which has")
    return Recipe(recipe.name, f"{recipe.reason}; reward model and critic as {scorer.name}, {reason}", settings)


def _text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model of a configuration."""
    text = fields.get("text_config")
    return text if text and isinstance(text, dict) else fields


def _positions(fields: Mapping[str, Any]) -> int | None:
    """Return the number of positions of an architecture; None if it has no limit, or the limit is not known."""
    fields = _text_fields(fields)
    found = fields.get("max_position_embeddings") or fields.get("n_positions")
    return found if isinstance(found, int) else None


def _within(recipe: Recipe, positions: int | None) -> Recipe:
    """Return a recipe with lengths that fit a model of this many positions, and a reason that names the limit."""
    if positions is None:
        return recipe
    settings = dict(recipe.settings)
    for name in LENGTH_SECTIONS:
        if settings.get(name, {}).get("max_length", 0) > positions:
            settings[name] = {**settings[name], "max_length": positions}
    rollout = settings.get("rollout", {})
    prompt, answer = rollout.get("max_prompt_tokens", 0), rollout.get("max_new_tokens", 0)
    if prompt and answer and prompt + answer > positions:  # both get shorter by the same factor
        longest = max(1, positions * prompt // (prompt + answer))
        settings["rollout"] = {**rollout, "max_prompt_tokens": longest, "max_new_tokens": positions - longest}
    if settings == recipe.settings:
        return recipe
    return Recipe(recipe.name, f"{recipe.reason}, and {positions} positions, which limit the lengths", settings)


def _architecture(values: Mapping[str, str | None], group: str) -> dict[str, Any] | None:
    """Return the fields of a model's configuration: empty if they cannot be read, None if only the hub has them."""
    from huggingface_hub import try_to_load_from_cache

    option = CONF / "model" / f"{values.get(group) or values.get(f'model@{group}')}.yaml"
    settings = dict(read_option(option)) if option.is_file() else {}
    try:
        for key in ("path", "hub"):
            settings[key] = (values.get(f"{group}.{key}") or settings.get(key) or "").strip("'\"")
        file: Any = model_folder(settings["path"]) / "config.json" if settings["path"] else None
        if file is None and settings["hub"] and not settings.get("architecture"):
            file = try_to_load_from_cache(settings["hub"], "config.json")
        fields = json.loads(Path(file).read_text(encoding="utf-8")) if isinstance(file, str | Path) else None
        fields = fields or settings.get("architecture") or ({} if isinstance(file, str | Path) else None)
        for key, value in values.items():
            if key == f"{group}.architecture":
                fields = yaml.safe_load(value or "{}")
            elif key.startswith(f"{group}.architecture."):
                fields = {**(fields or {}), key.rsplit(".", 1)[1]: yaml.safe_load(value or "null")}
    except (UserError, OSError, ValueError, RecursionError, yaml.YAMLError):  # later checks advise
        return {}
    return fields if isinstance(fields, dict | None) else {}


def parameter_count(fields: Mapping[str, Any]) -> float | None:
    """Return the approximate number of parameters of an architecture, or None if a size is missing.

    Counts embeddings, attention and MLP. Norms and biases are left out: they are below 1 % of the parameters. A family
    that names its key-value heads or an RMS norm has a gated MLP of three matrices; others have two.
    """
    fields = _text_fields(fields)

    def size(*names: str, default: float = 0) -> float:
        found = next((fields[name] for name in names if fields.get(name)), default)
        return found if isinstance(found, int | float) and found > 0 else 0

    width, layers, vocabulary = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer"), size("vocab_size")
    heads = size("num_attention_heads", "n_head")
    if not (width and layers and vocabulary and heads):
        return None
    head = size("head_dim", default=width / heads)
    attention = 2 * width * head * (heads + size("num_key_value_heads", default=heads))
    matrices = 3 if fields.keys() & {"num_key_value_heads", "rms_norm_eps"} else 2
    mlp = matrices * width * size("intermediate_size", "ffn_dim", "n_inner", default=4 * width)
    mlp *= size("num_local_experts", "num_experts", default=1)
    copies = 1 if fields.get("tie_word_embeddings", True) else 2
    return layers * (attention + mlp) + copies * vocabulary * size("word_embed_proj_dim", default=width)
