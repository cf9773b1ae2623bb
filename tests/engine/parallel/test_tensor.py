"""Tensor parallelism gives the losses, gradient norms and weights of one process, for every style of plan."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine import Engine, EngineConfig, OptimizerConfig, initialize
from engine.loading import copy_local
from engine.parallel import collectives, dist, dtensors, meshes
from tests.engine.weights import full_weights
from tests.ranks import run_ranks
from tests.simulated_gpu import building

STEPS, ROWS, VOCABULARY = 2, 4, 96
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},  # norms of the rank's heads
    "gpt_neox": {"attention_bias": True},  # biases, and a fused qkv matrix
    "phi3": {"pad_token_id": 0},  # outputs gathered, inputs split
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},  # transformers has no plan
    "diffllama": {"num_key_value_heads": 2},  # transformers has a plan for the head only
}
OPT_PLAN = {
    "decoder.layers.*.self_attn": "local_heads",
    "decoder.layers.*.self_attn.q_proj": "colwise",
    "decoder.layers.*.self_attn.k_proj": "colwise",
    "decoder.layers.*.self_attn.v_proj": "colwise",
    "decoder.layers.*.self_attn.out_proj": "rowwise",
    "decoder.layers.*.fc1": "colwise",
    "decoder.layers.*.fc2": "rowwise",
}
SGD = OptimizerConfig(lr=0.5, name="sgd", options={"momentum": 0.9}, max_grad_norm=1.0)  # Adam would magnify rounding


def made(family: str, *, lora: bool = False, **more: Any) -> nn.Module:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        family, **(shape | {"vocab_size": VOCABULARY, "max_position_embeddings": 32} | FAMILIES[family] | more)
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float()
    if lora:
        model.requires_grad_(False)
        inject_adapter_in_model(PeftAll, model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    for _, module in model.named_modules():
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            nn.init.normal_(module.bias, std=0.1)
    return model


PeftAll = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"])


def loss_of(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    return module(input_ids=ids, labels=ids, use_cache=False).loss * len(ids), {"rows": float(len(ids))}


def batch(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, 10), generator=torch.Generator().manual_seed(step))


def trained(family: str, *, lora: bool = False, steps: int = STEPS, **layout: Any) -> Engine:
    plan = OPT_PLAN if family == "opt" and layout.get("tensor_parallel", 1) > 1 else None
    engine = initialize(made(family, lora=lora), EngineConfig(dtype="fp32", tensor_plan=plan, **layout), optimizer=SGD)
    engine.losses, engine.norms = [], []  # type: ignore[attr-defined]
    for step in range(steps):
        advance(engine, step)
    return engine


def advance(engine: Engine, step: int) -> None:
    world = dist.world()
    mine = batch(step)[world.data_rank :: world.data_size]
    update = engine.update(list(mine.chunk(2)), loss_of, ROWS)
    assert update.sums["rows"] == ROWS
    engine.losses.append(update.loss)  # type: ignore[attr-defined]
    engine.norms.append(update.grad_norm)  # type: ignore[attr-defined]


def curves_and_weights(engine: Engine) -> tuple[list[float], list[float], dict[str, Tensor]]:
    return engine.losses, engine.norms, full_weights(engine)  # type: ignore[attr-defined]


def same(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    assert actual[1] == pytest.approx(expected[1], rel=1e-4)
    for name, weight in expected[2].items():
        torch.testing.assert_close(actual[2][name], weight, atol=2e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"zero_stage": 0, "activation_checkpointing": True}),
    ("qwen3", {"zero_stage": 3}),
    ("gpt_neox", {"zero_stage": 1}),
    ("phi3", {"zero_stage": 2}),
    ("mixtral", {"zero_stage": 3}),
    ("qwen3_moe", {"zero_stage": 0}),
    ("opt", {"zero_stage": 3}),
    ("llama", {"zero_stage": 3, "lora": True}),
]


def all_cases(tensor_parallel: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    torch.set_num_threads(1)
    return [curves_and_weights(trained(family, **layout, tensor_parallel=tensor_parallel)) for family, layout in cases]


def compiled() -> list[tuple[Tensor, Tensor]]:
    """Compile a graph with a sum over the ranks and a gather. Return its outputs and gradients for two lengths."""
    group, actual = meshes.tensor_mesh(2).get_group(), []

    @partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=True)
    def summed(x: Tensor) -> Tensor:
        total = collectives.summed(collectives.copied(x, group).sin(), group)
        return collectives.gathered(total, group)

    for tokens in (3, 5):
        x = torch.arange(float(tokens), requires_grad=True)
        out = summed(x)
        out.sum().backward()
        assert x.grad is not None
        actual.append((out.detach(), x.grad))
    return actual


def overflowed() -> bool:
    """Return whether a step is skipped if the gradient of a replicated parameter is infinite on one rank."""
    engine = initialize(made("llama"), EngineConfig(dtype="fp16", tensor_parallel=2), optimizer=SGD)

    def infinite(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * torch.inf)

    if not dist.is_rank_zero():
        engine.module.get_submodule("model.embed_tokens").register_forward_hook(infinite)
    return engine.update([batch(0)], loss_of, ROWS).skipped


def train_on_two_ranks() -> tuple[list[Any], list[tuple[Tensor, Tensor]], bool]:
    return all_cases(2, CASES), compiled(), overflowed()


def test_two_ranks_train_like_one_rank_with_split_matrices() -> None:
    one_rank = all_cases(1, CASES)
    for results, sines, skipped in run_ranks(train_on_two_ranks, 2):
        assert skipped, "the step must be skipped on every rank"
        for actual, expected in zip(results, one_rank, strict=True):
            same(actual, expected)
        for out, gradient in sines:
            x = torch.arange(float(len(gradient)))
            torch.testing.assert_close(out, (2 * x.sin()).repeat(2))
            torch.testing.assert_close(gradient, 2 * x.cos())


def offloaded_to_the_host() -> list[float]:
    """Train a model with values on devices, with its slices in host memory between uses."""
    layout: Any = {"zero_stage": 3, "tensor_parallel": 2, "offload_optimizer": "cpu", "offload_parameters": "cpu"}
    engine = initialize(made("llama"), EngineConfig(dtype="fp32", **layout), optimizer=SGD)
    assert all(dtensors.local(p.detach()).is_pinned() for p in engine.module.parameters())
    return [engine.update(list(batch(step).cuda().chunk(2)), loss_of, ROWS).loss for step in range(STEPS)]


@pytest.mark.skipif(building.unavailable_reason() is not None, reason=str(building.unavailable_reason()))
def test_slices_are_offloaded_from_devices() -> None:
    ((expected, _, _),) = all_cases(1, CASES[:1])
    for losses in run_ranks(offloaded_to_the_host, 2, device="cuda"):
        assert losses == pytest.approx(expected, rel=1e-5)


def train_on_four_ranks(folder: Path) -> dict[str, Any]:
    """Train ZeRO-3 over two tensor-parallel groups of two ranks. Load one process's checkpoint and save another."""
    torch.set_num_threads(1)
    results: dict[str, Any] = dict(zip(("qwen3", "mixtral"), all_cases(2, [CASES[1], CASES[4]]), strict=True))
    engine = trained("mixtral", zero_stage=3, tensor_parallel=2, steps=0)
    engine.load(folder / "one")
    advance(engine, 1)
    engine.save(folder / "four")
    held = {name: dtensors.local(p.detach()).numel() for name, p in engine.module.named_parameters()}
    full = full_weights(engine)
    refilled = dict(engine.module.named_parameters())
    for name, parameter in refilled.items():
        dtensors.local(parameter.detach()).fill_(torch.nan)
        copy_local(parameter, full[name])
    return results | {"loaded": full, "held": held, "refilled": full_weights(engine)}


