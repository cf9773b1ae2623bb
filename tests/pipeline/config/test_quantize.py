"""`model.quantize`: what it needs and what it does not support, each in one line."""

import pytest

from pipeline.config import check_engine
from pipeline.errors import UserError
from tests.composed import config_of

QLORA = ["model=opt-1.3b", "model.quantize=nf4", "sft=lora", "reward=lora", "ppo=lora"]


def refusal(*words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config_of(*QLORA, *words)
    return str(caught.value).splitlines()


def test_every_stage_with_adapters_is_accepted() -> None:
    assert config_of(*QLORA, "engine=zero2").model.quantize == "nf4"


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["reward=default"], "nf4 freezes the model, so each stage trains adapters, but reward.lora.rank=0"),
        (["engine=zero3"], "nf4 does not shard the weights in 4 bits: set engine.zero_stage=2 instead of 3"),
        (["engine.tensor_parallel=2"], "nf4 needs engine.tensor_parallel=1, not 2"),
        (["engine.compile_blocks=true"], "nf4 needs engine.compile_blocks=false, not true"),
        (["engine.deepspeed={zero_optimization: {stage: 1}}"], "nf4 needs engine.deepspeed=null"),
        (["ppo.critic_engine={offload_optimizer: cpu}"], "nf4 needs ppo.critic_engine.offload_optimizer=none"),
        (["ppo.reward_engine={zero_stage: 3}"], "nf4 does not shard the weights in 4 bits: set ppo.reward_engine."),
        (["rollout.stream=true"], "nf4 needs rollout.stream=false"),
        (["rollout.tensor_parallel=2"], "nf4 needs rollout.tensor_parallel=1"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(words: list[str], start: str) -> None:
    lines = refusal(*words)
    assert len(lines) == 1 and lines[0].startswith(f"model.quantize={start}")


def test_a_quantized_reward_model_needs_adapters_in_ppo() -> None:
    words = ["model.quantize=none", "reward_model=opt-350m", "reward_model.quantize=nf4", "ppo=default"]
    assert [line.partition(",")[0] for line in refusal(*words)] == ["reward_model.quantize=nf4 freezes the model"]


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_engine, "find_spec", lambda name: None)
    (line,) = refusal()
    assert "bitsandbytes" in line and "pip install '.[quantize]'" in line
    assert config_of(*QLORA, "stage=plan").stage == "plan"  # a plan needs no weights
