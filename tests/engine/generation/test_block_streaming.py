"""Streamed blocks compute what the full inference model computes, in the memory of two blocks."""

import copy
from typing import Any

import torch

from engine import Engine, EngineConfig, OptimizerConfig, Sampling
from engine.parallel import dist
from tests.engine.generation.families import build
from tests.engine.generation.test_inference_model import PROMPTS
from tests.ranks import run_ranks

LAYERS = 5


def streamed(family: str, stage: int, offload: str) -> dict[str, Any]:
    """Two flips each way with an update between; ranks have different numbers of prompts."""
    torch.set_num_threads(1)
    whole = build(family, num_hidden_layers=LAYERS)
    tiers = {"offload_parameters": offload, "offload_optimizer": "nvme" if offload == "nvme" else "none"}
    config = EngineConfig(zero_stage=stage, dtype="bf16", **tiers)  # type: ignore[arg-type]
    how, world = Sampling(6, temperature=0.8), dist.world()
    mine = PROMPTS[: 3 - 2 * world.rank]
    found: dict[str, Any] = {"held": []}
    for stream in (False, True):
        engine = Engine(copy.deepcopy(whole), config, optimizer=OptimizerConfig(lr=0.02), rollout_path="")
        engine.flip.stream, engine.flip.parity_check_every = stream, 0
        found[stream] = []
        for keep in (True, False):
            with engine.generating(keep=keep) as rollouts:
                model = engine.flip._model
                assert model is not None
                if stream and keep:
                    watch(model, found["held"])
                answers = rollouts.generate(mine, how, [*range(2 * len(mine))], batch_size=3, samples=2)
                found[stream].append([a.token_ids for a in answers])
            ids = torch.tensor([PROMPTS[1]])
            engine.update([ids], lambda module, batch: (module(batch, labels=batch).loss, {}), 1)
    blocks = [sum(p.numel() for p in block.parameters()) * 2 for block in whole.get_submodule("model.layers")]
    found["whole"], found["block"] = sum(p.numel() for p in whole.parameters()) * 2, max(blocks)
    assert model.stream is not None
    found["freed"] = not model.stream.memory and all(p.is_meta for p in model.module.parameters())
    return found


def watch(model: Any, held: list[int]) -> None:
    """Note the bytes that the model takes whenever a block runs."""

    def note(*_: Any) -> None:
        tensors = [*model.module.parameters(), *model.stream.memory]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
        held.append(sum(storages.values()))

    for block in model.stream.blocks:
        block.register_forward_pre_hook(note)


def check(found: dict[str, Any]) -> None:
    assert found[True] == found[False] and found[True][0] != found[True][1]
    rest = found["whole"] - LAYERS * found["block"]
    assert 0 < max(found["held"]) <= rest + 2 * found["block"] + 8192 < found["whole"]  # alignment, a page in front
    assert found["freed"]


def test_one_rank() -> None:
    check(streamed("llama", 3, "cpu"))


def both() -> list[dict[str, Any]]:
    return [streamed("qwen3", 2, "none"), streamed("llama", 3, "nvme")]


def test_two_ranks_of_which_one_is_done_earlier() -> None:
    for rank in run_ranks(both, 2):
        for found in rank:
            check(found)
