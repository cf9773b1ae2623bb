"""Compose configurations for tests that need many.

Hydra takes 0.1 s for each configuration, most of it for copies of the option files.
"""

import re
from copy import deepcopy
from functools import cache
from typing import Any

from pipeline.config.compose import compose
from pipeline.config.overrides import groups, rewrite, split
from pipeline.errors import UserError

SETTINGS = re.compile(r"(sft|reward|dpo|ppo|rollout|engine|plan|evaluation|profile)\.[\w.]+=|(seed|ranks|stage|name)=")
"""Overrides that neither select an option nor imply another override."""


def composed(*overrides: str) -> dict[str, Any]:
    """Return what `compose` returns. Command lines that select the same options share one composition by Hydra.

    Overrides of single keys are parsed by Hydra and set in a copy. `compose` itself serves command lines that depend on
    files, and all that this function does not understand.
    """
    from hydra.errors import HydraException

    selecting = tuple(token for token in overrides if not SETTINGS.match(token))
    if not {split(token)[1] for token in selecting} <= {*groups(), "reward_model", "method", "teacher"}:
        return compose(overrides)
    raw = deepcopy(_shared(selecting))
    try:
        parsed = _parser().parse_overrides(rewrite([token for token in overrides if token not in selecting]))
    except (HydraException, UserError, ValueError):
        return compose(overrides)
    for override in parsed:
        *parents, leaf = override.key_or_group.split(".")
        section: Any = raw
        for key in parents:
            section = section.get(key) if isinstance(section, dict) else None
        is_merged = isinstance(section, dict) and isinstance(section.get(leaf), dict)
        if not isinstance(section, dict) or is_merged or override.is_sweep_override() or "${" in override.input_line:
            return compose(overrides)
        section[leaf] = override.value()
    return raw


@cache
def _shared(overrides: tuple[str, ...]) -> dict[str, Any]:
    return compose(overrides)


@cache
def _parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()
