"""A stage before it starts: it fits, almost fills the device, or is refused with a setting that fits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import OPTConfig

from pipeline.config.messages import format_bytes
from pipeline.config.stage_sections import LoraConfig
from pipeline.errors import UserError
from pipeline.models.source import ModelSource
from pipeline.planning import planner
from pipeline.planning.candidates import Capacity, candidates
from pipeline.planning.demand import Demand
from pipeline.planning.planner import check_fit, fit_settings, plan, suggest_changes
from pipeline.planning.stage_task import PlanInputs, adapter_parameters, stage_task
from tests.tiny import tiny_config

GIB = 2**30


def source() -> ModelSource:
    shape = {"hidden_size": 512, "ffn_dim": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    return ModelSource("small", OPTConfig(word_embed_proj_dim=512, **shape), None, 1, "sdpa", False)


def gpu(size: int) -> Capacity:
    """A GPU in a host without memory and disk."""
    return Capacity(size, 0, 0, is_gpu=True)


def test_a_stage_that_fits_prints_one_line() -> None:
    found = plan(tiny_config(), "sft", PlanInputs(source()), ranks=2, capacity=gpu(80 * GIB))
    assert found.fits and found.advice is None
    (line,) = check_fit(found, refuse=True, remedy=str)
    assert line.startswith("memory: about ") and "of 80.00 GiB per device (train: " in line


@pytest.mark.parametrize(
    ("absent", "keys"),
    [
        ("critic", {"advantage": "reinforce"}),
        ("reference", {"kl_coef": 0.0, "guard": "off"}),
        ("reward", {"reward_model": False, "reward_function": "mine.py:score"}),
    ],
)
def test_ppo_needs_memory_only_for_the_models_that_it_uses(absent: str, keys: dict[str, Any]) -> None:
    full, fewer = (
        plan(tiny_config(ppo={"kl_target": None, **each}), "ppo", PlanInputs(source()), ranks=1).demand.phases
        for each in ({}, keys)
    )
    assert full["score"][absent] > 0 and fewer == {
        phase: {owner: size for owner, size in owners.items() if owner != absent}
        for phase, owners in full.items()
        if phase != f"train {absent}"
    }


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "ppo"])
def test_a_stage_that_does_not_fit_is_refused_with_a_setting_that_fits(stage: str) -> None:
    config = tiny_config(**{stage: {"micro_batch_tokens": 8192}})
    peak = plan(config, stage, PlanInputs(source()), ranks=4, capacity=gpu(80 * GIB)).demand.peak
    tight = plan(config, stage, PlanInputs(source()), ranks=4, capacity=gpu(round(peak * 0.8)))
    assert tight.advice is not None
    with pytest.raises(UserError, match=r"does not fit. This setting fits: .*micro_batch_tokens|engine\."):
        check_fit(tight, refuse=True, remedy=str)
    assert len(check_fit(tight, refuse=False, remedy=str)) == 2
    # With the suggested setting the stage fits.
    overrides = dict(override.split("=") for override in tight.advice.changes)
    engine = {key[7:]: yaml.safe_load(value) for key, value in overrides.items() if key.startswith("engine.")}
    tokens = overrides.get(f"{stage}.micro_batch_tokens", 8192)
    changed = tiny_config(**{"engine": engine, stage: {"micro_batch_tokens": tokens}})
    assert plan(changed, stage, PlanInputs(source()), ranks=4, capacity=gpu(round(peak * 0.8))).fits


def test_pairs_are_not_split() -> None:
    for stage, sequences in {"sft": 1, "reward": 2, "dpo": 2}.items():
        task = stage_task(tiny_config(), stage, PlanInputs(source()), ranks=1, is_cpu=False)
        smallest = min(candidate.task.work.micro_batch_tokens for candidate in candidates(task, gpu(GIB)))
        assert smallest == sequences * task.work.max_length < task.work.micro_batch_tokens


def test_no_setting_fits() -> None:
    found = plan(tiny_config(), "ppo", PlanInputs(source()), ranks=1, capacity=gpu(GIB // 100))
    assert not found.fits and found.advice is None
    lines = check_fit(found, refuse=False, remedy=lambda: "use the moon")
    assert lines[1].endswith("the prediction exceeds the device. No engine setting fits; use the moon")
    with pytest.raises(
        UserError, match=r"does not fit\. No engine setting fits; use the moon\. .*engine\.memory_check=warn"
    ):
        check_fit(found, refuse=True, remedy=lambda: "use the moon")


def test_a_user_can_start_a_stage_that_is_predicted_not_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpu = replace(planner.distributed.world(), device=torch.device("cuda"))
    monkeypatch.setattr(planner.distributed, "world", lambda: on_gpu)
    monkeypatch.setattr(planner, "measure_capacity", lambda *_: gpu(GIB // 100))
    with pytest.raises(UserError, match=r"To start it nevertheless: engine\.memory_check=warn"):
        fit_settings(tiny_config(), "sft", tmp_path, PlanInputs(source()))
    fit_settings(tiny_config(engine={"memory_check": "warn"}), "sft", tmp_path, PlanInputs(source()))
    assert "the prediction exceeds the device" in capsys.readouterr().out


def test_the_remedy_names_the_smallest_number_of_ranks_that_fits() -> None:
    """Stage 3 on four ranks holds a quarter of the states; the batch of 8 does not divide over 16 ranks."""
    config = tiny_config(ppo={"minibatches": 1})

    def advice(device_bytes: int, ranks: int = 1) -> str:
        return suggest_changes(config, "ppo", PlanInputs(source()), ranks=ranks, capacity=gpu(device_bytes))

    def least_bytes(ranks: int) -> int:
        task = stage_task(config, "ppo", PlanInputs(source()), ranks=ranks, is_cpu=False)
        demands = [candidate.demand for candidate in candidates(task, gpu(GIB))]
        return min(demand.peak for demand in demands if not demand.host and not demand.nvme)

    needed = {ranks: least_bytes(ranks) for ranks in (1, 2, 4, 8)}
    assert needed[1] > needed[2] > needed[4] > needed[8]
    adapters, smaller_model = "adapters (ppo.lora.rank=16)", "a smaller model (model=NAME)"
    others = f"{adapters}, streamed generation (rollout.stream=true) or {smaller_model}"
    for ranks, smaller in ((2, 1), (4, 2), (8, 4)):
        device_bytes = round((needed[ranks] + needed[smaller]) / 2 / 0.92)
        size = format_bytes(device_bytes)
        assert advice(device_bytes) == f"use {ranks} ranks with {size} each (ranks={ranks}), {others}"
    assert advice(GIB // 100) == f"use {others}; 2, 4 or 8 ranks with 10 MiB each do not fit either"
    assert advice(GIB // 100, ranks=4) == f"use {others}; 8 ranks with 10 MiB each do not fit either"
    assert advice(GIB // 100, ranks=8) == f"use more ranks (ranks=N), {others}"
    cpu = Capacity(GIB // 100, GIB // 100, GIB, is_gpu=False)  # more ranks would divide the memory of the machine
    on_cpu = suggest_changes(config, "ppo", PlanInputs(source()), ranks=1, capacity=cpu)
    assert on_cpu == f"use a machine with more memory, {adapters} or {smaller_model}"
    config = tiny_config(ppo={"minibatches": 1, "lora": {"rank": 4}}, rollout={"stream": True})
    assert advice(GIB // 100, ranks=8) == f"use more ranks (ranks=N), {smaller_model}"


def test_ppo_shares_forwards_if_those_of_a_step_fit() -> None:
    """The forwards of two micro-batches wait for their backward; the critic's wait while the actor trains."""

    def demand_of(device_bytes: int = 80 * GIB, **keys: Any) -> Demand:
        pipeline = keys.pop("pipeline_parallel", 1)
        config = tiny_config(
            engine={"pipeline_parallel": pipeline, "dtype": "fp32"},
            ppo={"minibatches": 1, "micro_batch_tokens": 256, "max_length": 128, **keys},
        )
        return plan(config, "ppo", PlanInputs(source()), ranks=2, capacity=gpu(device_bytes)).demand

    separate, shared = demand_of(shared_forward=False), demand_of(shared_forward=True)
    assert demand_of() == shared != separate and shared.shares_forward and not separate.shares_forward
    actor, critic = (separate.phases[phase]["activations"] for phase in ("train actor", "train critic"))
    assert shared.phases["train critic"]["activations"] == 2 * critic  # four sequences of 128 tokens per rank
    assert shared.phases["train actor"]["activations"] == 2 * (actor + critic)
    tight = round((separate.peak + shared.peak) / 2 / 0.9)
    assert (
        separate.peak < 0.9 * tight < shared.peak
        and demand_of(tight) == separate
        and demand_of(tight, shared_forward=True) == shared
    )
    assert not demand_of(minibatches=2).shares_forward and not demand_of(pipeline_parallel=2).shares_forward
    mixed = demand_of(ptx_coef=0.1)
    assert mixed.phases["train actor"]["activations"] == actor + 2 * critic


