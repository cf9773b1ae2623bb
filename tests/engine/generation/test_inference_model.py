"""The inference model gives the answers of the live module for all layouts, precisions and adapters."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn

from engine import EngineConfig
from engine.generation.generator import Generator
from engine.generation.inference_model import InferenceModel
from engine.generation.sampling import Sampling
from engine.generation.weight_sync import full_parameters
from engine.parallel import dtensors, zero
from engine.sharding import precision_policy
from tests.engine.generation.families import build, ragged_prompts
from tests.ranks import run_ranks

PROMPTS = ragged_prompts(3, 9, 6, 2)
CPU = torch.device("cpu")
PARTS = {
    "llama": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"], "opt": ["k_proj", "fc1"], "qwen3": ["o_proj"],
    "mixtral": ["v_proj"], "falcon": ["query_key_value"], "gpt_neox": ["dense"], "gemma3_text": ["gate_proj"],
}  # fmt: skip


def answers(module: nn.Module) -> list[list[int]]:
    sampling = Sampling(10, temperature=0)
    return [a.token_ids for a in Generator(module, CPU).generate(PROMPTS, sampling, [0] * len(PROMPTS))]


def adapted(family: str, **changes: Any) -> nn.Module:
    """Return a model with nonzero adapters (peft initializes them with zeros)."""
    model = build(family, **changes)
    conv = family == "gpt2"
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=5, target_modules=PARTS[family], fan_in_fan_out=conv), model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters. Buffers, such as rotary frequencies, do not change."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def merged_by_peft(model: nn.Module) -> nn.Module:
    """Return a copy whose adapters peft has merged."""
    model = copy.deepcopy(model)
    for path, layer in [(p, m) for p, m in model.named_modules() if hasattr(m, "lora_A")]:
        layer.merge()
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer.base_layer)
    return model


CASES = [  # family, ZeRO stage, compute precision, adapters
    ("llama", 3, "bf16", True),
    ("llama", 0, "fp32", True),
    ("opt", 2, "fp32", True),
    ("gpt2", 3, "fp32", True),
    ("gpt2", 0, "bf16", False),
    ("qwen3", 1, "fp32", False),
    ("mixtral", 3, "fp32", True),
    ("falcon", 2, "fp32", True),
    ("gpt_neox", 1, "fp32", True),
    ("gemma3_text", 3, "fp32", True),
]


def flip(family: str, stage: int, precision: str, adapters: bool) -> dict[str, Any]:
    """On every rank: shard, generate, change the live weights, and generate again."""
    torch.set_num_threads(1)
    tied = family == "llama"
    full = adapted(family, tie_word_embeddings=tied) if adapters else build(family, tie_word_embeddings=tied)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    blueprint, live = copy.deepcopy(full), copy.deepcopy(full)
    zero.shard(live, EngineConfig(zero_stage=stage), precision_policy(precision))  # type: ignore[arg-type]
    before = {name: dtensors.local(p).detach().clone() for name, p in live.named_parameters()}
    inference = InferenceModel(blueprint, live, dtype)
    inference.sync()
    results: dict[str, Any] = {"answers": [answers(inference.module)], "bytes": inference.bytes}
    results["expected"] = [answers(in_dtype(merged_by_peft(full), dtype))]
    results["untouched"] = all(torch.equal(before[name], dtensors.local(p)) for name, p in live.named_parameters())
    addresses = {name: p.data_ptr() for name, p in inference.module.named_parameters()}
    with torch.no_grad():
        for model in (full, live):
            for name, parameter in model.named_parameters():
                dtensors.local(parameter).mul_(0.7 if "lora" in name else 1.1)
    inference.sync()
    results["answers"].append(answers(inference.module))
    results["expected"].append(answers(in_dtype(merged_by_peft(full), dtype)))
    results["stable"] = addresses == {name: p.data_ptr() for name, p in inference.module.named_parameters()}
    results["parameters"] = sum(p.numel() for p in inference.module.parameters())
    return results


def flip_all(cases: list[tuple[str, int, str, bool]]) -> list[dict[str, Any]]:
    return [flip(*case) for case in cases]


@pytest.fixture(scope="module")
def flips() -> list[list[dict[str, Any]]]:
    """Return one list for each rank with one entry for each case."""
    return run_ranks(flip_all, 2, CASES)


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_a_flip_on_two_ranks(flips: list[list[dict[str, Any]]], case: int) -> None:
    _, stage, precision, adapters = CASES[case]
    for rank in flips:
        actual = rank[case]
        assert actual["answers"] == actual["expected"]
        assert actual["answers"][0] != actual["answers"][1], "the second flip must see the new weights"
        assert actual["untouched"] and actual["stable"]
        full = actual["parameters"] * (2 if precision == "bf16" else 4)
        if stage == 0 and precision == "fp32":
            assert 0 < actual["bytes"] < full if adapters else actual["bytes"] == 0
        else:
            assert actual["bytes"] == full


def test_a_plain_module_of_the_same_precision_is_shared() -> None:
    live = build("llama", tie_word_embeddings=True)
    model = InferenceModel(copy.deepcopy(live).to("meta"), live, torch.float32)
    # A blueprint on the meta device has no buffer values. They come from the live module.
    model.sync()
    assert model.bytes == 0
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        assert parameter.data_ptr() == live.get_parameter(name).data_ptr() and not parameter.requires_grad
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    assert answers(model.module) == answers(live)


def test_only_adapted_weights_are_copied() -> None:
    live = adapted("llama")
    model = InferenceModel(copy.deepcopy(live), live, torch.float32)
    model.sync()
    copied = {
        name for name, p in model.module.named_parameters()
        if p.data_ptr() not in {q.data_ptr() for q in live.parameters()}
    }  # fmt: skip
    assert copied == {n for n, _ in model.module.named_parameters() if n.split(".")[-2] in PARTS["llama"]}
    assert not any("lora" in name or "base_layer" in name for name, _ in model.module.named_modules())


def test_a_wrapper_of_peft_is_refused() -> None:
    wrapped = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match=r"add adapters with peft\.inject_adapter_in_model"):
        InferenceModel(build("llama"), wrapped, torch.float32)


def test_the_inference_model_is_in_eval_mode_while_the_live_module_trains() -> None:
    live = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, use_cache=False)
    live.train()
    live.gradient_checkpointing_enable()
    model = InferenceModel(copy.deepcopy(live), live, torch.float32)
    model.sync()
    assert answers(model.module) == answers(build("gpt2")) and live.training


def test_adapters_that_cannot_be_merged_are_refused() -> None:
    cases = (
        ("opt", {"target_modules": ["q_proj"], "use_dora": True}),
        ("opt", {"target_modules": ["fc1"], "lora_bias": True}),
        ("mixtral", {"target_modules": [], "target_parameters": ["experts.down_proj"]}),
    )
    for family, unsupported in cases:
        live = build(family)
        inject_adapter_in_model(LoraConfig(r=2, **unsupported), live)
        with pytest.raises(ValueError, match="cannot be merged: only plain LoRA"):
            InferenceModel(build(family), live, torch.float32)
        with pytest.raises(ValueError, match="cannot be merged: only plain LoRA"):
            dict(full_parameters(live))


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the same architecture"):
        InferenceModel(build("llama"), build("opt"), torch.float32)
