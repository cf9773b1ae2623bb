"""`engine.deepspeed=FILE` on the command line: its content is stored in the configuration and overrides other keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine import OptimizerConfig
from pipeline.config.check import validate, warnings
from pipeline.config.schema import EngineSettings
from pipeline.errors import UserError
from pipeline.launch.fingerprint import stage_settings
from pipeline.models.build import EngineChoice
from tests.tiny import tiny_config

FILE = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6},
    "optimizer": {"type": "Lion", "params": {"lr": 5e-4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}


def raw(file: Any, **engine: Any) -> dict[str, Any]:
    return {**tiny_config().model_dump(mode="json", exclude={"engine"}), "engine": {"deepspeed": file, **engine}}


def test_a_file_is_stored_by_content_and_ignored_keys_are_named(tmp_path: Path) -> None:
    place = tmp_path / "ds.json"
    place.write_text(json.dumps(FILE))
    config = validate(raw(str(place)))
    assert config.engine.deepspeed == FILE
    assert any("reduce_bucket_size has no effect" in line for line in warnings(config))
    assert stage_settings(config, "sft")["engine.deepspeed.optimizer.type"] == "Lion"
    assert not any("deepspeed" in key for key in stage_settings(tiny_config(), "sft"))
    eight_bits = {"zero_optimization": {"stage": 2, "zero_quantized_weights": True, "zero_quantized_gradients": False}}
    output = stage_settings(validate(raw(FILE | eight_bits)), "sft")
    assert [key for key in output if "zero_optimization" in key] == [
        "engine.deepspeed.zero_optimization.zero_quantized_weights"
    ]


def test_the_file_of_one_model_of_ppo_is_a_setting_by_its_content(tmp_path: Path) -> None:
    place = tmp_path / "ds.json"

    def settings(file: dict[str, Any] | None) -> dict[str, Any]:
        place.write_text(json.dumps(file))
        own = {} if file is None else {"critic_engine": {"deepspeed": str(place)}}
        return stage_settings(validate(raw(FILE) | {"ppo": own}), "ppo")

    plain, clips = settings(FILE), settings(FILE | {"gradient_clipping": 0.1})
    changed = {key: value for key, value in clips.items() if plain.get(key) != value}
    assert changed == {"ppo.critic_engine.deepspeed.gradient_clipping": 0.1}
    assert settings(FILE | {"zero_optimization": {"stage": 1}}) == plain  # the update does not depend on the stage
    without = stage_settings(validate(raw(FILE) | {"ppo": {"critic_engine": {"deepspeed": None}}}), "ppo")
    assert without != settings(None)


def test_a_batch_size_other_than_the_stages_causes_a_warning() -> None:
    lines = [line for line in warnings(validate(raw({"train_batch_size": 16}))) if "train_batch_size=16" in line]
    # The file's 16 is also the batch size of sft, so only two stages differ.
    assert len(lines) == 2 and "reward.batch_size=8 is: set reward.batch_size=16" in lines[0]


def test_mistakes_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"engine.deepspeed=\S*: /\S*nothing.json: there is no such file"):
        validate(raw(str(tmp_path / "nothing.json")))
    with pytest.raises(UserError, match=r"engine.deepspeed=.*zero_optimization.stage=7"):
        validate(raw({"zero_optimization": {"stage": 7}}))
    with pytest.raises(UserError, match=r"engine.zero_stage=3, but engine.deepspeed has 2: remove"):
        validate(raw(FILE, zero_stage=3))
    with pytest.raises(UserError, match=r"engine.zero_stage=3, but engine.deepspeed has 2: remove"):
        validate(raw(FILE, zero_stage=3, offload_optimizer="nvme", offload_parameters="nvme"))
    with pytest.raises(UserError, match=r"ppo.critic_engine.zero_stage=0, but engine.deepspeed has 2: remove ppo"):
        validate(raw(FILE) | {"ppo": {"critic_engine": {"zero_stage": 0}}})
    assert validate(raw({"zero_optimization": {"stage": "auto"}}, zero_stage=3)).engine.zero_stage == 3


ONE_BIT = {"optimizer": {"type": "OneBitAdam"}}


@pytest.mark.parametrize(
    ("file", "engine", "message"),
    [
        (ONE_BIT, {"compress": "both"}, "engine.deepspeed: compress=both needs zero_stage=1, 2 or 3"),
        (ONE_BIT, {"zero_stage": 2}, "engine.deepspeed: the optimizer onebitadam needs full parameters"),
        (ONE_BIT, {"tensor_parallel": 2}, "engine.deepspeed: the optimizer onebitadam needs full parameters"),
        (
            FILE,
            {"states": "bf16", "dtype": "bf16"},
            "engine.deepspeed: states=bf16 supports only the optimizer adamw",
        ),
        (FILE | {"optimizer": {"type": "AdamW"}}, {"states": "bf16"}, "engine.deepspeed: states=bf16 needs dtype=bf16"),
    ],
)
def test_combinations_of_file_and_keys_that_are_impossible_are_refused(
    file: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    """Refuse them when the configuration is read, also for a role of PPO. Frozen models have no optimizer."""
    with pytest.raises(UserError, match=message):
        validate(raw(file, **engine))
    own = {**engine, "deepspeed": file}
    if "tensor_parallel" not in engine:
        with pytest.raises(UserError, match=r"ppo.critic_engine with ppo.critic_" + message):
            validate(raw(None) | {"ppo": {"critic_engine": own}})
    if "compress" not in engine and "states" not in engine:
        validate(raw(None, **engine) | {"ppo": {"reference_engine": {"deepspeed": file}}})


def test_keys_that_are_valid_only_with_the_file_are_accepted() -> None:
    """The file contains the ZeRO stage or the precision that the keys need."""
    for file, engine in (
        ({"zero_optimization": {"stage": 2}}, {"compress": "both", "dtype": "fp32"}),
        ({"bf16": {"enabled": True}}, {"states": "bf16"}),
    ):
        settings = validate(raw(file, **engine)).engine
        layout = EngineChoice(settings, OptimizerConfig(lr=1e-5)).layout()["config"]
        assert (layout.compress, layout.states) == (settings.compress, settings.states)


def test_the_file_overrides_the_stages_optimizer() -> None:
    settings = EngineSettings(deepspeed=FILE, dtype="fp32", activation_checkpointing=True)
    own = OptimizerConfig(lr=1e-5, total_steps=9, weight_decay=0.1, max_grad_norm=0.3)
    layout = EngineChoice(settings, own).layout()
    assert layout["config"].zero_stage == 2 and layout["config"].activation_checkpointing
    assert (layout["optimizer"].name, layout["optimizer"].lr, layout["optimizer"].max_grad_norm) == ("lion", 5e-4, 0.3)
    assert layout["scheduler"](9) == 5e-4
    assert EngineChoice(settings).layout()["optimizer"] is None