def test_adapters_of_selected_layers() -> None:
    shape = plan(tiny_config(), "sft", PlanInputs(source()), ranks=1).task.policy.shape
    expected = adapter_parameters(shape, LoraConfig(rank=4, targets=["fc1"]))  # of 512 x 2,048, in each of 8 blocks
    assert expected == 8 * 4 * (512 + 2048)
    assert adapter_parameters(shape, LoraConfig(rank=4, targets=r".*\.fc1")) == expected


def test_a_model_with_engine_settings_of_its_own() -> None:
    shared = plan(tiny_config(engine={"zero_stage": 3}), "ppo", PlanInputs(source()), ranks=4).demand
    config = tiny_config(engine={"zero_stage": 3}, ppo={"reference_engine": {"zero_stage": 0}})
    own = plan(config, "ppo", PlanInputs(source()), ranks=4).demand
    assert own.phases["generate"]["reference"] == 4 * shared.phases["generate"]["reference"]
    assert own.phases["generate"]["reward"] == shared.phases["generate"]["reward"]


def test_a_pipeline_step_has_a_micro_batch_for_each_rank() -> None:
    def tokens(stages: int, length: int) -> int:
        sft = {"batch_size": 2048 // length, "max_length": length, "micro_batch_tokens": 1024}
        config = tiny_config(sft=sft, engine={"pipeline_parallel": stages})
        return stage_task(config, "sft", PlanInputs(source()), ranks=stages, is_cpu=False).work.micro_batch_tokens

    assert (tokens(2, 128), tokens(4, 128)) == (1024, 512)
    assert tokens(4, 1024) == 1024  # a sequence is never split


def test_on_a_cpu_host_memory_is_the_device() -> None:
    found = plan(tiny_config(engine={"offload_optimizer": "cpu"}), "sft", PlanInputs(source()), ranks=1)
    assert found.demand.host > 0
    need = found.demand.peak + found.demand.host
    assert Capacity(round(need / 0.9), 0, 0, is_gpu=False).fits(found.demand)
    assert not Capacity(found.demand.peak, GIB, GIB, is_gpu=False).fits(found.demand)
