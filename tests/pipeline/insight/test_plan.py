"""A stage's memory beforehand: fits, is tight, or is refused with a setting that does fit."""

import pytest
import yaml
from transformers import OPTConfig

from pipeline.errors import UserError
from pipeline.insight.plan import HEADROOM, plan, require_fit
from pipeline.models.source import ModelSource
from tests.tiny import tiny_config

GIB = 2**30


def source() -> ModelSource:
    shape = {"hidden_size": 512, "ffn_dim": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    return ModelSource("small", OPTConfig(word_embed_proj_dim=512, **shape), None, 1, "sdpa", False)


def test_what_fits_is_one_line() -> None:
    found = plan(tiny_config(), "sft", policy=source(), ranks=2, available=80 * GIB)
    assert not found.advice
    (line,) = require_fit(found, refuse=True)
    assert line.startswith("memory: about ") and "of 80.0 a device (train: " in line


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_what_does_not_fit_is_refused_with_what_does(stage: str) -> None:
    config = tiny_config(**{stage: {"micro_batch_tokens": 8192}})
    whole = plan(config, stage, policy=source(), ranks=4, available=80 * GIB).demand.peak
    tight = plan(config, stage, policy=source(), ranks=4, available=round(whole * 0.8))
    assert len(tight.advice) == 1
    with pytest.raises(UserError, match=r"does not fit. What would: engine\."):
        require_fit(tight, refuse=True)
    assert len(require_fit(tight, refuse=False)) == 2
    # Taking the advice makes it fit.
    words = dict(word.split("=") for word in tight.advice[0].split())
    engine = {key[7:]: yaml.safe_load(value) for key, value in words.items() if key.startswith("engine.")}
    tokens = words.get(f"{stage}.micro_batch_tokens", 8192)
    taken = tiny_config(**{"engine": engine, stage: {"micro_batch_tokens": tokens}})
    assert plan(taken, stage, policy=source(), ranks=4).demand.peak <= HEADROOM * whole * 0.8


def test_what_can_not_fit_says_so() -> None:
    found = plan(tiny_config(), "ppo", policy=source(), ranks=1, available=GIB // 100)
    assert not found.advice
    with pytest.raises(UserError, match="more ranks, LoRA, or a smaller model"):
        require_fit(found, refuse=True)


def test_measured_room_and_adapters() -> None:
    full = plan(tiny_config(), "ppo", policy=source(), ranks=2)
    assert full.available > GIB // 4
    adapters = tiny_config(ppo={"lora": {"rank": 4}})
    assert plan(adapters, "ppo", policy=source(), ranks=2).demand.peak < full.demand.peak