def test_four_ranks_combine_it_with_zero_and_exchange_checkpoints(tmp_path: Path) -> None:
    one_rank = {family: curves_and_weights(trained(family)) for family in ("qwen3", "mixtral")}
    engine = trained("mixtral", steps=1)
    engine.save(tmp_path / "one")
    advance(engine, 1)
    for actual in run_ranks(train_on_four_ranks, 4, tmp_path):
        for family, expected in one_rank.items():
            same(actual[family], expected)
        for name, weight in full_weights(engine).items():
            torch.testing.assert_close(actual["loaded"][name], weight, atol=2e-4, rtol=1e-3)
            assert torch.equal(actual["refilled"][name], actual["loaded"][name]), name
            split = "proj" in name or "lm_head" in name
            assert actual["held"][name] == weight.numel() // (4 if split else 2), name
    back = trained("mixtral", steps=0)
    back.load(tmp_path / "four")
    for name, weight in full_weights(back).items():
        assert torch.equal(weight, actual["loaded"][name]), name


def collect_refusals() -> list[str]:
    messages = []
    config: dict[str, Any] = {"dtype": "fp32", "tensor_parallel": 2}
    for family, plan, more in (
        ("opt", None, {}),
        ("llama", None, {"num_key_value_heads": 1}),
        ("llama", None, {"intermediate_size": 49}),
        ("llama", {"layers.*.mlp.up_proj": "sideways"}, {}),
        ("llama", {"layers.*.nothing": "colwise"}, {}),
        ("diffllama", None, {}),
        ("llama", {"layers.*.input_layernorm": "colwise"}, {}),
    ):
        with pytest.raises(ValueError) as problem:
            initialize(made(family, **more), EngineConfig(tensor_plan=plan, **config))
        messages.append(str(problem.value))
    with pytest.raises(ValueError) as problem:
        initialize(made("llama"), EngineConfig(**(config | {"tensor_parallel": 3})))
    messages.append(str(problem.value))
    with pytest.raises(ValueError) as problem:
        adapted = LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"])
        initialize(inject_adapter_in_model(adapted, made("mixtral")), EngineConfig(**config))
    return [*messages, str(problem.value)]


def test_modules_that_cannot_be_split_are_refused() -> None:
    for actual in run_ranks(collect_refusals, 2):
        for message, part in zip(
            actual,
            (
                "OPTForCausalLM comes without a tensor-parallel plan",
                "tensor_parallel=2 does not divide the number of key-value heads",
                "gate_proj.weight",
                "the unknown style sideways for",
                "no module matches tensor_plan (layers",
                "DiffLlamaForCausalLM comes without a tensor-parallel plan",
                "is a LlamaRMSNorm",
                "tensor_parallel=3 does not divide the 2 ranks",
                "mlp.experts has an adapter",
            ),
            strict=True,
        ):
            assert part in message
