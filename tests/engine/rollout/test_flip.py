"""The flip on two ranks: over the wire as in shared memory, replicated shards, what is kept and what is freed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.parallel import dtensors, zero
from engine.precision import policy
from engine.rollout import gather, hybrid
from engine.rollout.hybrid import Twin
from engine.rollout.packed import available
from tests.engine.rollout.families import build
from tests.engine.rollout.test_hybrid import PROMPTS, adapted, answers, in_dtype, merged_by_peft
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(everything, 2)


def everything() -> dict[str, Any]:
    return {"ways": wire_and_memory(), "frozen": frozen_and_freed(), "replicated": replicated()}


def sharded(module: nn.Module, stage: int = 3, ranks: int | None = None) -> nn.Module:
    zero.shard(module, stage=stage, policy=policy("bf16"), offload=False, ranks=ranks)
    return module


def wire_and_memory() -> dict[str, Any]:
    """Gather one model both ways; 97 rows over two ranks leave the last one short."""
    torch.set_num_threads(1)
    whole = adapted("llama")
    live = sharded(copy.deepcopy(whole))
    expected = dict(in_dtype(merged_by_peft(whole), torch.bfloat16).named_parameters())
    found: dict[str, Any] = {}
    share = hybrid.share
    for way, bucket in (("memory", 1 << 20), ("wire", 1 << 20), ("small buckets", 1 << 9)):
        hybrid.share = share if way == "memory" else lambda size: None  # type: ignore[assignment]
        gather.BUCKET_BYTES = bucket
        twin = Twin(copy.deepcopy(whole), live, torch.bfloat16)
        twin.refresh()
        assert twin._buffers is not None
        off = {name: (p.float() - expected[name].float()).abs().max() for name, p in twin.module.named_parameters()}
        rounding = {name: 2**-8 * expected[name].float().abs().max() for name in off}  # of a sum in another order
        found[way] = {
            "shared": twin._buffers.shared,
            "wrong": [name for name in off if off[name] > rounding[name]],
            "exact": sum(bool(value == 0) for value in off.values()) / len(off),
        }
    hybrid.share = share
    return found


def test_memory_and_wire_bring_the_same(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["ways"] for rank in ranks):
        assert found["memory"]["shared"] and not found["wire"]["shared"] and not found["small buckets"]["shared"]
        for way in found.values():
            assert way["wrong"] == [] and way["exact"] > 0.8


def frozen_and_freed() -> dict[str, Any]:
    """An engine with frozen and trained parameters over four flips."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    live = build("llama", hidden_size=128, intermediate_size=256)  # matrices large enough to be packed
    for name, parameter in live.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    engine = Engine(
        live, EngineConfig(zero_stage=3, dtype="bf16"), optimizer=OptimizerConfig(lr=0.05), rollout_path=""
    )
    engine.flip.selfcheck_every = 0
    found: dict[str, Any] = {"bytes": [], "packed": [], "answers": []}
    made, pack = [0], torch.ops.mkldnn._reorder_linear_weight

    def counted(*arguments: Any) -> torch.Tensor:
        made[0] += 1
        packed: torch.Tensor = pack(*arguments)
        return packed

    torch.ops.mkldnn._reorder_linear_weight = counted
    for number in range(4):
        made[0] = 0
        with engine.generating(keep=number < 2) as rollouts:
            found["packed"].append(made[0])
            found["answers"].append(answers(copy.deepcopy(rollouts.module)))
            found["bytes"].append(engine.flip.bytes)
        ids = torch.tensor([PROMPTS[1]])
        engine.update([ids], lambda module, batch: (module(batch, labels=batch).loss, {}), 1)
    torch.ops.mkldnn._reorder_linear_weight = pack
    twin = engine.flip._twin
    assert twin is not None
    found["freed"] = all(p.is_meta for p in twin.module.parameters()) and not len(engine.flip._rollouts._slots.packs)  # type: ignore[union-attr, arg-type]
    whole = {name: dtensors.full_tensor(p.detach()).bfloat16() for name, p in engine.module.named_parameters()}
    with engine.generating() as rollouts:
        found["same"] = all(torch.equal(p, whole[name]) for name, p in rollouts.module.named_parameters())
    return found


def test_what_is_frozen_is_gathered_and_packed_once(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["frozen"] for rank in ranks):
        first, second, third, fourth = found["bytes"]
        assert 0 < second < first and second == third and fourth == first  # the fourth comes after a release
        made = found["packed"]
        assert made[3] == made[0] and made[1] == made[2] == made[0] // 2
        assert made[0] or not available(torch.bfloat16)
        assert found["answers"][0] != found["answers"][1]
        assert found["freed"] and found["same"]


def replicated() -> bool:
    """Two copies of the model of one rank each (HSDP's outer dimension), and one of two ranks, give one twin."""
    torch.set_num_threads(1)
    whole = build("opt")
    expected = dict(in_dtype(whole, torch.bfloat16).named_parameters())
    same = True
    for ranks in (1, 2):
        live = sharded(copy.deepcopy(whole), ranks=ranks)
        twin = Twin(copy.deepcopy(whole), live, torch.bfloat16)
        twin.refresh()
        same &= all(torch.equal(p, expected[name]) for name, p in twin.module.named_parameters())
    return same


def test_replicated_shards(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["replicated"] for rank in ranks)
