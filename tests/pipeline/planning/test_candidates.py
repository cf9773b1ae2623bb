"""`engine=auto` chooses the fastest setting that fits, a resumed stage uses it again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import distributed
from engine.host_memory import HostMemory
from engine.memory import Rates, measure_shape
from pipeline.config.schema import EngineSettings
from pipeline.errors import UserError
from pipeline.planning import planner
from pipeline.planning.candidates import Capacity, candidates, fastest, measure_capacity, predict
from pipeline.planning.demand import predict_bytes
from pipeline.planning.planner import fit_settings, plan
from pipeline.planning.stage_task import PlanInputs, stage_task
from tests.pipeline.planning.test_planner import GIB, source
from tests.ranks import run_ranks
from tests.tiny import tiny_config

RATES = Rates(
    forward=3e-12, backward=6e-12, decode=3e-10, head=1e-4, adam=1e-9, host_adam=4e-9, all_reduce=1e-9,
)  # fmt: skip


def test_the_ranks_of_this_machine_divide_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines with four ranks each. A container allows less memory than the machine has."""
    monkeypatch.setattr("pipeline.planning.candidates.host_memory", lambda: HostMemory(100 * GIB, 10 * GIB))
    assert measure_capacity(EngineSettings(), 8).host == 100 * GIB // 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert measure_capacity(EngineSettings(), 8).host == 100 * GIB // 4


