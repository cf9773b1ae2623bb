"""The configuration of a command line, for tests: Hydra selects the options once, and each test sets its keys.

`compose` takes 0.13 seconds for any command line. Here it runs once for each selection of options. Hydra's own
parser and setter add the keys, as at the end of `compose`.
"""

import copy
from collections.abc import Sequence
from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from pipeline.config.check import validate
from pipeline.config.compose import Job
from pipeline.config.compose import _compose_job as product_compose_job
from pipeline.config.overrides import groups, rewrite, split
from pipeline.config.schema import RunConfig
from pipeline.errors import UserError

SELECTING = {"actor", "method", "lora_lr", "model", "data", "reward_model"}
SELECTING |= {
    f"{group}.{key}"
    for group in ("model", "data", "reward_model")
    for key in ("name", "path", "hub", "sources", "architecture")
}
"""Keys, without their third part, that also select options or a recipe."""


def config_of(*words: str) -> RunConfig:
    """Return the configuration of a command line. Raises UserError as the product does."""
    return validate(compose_job(words).raw)


def compose_job(words: Sequence[str], label: str = "") -> Job:
    """Replace `compose._compose_job` of the product, but name no recipe."""
    keys = [word for word in words if _sets_a_key(word)]
    selecting = tuple(word for word in words if word not in keys)
    reads_files = any(word.startswith(("actor=", "model.path=", "reward_model.path=")) for word in selecting)
    config = copy.deepcopy((_composed.__wrapped__ if reads_files else _composed)(selecting))
    for override in OverridesParser.create().parse_overrides(rewrite(keys)):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
    raw = OmegaConf.to_container(config, resolve=True)
    assert isinstance(raw, dict)
    return Job({str(key): value for key, value in raw.items()}, label)


def refusal(*words: str) -> str:
    """Return the message of the UserError that a command line ends with."""
    with pytest.raises(UserError) as caught:
        config_of(*words)
    return str(caught.value)


def _sets_a_key(word: str) -> bool:
    prefix, key, value = split(word)
    selects = key in groups() or ".".join(key.split(".")[:2]) in SELECTING
    return not prefix and value is not None and not selects


@cache
def _composed(words: tuple[str, ...]) -> DictConfig:
    return OmegaConf.create(product_compose_job(words).raw)
