"""The configuration of a command line, for tests: Hydra selects the options once, and each test sets its keys.

`compose` takes 0.13 seconds for any command line. Here it runs once for each selection of options. Hydra's own
parser and setter add the keys, as at the end of `compose`.
"""

import copy
from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from pipeline.config.check import validate
from pipeline.config.compose import compose
from pipeline.config.overrides import groups, rewrite, split
from pipeline.config.schema import RunConfig
from pipeline.errors import UserError

SELECTING = ("model", "data", "actor", "method", "reward_model", "lora_lr")  # keys that also select options or a recipe


def config_of(*words: str) -> RunConfig:
    """Return the configuration of a command line. Raises UserError as the product does."""
    keys = [word for word in words if _sets_a_key(word)]
    config = copy.deepcopy(_composed(tuple(word for word in words if word not in keys)))
    for override in OverridesParser.create().parse_overrides(rewrite(keys)):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
    return validate(OmegaConf.to_container(config, resolve=True))


def refusal(*words: str) -> str:
    """Return the message of the UserError that a command line ends with."""
    with pytest.raises(UserError) as caught:
        config_of(*words)
    return str(caught.value)


def _sets_a_key(word: str) -> bool:
    prefix, key, value = split(word)
    return not prefix and value is not None and key.partition(".")[0] not in SELECTING and key not in groups()


@cache
def _composed(words: tuple[str, ...]) -> DictConfig:
    return OmegaConf.create(compose(words))
