"""The values of keys that select a function, against the tables of functions and the guides.

A failure names the file that lacks the new value.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from pipeline.config.needs import NEEDS
from pipeline.config.overrides import groups
from pipeline.config.schema import RunConfig
from pipeline.config.stage_sections import DpoSection, PpoSection, StageSection
from step2_dpo.loss import LOSSES, kto_loss
from step3_ppo.advantages import ESTIMATORS, KL
from step3_ppo.loss import POLICY_LOSSES

ROOT = Path(__file__).parents[3]
GUIDES = {"ppo": "docs/guides/ppo_variants.md", "dpo": "docs/guides/dpo.md"}
VARIANTS: dict[str, tuple[type[StageSection], Iterable[str], str]] = {
    "ppo.advantage": (PpoSection, ESTIMATORS, "ESTIMATORS of step3_ppo/advantages.py"),
    "ppo.loss": (PpoSection, POLICY_LOSSES, "POLICY_LOSSES of step3_ppo/loss.py"),
    "ppo.kl_estimator": (PpoSection, {*KL, "k3_weighted"}, "KL of step3_ppo/advantages.py"),
    "dpo.loss": (DpoSection, {*LOSSES, "kto"}, "LOSSES of step2_dpo/loss.py"),
}

TABLES: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "ppo.advantage": ESTIMATORS,
    "ppo.loss": POLICY_LOSSES,
    "dpo.loss": {**LOSSES, "kto": (kto_loss, ("beta", "undesirable_weight"))},
}
ALWAYS_READ = {"samples", "lam"}  # each rollout has samples; recipes set lam for any advantage


def values_of(section: type[StageSection], name: str) -> set[str]:
    """Return the values that a key allows, without null."""
    annotation = section.model_fields[name].annotation
    choices = [get_args(kind) or (kind,) for kind in (annotation, *get_args(annotation))]
    return {value for kinds in choices for value in kinds if isinstance(value, str)}


@pytest.mark.parametrize("key", VARIANTS)
def test_each_value_has_a_function_and_is_described(key: str) -> None:
    section, table, place = VARIANTS[key]
    stage, _, name = key.partition(".")
    values = values_of(section, name)
    assert values == set(table), f"{key} (pipeline/config/stage_sections.py) and {place} differ"
    described = {"the description of the key": section.model_fields[name].description or ""}
    described[GUIDES[stage]] = (ROOT / GUIDES[stage]).read_text(encoding="utf-8")
    for place, text in described.items():
        words = set(re.findall(r"[a-z0-9_]+", text.lower().replace("-", "_")))
        assert values <= words, f"{place} does not name {key}={', '.join(sorted(values - words))}"


@pytest.mark.parametrize("variant", TABLES)
def test_a_key_has_an_effect_exactly_with_the_variants_that_take_it(variant: str) -> None:
    stage, _, name = variant.partition(".")
    (section, _, _), table = VARIANTS[variant], TABLES[variant]
    needs = {key: has_effect for key, _, has_effect in NEEDS}
    for value, (*_, taken) in table.items():
        config = RunConfig.model_construct(**{stage: section(**{name: value})})
        for key in {key for *_, keys in table.values() for key in keys} - ALWAYS_READ:
            has_effect = f"{stage}.{key}" not in needs or bool(needs[f"{stage}.{key}"](config))
            assert has_effect == (key in taken), f"{stage}.{key} with {variant}={value}: NEEDS of config/needs.py"


@pytest.mark.parametrize("stage", GUIDES)
def test_the_guide_names_each_option(stage: str) -> None:
    page = (ROOT / GUIDES[stage]).read_text(encoding="utf-8")
    options = set(groups()[stage]) - {"default", "lora"}  # adapters have a guide of their own
    missing = [name for name in options if f"{stage}={name}" not in page]
    assert not missing, f"{GUIDES[stage]} does not name {', '.join(f'{stage}={name}' for name in missing)}"
