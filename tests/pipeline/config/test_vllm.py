"""`rollout.generator=vllm`: the package that it needs and the keys that it does not support, each in one line."""

import pytest

from pipeline.config import check_engine
from pipeline.errors import UserError
from tests.composed import config_of

VLLM = ["model=opt-1.3b", "rollout.generator=vllm"]


def refusal(*words: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        config_of(*VLLM, *words)
    return str(caught.value).splitlines()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_engine, "find_spec", lambda name: True)


def test_the_default_is_the_built_in_generator() -> None:
    assert config_of("model=opt-1.3b").rollout.generator == "engine"
    assert config_of(*VLLM, "ppo=lora", "engine=zero3").rollout.generator == "vllm"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["rollout.stream=true"], "rollout.stream=false, not true"),
        (["rollout.tensor_parallel=2"], "rollout.tensor_parallel=1, not 2"),
        (["engine.pipeline_parallel=2", "stage=sft"], "engine.pipeline_parallel=1, not 2"),
        (["model.trust_remote_code=true"], "model.trust_remote_code=false, not true"),
        (["model.quantize=nf4", "sft=lora", "reward=lora", "ppo=lora"], "model.quantize=none, not nf4"),
    ],
)  # fmt: skip
def test_what_vllm_does_not_support_is_refused(words: list[str], key: str) -> None:
    assert refusal(*words) == [f"rollout.generator=vllm needs {key}: remove one of the two"]


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_engine, "find_spec", lambda name: None)
    (line,) = refusal()
    assert line.startswith(
        "rollout.generator=vllm needs the package vllm, which is not installed: pip install '.[vllm]'"
    )
    assert config_of(*VLLM, "stage=plan").stage == "plan"
