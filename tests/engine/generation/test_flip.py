"""The flip between training and generation on two ranks: weight sync, freed memory, and the division of prompts."""

import copy
import random
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.generation import prepacked_linears
from engine.generation.flip import deal
from engine.generation.generator import Generator
from engine.generation.inference_model import InferenceModel
from engine.generation.sampling import Sampling
from engine.parallel import collectives, dtensors, zero
from engine.sharding import precision_policy
from tests.engine.generation.families import build, can_prepack
from tests.engine.generation.test_inference_model import PROMPTS, adapted, answers, in_dtype, merged_by_peft
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """Return the results of each of two ranks."""
    return run_ranks(run_on_rank, 2)


def run_on_rank() -> dict[str, Any]:
    return {"gathered": gathered(), "freed": refilled_and_freed(), "replicated": replicated()}


def sharded(module: nn.Module, stage: int = 3, ranks: int | None = None) -> nn.Module:
    zero.shard(module, EngineConfig(zero_stage=stage, shard_ranks=ranks), precision_policy("bf16"))
    return module


def gathered() -> dict[str, Any]:
    """Sync a model with adapters. Its vocabulary of 97 rows is not divisible by two ranks."""
    torch.set_num_threads(1)
    full = adapted("llama")
    live = sharded(copy.deepcopy(full))
    expected = dict(in_dtype(merged_by_peft(full), torch.bfloat16).named_parameters())
    model = InferenceModel(copy.deepcopy(full), live, torch.bfloat16)
    before, gather, full_tensors, together = collectives.bytes_sent(), dtensors.full_tensor, list[Any](), list[int]()

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        result = gather(tensor)
        full_tensors.append(weakref.ref(result))
        together.append(sum(each.nbytes for reference in full_tensors if (each := reference()) is not None))
        return result

    dtensors.full_tensor = watched
    model.sync()
    dtensors.full_tensor = gather
    sent = collectives.bytes_sent() - before
    exact = ("lora_", "base_layer.weight")  # adapters, and the weights that they change, are gathered in fp32
    shards = {n: -(-len(p) // 2) * p[0].numel() for n, p in live.named_parameters()}  # 97 rows: 49 and 48, padded to 49
    parameters = dict(model.module.named_parameters())
    off = {name: (p.float() - expected[name].float()).abs().max() for name, p in parameters.items()}
    rounding = {name: 2**-8 * expected[name].float().abs().max() for name in off}  # the sums have another order
    return {
        "wrong": [name for name in off if off[name] > rounding[name]],
        "exact": sum(bool(value == 0) for value in off.values()) / len(off),
        "odd": sum(len(p) % 2 for p in parameters.values()),
        "sent": (sent.gather, sent.total),
        "together": max(together),
        "largest": 4 * max(p.numel() for p in live.parameters()),
        "factors": 4 * sum(p.numel() for n, p in live.named_parameters() if "lora_" in n),
        "once": sum(count * (4 if any(part in n for part in exact) else 2) for n, count in shards.items()),
    }


def test_weight_sync_gathers_each_shard_once(ranks: list[dict[str, Any]]) -> None:
    for actual in (rank["gathered"] for rank in ranks):
        assert actual["wrong"] == [] and actual["exact"] > 0.8
        assert actual["odd"] == 2, "embedding and head have 97 rows"
        assert actual["sent"] == (actual["once"], actual["once"]) and actual["once"] > 10_000
        # One parameter is gathered at a time, with its adapter, so that more ranks need no more memory.
        assert actual["together"] <= actual["largest"] + actual["factors"] < actual["once"]  # of 2 * once


def refilled_and_freed() -> dict[str, Any]:
    """Run three flips of an engine, of which the last two free their memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    live = build("llama", hidden_size=128, intermediate_size=256)  # matrices large enough to be packed
    engine = Engine(live, EngineConfig(zero_stage=3, dtype="bf16"), optimizer=OptimizerConfig(lr=0.05), rollout_path="")
    engine.flip.parity_check_every = 0
    results: dict[str, Any] = {"bytes": [], "packed": [], "answers": []}
    prepared, prepare = [0], prepacked_linears._prepare

    def counted(layer: nn.Module) -> prepacked_linears.Product:
        prepared[0] += 1
        return prepare(layer)

    prepacked_linears._prepare = counted
    for number in range(3):
        prepared[0] = 0
        with engine.generating(keep=number < 1) as rollouts:
            results["packed"].append(prepared[0])
            results["answers"].append(answers(copy.deepcopy(rollouts.module)))
            results["bytes"].append(engine.flip.bytes)
        ids = torch.tensor([PROMPTS[1]])
        engine.update([ids], lambda module, batch: (module(batch, labels=batch).loss, {}), 1)
    prepacked_linears._prepare = prepare
    model = engine.flip._model
    assert model is not None
    packs = engine.flip._generator.backend.model.packs  # type: ignore[union-attr]
    results["freed"] = all(p.is_meta for p in model.module.parameters()) and packs._products is None
    full = {name: dtensors.full_tensor(p.detach()).bfloat16() for name, p in engine.module.named_parameters()}
    with engine.generating() as rollouts:
        results["same"] = all(torch.equal(p, full[name]) for name, p in rollouts.module.named_parameters())
    return results


def test_each_flip_copies_and_packs_the_current_weights(ranks: list[dict[str, Any]]) -> None:
    for actual in (rank["freed"] for rank in ranks):
        copied, prepared = set(actual["bytes"]), set(actual["packed"])
        assert len(copied) == len(prepared) == 1 and min(copied) > 0
        assert min(prepared) > 0 or not can_prepack(torch.bfloat16)
        assert actual["answers"][0] != actual["answers"][1]
        assert actual["freed"] and actual["same"]


def replicated() -> bool:
    """Return whether shards over one rank (HSDP with two replicas) and over two ranks give the same model."""
    torch.set_num_threads(1)
    full = build("opt")
    expected = dict(in_dtype(full, torch.bfloat16).named_parameters())
    same = True
    for ranks in (1, 2):
        live = sharded(copy.deepcopy(full), ranks=ranks)
        model = InferenceModel(copy.deepcopy(full), live, torch.bfloat16)
        model.sync()
        same &= all(torch.equal(p, expected[name]) for name, p in model.module.named_parameters())
    return same


def test_replicated_shards(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["replicated"] for rank in ranks)


def test_the_parity_check_runs_at_the_first_flips_and_periodically() -> None:
    """An interrupted flip counts as a flip and leaves the trained weights unchanged."""
    engine = Engine(build("gpt2"), EngineConfig(zero_stage=0, dtype="bf16"), rollout_path="")
    engine.flip.parity_check_every = 4
    checked = []
    for turn in range(8):
        interrupted = pytest.raises(KeyboardInterrupt) if turn == 3 else nullcontext()
        with interrupted, engine.generating(keep=turn < 4) as rollouts:
            tokens = list(rollouts.stream(PROMPTS[0], Sampling(4, temperature=0)))
            checked.append(len(engine.flip.checked))
            if turn == 3:
                raise KeyboardInterrupt
    assert checked == [3, 3, 3, 3, 0, 0, 0, 3]
    again = Generator(in_dtype(build("gpt2"), torch.bfloat16), "cpu")
    assert tokens == list(again.stream(PROMPTS[0], Sampling(4, temperature=0)))


def test_each_prompt_has_one_rank_and_loads_are_balanced() -> None:
    lengths = [random.Random(1).randint(1, 500) for _ in range(61)]
    for groups in (1, 2, 3, 8):
        actual = [deal(lengths, groups, group) for group in range(groups)]
        assert sorted(index for indices in actual for index in indices) == list(range(61))
        assert all(indices == sorted(indices) for indices in actual)
        loads = [sum(0.2 * lengths[i] + 40 for i in indices) for indices in actual]  # a prompt's token costs a fifth
        assert max(loads) - min(loads) <= 0.2 * 500 + 40


def test_long_prompts_are_divided_evenly() -> None:
    """Every second prompt is long. A round-robin division would give all of them to one rank."""
    actual = [deal([400, 10] * 4, 2, group) for group in range(2)]
    assert [sum(index % 2 == 0 for index in indices) for indices in actual] == [2, 2]


def test_fewer_prompts_than_ranks() -> None:
    assert [deal([3, 4], 3, group) for group in range(3)] == [[1], [0], []]
