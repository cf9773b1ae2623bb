"""Tensor-parallel generation on two ranks gives the tokens of one rank. Each rank has about half of the matrices."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from engine import Engine, EngineConfig, OptimizerConfig, Sampling
from engine.generation.decode_loop import DecodeLoop
from engine.generation.generator import Generator
from engine.generation.kv_cache import free_bytes
from engine.parallel import collectives, dist
from tests.engine.generation.families import build
from tests.engine.generation.test_inference_model import CPU, PROMPTS, merged_by_peft
from tests.ranks import run_ranks
from tests.simulated_gpu import building

OPT_PLAN = {
    "decoder.layers.*.self_attn": "local_heads",
    **{f"decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "decoder.layers.*.self_attn.out_proj": "rowwise",
    "decoder.layers.*.fc1": "colwise",
    "decoder.layers.*.fc2": "rowwise",
}
CASES = [("llama", 3, None), ("opt", 0, OPT_PLAN), ("mixtral", 2, None)]
SAMPLINGS = {"greedy": Sampling(5, temperature=0), "sampled": Sampling(5, temperature=0.7, seed=3)}


def generate_split(family: str, stage: int, plan: dict[str, str] | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    full = build(family)
    if family == "llama":
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False), full)
    config = EngineConfig(zero_stage=stage, dtype="fp32", tensor_plan=plan)
    single = Generator(merged_by_peft(full), CPU)
    engine = Engine(copy.deepcopy(full), config, optimizer=OptimizerConfig(lr=1e-3), rollout_path="")
    engine.flip.tensor_parallel = 2
    found: dict[str, Any] = {"assigned": engine.flip.assign([3, 4])}
    with engine.generating() as rollouts:
        for name, how in SAMPLINGS.items():
            found[name] = [a.token_ids for a in rollouts.generate(PROMPTS, how, [4, 5, 6, 7], batch_size=3)]
            found[f"{name} alone"] = [a.token_ids for a in single.generate(PROMPTS, how, [4, 5, 6, 7])]
        assert isinstance(rollouts.backend, DecodeLoop) and rollouts.backend.cache is not None
        arguments: Any = (PROMPTS[:2], SAMPLINGS["sampled"], [*range(6)], 4, 3)
        found["samples"], found["samples alone"] = (
            [a.token_ids for a in each.generate(*arguments)] for each in (rollouts, single)
        )
        found["cached"] = rollouts.backend.cache.size.prompt_slots
        found["share"] = count_matrix_numbers(rollouts.module) / count_matrix_numbers(single.module)
    return found


def count_matrix_numbers(model: nn.Module) -> int:
    """Count the numbers in the matrices of the blocks."""
    return sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim > 1)


def split_all() -> tuple[list[dict[str, Any]], str]:
    return [generate_split(*case) for case in CASES], too_many_heads()


@pytest.fixture(scope="module")
def found() -> list[tuple[list[dict[str, Any]], str]]:
    return run_ranks(split_all, 2)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case[0] for case in CASES])
def test_two_ranks_generate_the_tokens_of_one_rank(found: list[tuple[list[dict[str, Any]], str]], case: int) -> None:
    for cases, _ in found:
        result = cases[case]
        assert result["assigned"] == [0, 1], "both ranks must answer the same prompts"
        assert result["cached"] == 2, "all samples of a prompt must share its cache"
        for name in (*SAMPLINGS, "samples"):
            assert result[name] == result[f"{name} alone"]
        assert result["greedy"] != result["sampled"]
        assert 0.5 <= result["share"] < 0.6


def generate_in_graphs() -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
    """Return the tokens with and without CUDA graphs, and the bytes that each call sent.

    The numbers of graphs are those after the calls, and when the communicators are destroyed.
    """
    engine = Engine(build("llama", num_hidden_layers=1), EngineConfig(dtype="fp32"), rollout_path="")
    engine.flip.tensor_parallel, engine.flip.parity_check_every = 2, 0
    tokens, sent = [], []
    with engine.generating() as rollouts:
        loop = rollouts.backend
        assert isinstance(loop, DecodeLoop) and loop.use_graphs
        for loop.use_graphs in (True, True, False):  # the first call captures
            before = collectives.bytes_sent()
            answers = rollouts.generate(PROMPTS[:2], Sampling(4, temperature=0.7, seed=3), [4, 5])
            tokens.append([answer.token_ids for answer in answers])
            sent.append((collectives.bytes_sent() - before).total)
        (graphs,) = [graphed for _, graphed in loop._samplers.values() if graphed is not None]
    assert tokens[0] == tokens[1]
    numbers, destroy = [len(graphs._graphs)], torch.distributed.destroy_process_group

    def watched() -> None:
        numbers.append(len(graphs._graphs))
        destroy()

    torch.distributed.destroy_process_group = watched  # type: ignore[assignment]
    dist.stop()
    return tokens[1], tokens[2], numbers, sent


@pytest.mark.skipif(building.unavailable_reason() is not None, reason=str(building.unavailable_reason()))
def test_graphs_contain_the_collectives_of_a_group() -> None:
    results = run_ranks(generate_in_graphs, 2, device="cuda")
    assert results[0][:2] == results[1][:2]
    for in_graphs, by_steps, graphs, sent in results:
        assert in_graphs == by_steps and graphs == [1, 0], "NCCL would wait without end for a graph with collectives"
        assert sent[1] == sent[2] > 0, "a replay counts the bytes of its collectives"


def cache_beside_weights() -> tuple[int, int]:
    """Return the bytes of a large cache and the free bytes of a device that had free memory for twice the weights."""
    from tests.simulated_gpu import cuda

    shape = {"num_hidden_layers": 1, "intermediate_size": 4096, "max_position_embeddings": 1024}
    engine = Engine(build("llama", **shape), EngineConfig(dtype="fp32"), rollout_path="")
    engine.flip.tensor_parallel, engine.flip.parity_check_every = 2, 0
    cuda.limit(cuda.allocated() + sum(p.nbytes for p in engine.module.parameters()))
    with engine.generating() as rollouts:
        rollouts.session(64, 64, 900)
        loop = rollouts.backend
        assert isinstance(loop, DecodeLoop) and loop.cache is not None
        result = loop.cache.size.tokens * loop.token_bytes, free_bytes(engine.device)
    cuda.limit()
    return result


@pytest.mark.skipif(building.unavailable_reason() is not None, reason=str(building.unavailable_reason()))
def test_the_cache_takes_half_of_the_memory_that_the_weights_leave() -> None:
    for size, free in run_ranks(cache_beside_weights, 2, device="cuda"):
        assert 0.3 * free < size < 0.6 * free


def too_many_heads() -> str:
    engine = Engine(
        build("llama", num_attention_heads=3, num_key_value_heads=3, head_dim=8, hidden_size=24),
        EngineConfig(dtype="fp32"), rollout_path="",
    )  # fmt: skip
    engine.flip.tensor_parallel = 2
    with pytest.raises(ValueError, match="does not divide the number of attention heads") as refused:
        engine.generating().__enter__()
    return str(refused.value)


def test_heads_that_do_not_divide_are_refused(found: list[tuple[list[dict[str, Any]], str]]) -> None:
    assert all("Use a divisor of 3" in message for _, message in found)