def test_less_memory_needs_settings_with_less_memory() -> None:
    config = tiny_config(sft={"micro_batch_tokens": 4096, "batch_size": 128})
    task = stage_task(config, "sft", PlanInputs(source()), ranks=4, is_cpu=False)
    chosen = []
    for size in (80 * GIB, 3 * GIB, 2 * GIB, GIB):
        best = fastest(candidates(task, Capacity(size, 10 * GIB, 10 * GIB, is_gpu=True), RATES))
        assert best is not None and best.demand.peak <= 0.92 * size
        chosen.append(best)
    assert chosen[0].task.work.micro_batch_tokens == 4096 and chosen[0].engine["offload_optimizer"] == "none"
    assert [c.step_seconds for c in chosen] == sorted(c.step_seconds for c in chosen)
    assert chosen[-1].changes != chosen[0].changes
    assert fastest(candidates(task, Capacity(GIB // 100, GIB, GIB, is_gpu=True), RATES)) is None


def test_auto_chooses_once_for_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(engine={"auto": True, "zero_stage": 3}, ppo={"minibatches": 1})
    monkeypatch.setattr(planner, "measure", lambda *_: RATES)
    chosen_config, predicted = fit_settings(config, "sft", tmp_path, PlanInputs(source()))
    assert chosen_config.engine.zero_stage == 0 and not chosen_config.engine.auto and predicted["train"]
    assert "engine=auto: engine.zero_stage=0" in capsys.readouterr().out

    def again(*_: object) -> Rates:
        raise AssertionError("measured again")

    monkeypatch.setattr(planner, "measure", again)
    assert fit_settings(config, "sft", tmp_path, PlanInputs(source()))[0] == chosen_config
    assert "the setting that this stage started with" in capsys.readouterr().out
    monkeypatch.setattr(planner, "measure", lambda *_: RATES)
    monkeypatch.setattr(planner, "measure_capacity", lambda *_: Capacity(1000, 1000, 1000, is_gpu=False))
    with pytest.raises(UserError, match=r"no setting fits in .*use a machine with more memory, adapters"):
        fit_settings(config, "reward", tmp_path / "other", PlanInputs(source()))
    configured = tiny_config(ppo={"minibatches": 1})
    fit_settings(configured, "reward", tmp_path, PlanInputs(source()))
    assert "No engine setting fits; use a machine with more memory" in capsys.readouterr().out


def test_a_gpu_decodes_as_many_sequences_as_fit_with_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of each of 500 sequences takes the longest prompt and answer."""
    longest = {"max_prompt_tokens": 1024, "max_new_tokens": 1024}
    config = tiny_config(ppo={"batch_size": 500, "micro_batch_tokens": 2048}, rollout=longest)

    def slots(size: int, *, is_gpu: bool = True, batch_size: int | None = None) -> int | None:
        capacity = Capacity(size, size, size, is_gpu=is_gpu)
        monkeypatch.setattr(planner, "measure_capacity", lambda *_: capacity)
        rollout = config.rollout.model_copy(update={"batch_size": batch_size})
        chosen, _ = fit_settings(config.model_copy(update={"rollout": rollout}), "ppo", tmp_path, PlanInputs(source()))
        return chosen.rollout.batch_size

    assert slots(80 * GIB) == 500
    fits = [slots(size) or 0 for size in (8 * GIB, 16 * GIB, 24 * GIB)]
    assert 64 <= fits[0] < fits[1] < fits[2] < 500
    # One more sequence has to exceed the share of memory that a prediction may fill.
    task = replace(stage_task(config, "ppo", PlanInputs(source()), ranks=1, is_cpu=False), shares_forward=False)
    capacity = Capacity(8 * GIB, 8 * GIB, 8 * GIB, is_gpu=True)
    most = predict(task, capacity, None).task.load.slots
    peaks = [predict_bytes(replace(task, load=replace(task.load, slots=n))).peak for n in (most, most + 1)]
    assert peaks[0] <= 0.92 * 8 * GIB < peaks[1]
    assert slots(80 * GIB, is_gpu=False) == 64 and slots(80 * GIB, batch_size=80) == 80
    assert slots(GIB // 8) == 64  # as many as without a prediction; a cache that is too small cuts them


def test_vllm_gets_pages_for_all_sequences_or_what_training_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = {"generator": "vllm", "max_prompt_tokens": 1024, "max_new_tokens": 1024}
    config = tiny_config(
        engine={"dtype": "bf16"}, ppo={"batch_size": 2000, "micro_batch_tokens": 2048}, rollout=longest
    )
    task = stage_task(config, "ppo", PlanInputs(source()), ranks=1, is_cpu=False)
    assert task.load.slots == 8 and task.fills_memory
    sequence = 2048 * 2 * 2 * 8 * 512  # keys and values in bf16 of 8 layers

    def pages(size: int, cache_bytes: int | None = None, **rollout: bool) -> int | None:
        monkeypatch.setattr(planner, "measure_capacity", lambda *_: Capacity(size, size, size, is_gpu=True))
        section = config.rollout.model_copy(update={"cache_bytes": cache_bytes, **rollout})
        chosen, _ = fit_settings(config.model_copy(update={"rollout": section}), "ppo", tmp_path, PlanInputs(source()))
        return chosen.rollout.cache_bytes

    assert pages(200 * GIB) == 1024 * sequence, "vLLM decodes no more sequences at a time"
    kept, freed = pages(16 * GIB) or 0, pages(16 * GIB, keep=False) or 0
    assert 8 * sequence < kept < freed < 16 * GIB, "freed pages leave their memory to training"
    demand = plan(config, "ppo", PlanInputs(source()), ranks=1, capacity=Capacity(16 * GIB, 0, 0, is_gpu=True)).demand
    assert 0 <= 0.92 * 16 * GIB - demand.peak < sequence and demand.peak_phase == "train actor"
    assert pages(GIB) == 8 * sequence and pages(16 * GIB, cache_bytes=12345) == 12345


def choices_of_a_rank(folder: Path) -> list[tuple[Any, ...]]:
    """Return what a rank chooses for PPO, without and with engine=auto.

    The device of the first rank holds the forwards of a step, the other not.
    """
    size = 80 * GIB if distributed.is_rank_zero() else 4 * GIB
    keys = {"minibatches": 1, "batch_size": 200, "micro_batch_tokens": 2048}
    choices = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "measure_capacity", lambda *_: Capacity(size, 0, 0, is_gpu=True))
        patch.setattr(planner, "measure", lambda *_: RATES)
        for auto in (False, True):
            config = tiny_config(engine={"auto": auto, "dtype": "fp32"}, ppo=keys)
            chosen, predicted = fit_settings(config, "ppo", folder / str(auto), PlanInputs(source()))
            choices.append((chosen.ppo.shared_forward, chosen.rollout.batch_size, chosen.engine, predicted))
    return choices


def test_ranks_with_different_devices_make_the_same_choices(tmp_path: Path) -> None:
    """A rank that holds its forwards calls fewer collectives than one that does not."""
    for auto in (False, True):
        (tmp_path / str(auto)).mkdir()
    first, second = run_ranks(choices_of_a_rank, 2, tmp_path)
    assert first == second
    assert first[0][0] is False


def test_offloaded_bytes() -> None:
    tiers = {"zero_stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}
    config = tiny_config(engine=tiers)
    _, predicted = fit_settings(config, "sft", Path(), PlanInputs(source()))
    demand = plan(config, "sft", PlanInputs(source()), ranks=1).demand
    assert demand.host > 0 and demand.nvme > 14 * measure_shape("small", source().config).parameters - 1
    assert (predicted["train"]["host"], predicted["train"]["nvme"]) == (demand.host, demand.nvme)
    gradients = 4 * measure_shape("small", source().config).parameters
    assert predicted["generate"]["host"] == pytest.approx(demand.host - gradients, abs=4)
    train = sum(demand.phases["train"].values()) - demand.host - demand.nvme
    assert demand.device_bytes("train") == train, "bytes on the device do not include offloaded ones"
