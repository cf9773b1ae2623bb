"""Streamed blocks sample the same tokens as the resident inference model, in the memory of two blocks."""

import copy
from typing import Any

import torch

from engine import Engine, EngineConfig, OptimizerConfig, Sampling
from engine.parallel import dist
from tests.engine.generation.families import build
from tests.engine.generation.test_inference_model import PROMPTS
from tests.ranks import run_ranks

LAYERS = 3


def generate_both_ways(family: str, stage: int, offload: str) -> dict[str, Any]:
    """Generate with and without streaming, before and after an update. The ranks have 3 and 1 prompts."""
    torch.set_num_threads(1)
    full_model = build(family, num_hidden_layers=LAYERS)
    tiers = {"offload_parameters": offload, "offload_optimizer": "nvme" if offload == "nvme" else "none"}
    config = EngineConfig(zero_stage=stage, dtype="bf16", **tiers)  # type: ignore[arg-type]
    how, world = Sampling(3, temperature=0.8), dist.world()
    mine = PROMPTS[: 3 - 2 * world.rank]
    results: dict[str, Any] = {"held": []}
    for stream in (False, True):
        engine = Engine(copy.deepcopy(full_model), config, optimizer=OptimizerConfig(lr=0.02), rollout_path="")
        engine.flip.stream, engine.flip.parity_check_every = stream, 0
        results[stream] = []
        for keep in (True, False):
            with engine.generating(keep=keep) as rollouts:
                model = engine.flip._model
                assert model is not None
                if stream and keep:
                    watch(model, results["held"])
                answers = rollouts.generate(mine, how, [*range(2 * len(mine))], batch_size=3, samples=2)
                results[stream].append([a.token_ids for a in answers])
            ids = torch.tensor([PROMPTS[1]])
            engine.update([ids], lambda module, batch: (module(batch, labels=batch).loss, {}), 1)
    blocks = [sum(p.numel() for p in block.parameters()) * 2 for block in full_model.get_submodule("model.layers")]
    results["full_bytes"], results["block_bytes"] = sum(p.numel() for p in full_model.parameters()) * 2, max(blocks)
    assert model.stream is not None
    results["freed"] = not model.stream.memory and all(p.is_meta for p in model.module.parameters())
    return results


def watch(model: Any, held: list[int]) -> None:
    """Append the model's bytes to `held` whenever a block runs."""

    def note(*_: Any) -> None:
        tensors = [*model.module.parameters(), *model.stream.memory]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
        held.append(sum(storages.values()))

    for block in model.stream.blocks:
        block.register_forward_pre_hook(note)


def check(actual: dict[str, Any]) -> None:
    assert actual[True] == actual[False] and actual[True][0] != actual[True][1]
    rest = actual["full_bytes"] - LAYERS * actual["block_bytes"]
    bound = rest + 2 * actual["block_bytes"] + 8192  # 8192: alignment and one page before the data
    assert 0 < max(actual["held"]) <= bound < actual["full_bytes"]
    assert actual["freed"]


def test_one_rank() -> None:
    check(generate_both_ways("llama", 3, "cpu"))


def generate_on_rank() -> list[dict[str, Any]]:
    return [generate_both_ways("qwen3", 2, "none"), generate_both_ways("llama", 3, "nvme")]


def test_two_ranks_with_different_numbers_of_prompts() -> None:
    for rank in run_ranks(generate_on_rank, 2):
        for actual in rank:
            check(actual)
