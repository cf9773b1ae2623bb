"""The flip on two ranks: over the wire as in shared memory, replicated shards, what is kept and what is freed."""

import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from engine import Engine, EngineConfig, OptimizerConfig
from engine.generation import packed
from engine.generation.packed import available
from engine.generation.rollouts import Rollouts
from engine.generation.sampling import Sampling
from engine.generation.twin import gather, hybrid, pooling
from engine.generation.twin.hybrid import Twin
from engine.generation.twin.pooling import Pool
from engine.parallel import dist, dtensors, zero
from engine.precision import policy
from tests.engine.generation.families import build
from tests.engine.generation.twin.test_hybrid import PROMPTS, adapted, answers, in_dtype, merged_by_peft
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(everything, 2)


def everything() -> dict[str, Any]:
    return {"ways": wire_and_memory(), "frozen": frozen_and_freed(), "replicated": replicated(), "pooled": pooled()}


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
    engine = Engine(live, EngineConfig(zero_stage=3, dtype="bf16"), optimizer=OptimizerConfig(lr=0.05), rollout_path="")
    engine.flip.selfcheck_every = 0
    found: dict[str, Any] = {"bytes": [], "packed": [], "answers": []}
    made, fill = [0], packed.Pack.fill

    def counted(pack: packed.Pack) -> None:
        made[0] += 1
        fill(pack)

    packed.Pack.fill = counted  # type: ignore[method-assign]
    for number in range(4):
        made[0] = 0
        with engine.generating(keep=number < 2) as rollouts:
            found["packed"].append(made[0])
            found["answers"].append(answers(copy.deepcopy(rollouts.module)))
            found["bytes"].append(engine.flip.bytes)
        ids = torch.tensor([PROMPTS[1]])
        engine.update([ids], lambda module, batch: (module(batch, labels=batch).loss, {}), 1)
    packed.Pack.fill = fill  # type: ignore[method-assign]
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


def pooled() -> dict[str, Any]:
    """Three flips with training between them, ranks apart and one for all; all matrices are packed."""
    torch.set_num_threads(1)
    packed.FEWEST_NUMBERS[torch.float32], packed.FP32_ROWS = 1, (1, 256)
    pooling._cores = lambda: 2
    few, found = pooling.FEWEST_BYTES, {}
    for way, pooling.FEWEST_BYTES in (("apart", few), ("together", 0)):
        torch.manual_seed(0)
        config = EngineConfig(zero_stage=3, dtype="fp32")
        engine = Engine(build("llama"), config, optimizer=OptimizerConfig(lr=0.02), rollout_path="")
        mine: dict[str, Any] = {"said": [], "threads": [], "checked": []}
        for _ in range(3):
            with engine.generating() as rollouts:
                places = engine.flip.share_of([len(prompt) for prompt in PROMPTS], expected=8)
                drawn = rollouts.generate([PROMPTS[i] for i in places], Sampling(8, seed=2), places, batch_size=1)
                mine["threads"].append(torch.get_num_threads())
                mine["said"].append({i: answer.token_ids for i, answer in zip(places, drawn, strict=True)})
                asked = rollouts.generate(PROMPTS[:1], Sampling(8, seed=2), [0])  # whoever is not to answer still can
            mine["checked"].append([one.answer.token_ids for one in engine.flip.checked])
            mine["asked"], mine["ranks"] = asked[0].token_ids, rollouts.ranks
            ids = torch.tensor([PROMPTS[1]])
            engine.update([ids], lambda module, batch: (module(batch, labels=batch).loss, {}), 1)
        found[way] = mine | {"after": torch.get_num_threads()}
    pooling.FEWEST_BYTES = few
    return found


def test_one_rank_of_a_host_generates_for_all(ranks: list[dict[str, Any]]) -> None:
    """The same answers as when each generates for itself, by the first alone, with the threads of both."""
    apart, together = ([rank["pooled"][way] for rank in ranks] for way in ("apart", "together"))
    for flip in range(3):
        assert sorted(i for rank in apart for i in rank["said"][flip]) == [0, 1, 2, 3]
        assert all(len(rank["said"][flip]) == 2 for rank in apart)
        assert together[0]["said"][flip] == apart[0]["said"][flip] | apart[1]["said"][flip]
        assert together[1]["said"][flip] == {}
    assert apart[0]["said"][0] != apart[0]["said"][2]
    assert [rank["threads"] for rank in apart + together] == [[1] * 3, [1] * 3, [2] * 3, [1] * 3]
    assert all(rank["after"] == 1 for rank in together)
    assert together[0]["checked"] == together[1]["checked"] == apart[0]["checked"] and together[0]["checked"][1]
    assert together[1]["asked"] == together[0]["asked"] == together[0]["said"][2][0]
    assert [rank["ranks"] for rank in apart + together] == [1, 1, 2, 2]


@pytest.mark.parametrize("why", ["few cores", "small", "another host"])
def test_else_each_generates_for_itself(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = dist.World(0, 2, 0, torch.device("cpu"))
    monkeypatch.setattr(pooling.dist, "world", lambda: leader)
    monkeypatch.setattr(pooling.dist, "gather_objects", lambda value: [value, value])
    monkeypatch.setattr(pooling.dist, "broadcast_object", lambda value: value)
    monkeypatch.setattr(pooling, "share", lambda size: None if why == "another host" else torch.zeros(size).byte())
    monkeypatch.setattr(pooling, "FEWEST_BYTES", 0)
    monkeypatch.setattr(pooling, "_cores", lambda: 2 * torch.get_num_threads())
    module = build("llama")
    assert (pooling.pool_of(module).ranks == 2) == (why != "another host")
    monkeypatch.setattr(pooling, *(("_cores", lambda: 1) if why == "few cores" else ("FEWEST_BYTES", 1 << 30)))
    assert pooling.pool_of(module).ranks == 1


def test_the_others_wait_for_the_leader() -> None:
    ended = torch.zeros(1, dtype=torch.int64)
    pools = [Pool(2, leads, 1, ended) for leads in (True, False)]
    order = []

    def other() -> None:
        with pools[1].at_work():
            pass
        order.append("other")

    with pytest.raises(KeyError), pools[0].at_work():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.1)
        order.append("leader")
        raise KeyError
    thread.join(10)
    assert order == ["leader", "other"]


def test_flips_are_checked_at_first_and_every_so_often() -> None:
    """One that was interrupted counts; what trains goes on as if there had been none."""
    engine = Engine(build("gpt2"), EngineConfig(zero_stage=0, dtype="bf16"), rollout_path="")
    engine.flip.selfcheck_every = 3
    checked = []
    for turn in range(6):
        interrupted = pytest.raises(KeyboardInterrupt) if turn == 3 else nullcontext()
        with interrupted, engine.generating(keep=turn < 4) as rollouts:
            said = list(rollouts.stream(PROMPTS[0], Sampling(4, temperature=0)))
            checked.append(len(engine.flip.checked))
            if turn == 3:
                raise KeyboardInterrupt
    assert checked == [3, 3, 3, 0, 0, 3]
    again = Rollouts(in_dtype(build("gpt2"), torch.bfloat16), "cpu")
    assert said == list(again.stream(PROMPTS[0], Sampling(4, temperature=0)))
