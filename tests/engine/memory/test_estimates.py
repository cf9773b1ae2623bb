"""DeepSpeed's example figures, shapes counted without weights, activations against autograd's own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModel, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from engine.kernels.token_logprobs import BLOCK_ELEMENTS
from engine.memory import Workload, ppo_demand, sft_demand, shape_of
from engine.memory.__main__ import GIB, main, parse
from engine.memory.activations import activations
from engine.memory.estimates import all_estimates, zero3
from engine.memory.shapes import measured


def rounded(gpus: int) -> list[float]:
    """OPT-1.3B: 1,315,758,080 parameters, the largest layer 50,272 x 2,048."""
    return [float(f"{row.device / GIB:.3g}") for row in all_estimates(1_315_758_080, 50272 * 2048, gpus=gpus)]


def test_deepspeeds_examples() -> None:
    assert rounded(1) == [24.5, 2.45, 22.4, 2.83, 0.384]
    assert rounded(8)[0] == 5.21 and rounded(8)[2] == 3.14
    # P x 48 twice, largest layer x 48, P x 24, P x 27: 4 bytes x 8 GPUs, 16 and 18 bytes, half as much again.
    hosts = [row.host / GIB for row in all_estimates(1_315_758_080, 50272 * 2048, gpus=8)]
    assert hosts == pytest.approx([58.82, 58.82, 4.603, 29.41, 33.09], rel=1e-3)
    for name, wanted in (("opt-13b", 27.9), ("opt-66b", 139.4)):
        shape = shape_of(name)
        row = zero3(shape.parameters, shape.largest_layer, gpus=8, optimizer=False, weights=False)
        assert row.device / GIB == pytest.approx(wanted, abs=0.05), name


def test_shapes(tmp_path: Path) -> None:
    shape = shape_of("opt-1.3b")
    assert (shape.parameters, shape.largest_layer, shape.blocks) == (1_315_758_080, 50272 * 2048, 24)
    assert shape.root + 24 * shape.block == shape.parameters  # tied embeddings once
    assert shape.cache_per_token == 2 * 24 * 2048
    tiny = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64}
    tiny |= {"vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    by_json = shape_of(json.dumps(tiny))
    assert by_json.cache_per_token == 2 * 3 * 2 * 16
    AutoConfig.for_model("llama", **{k: v for k, v in tiny.items() if k != "model_type"}).save_pretrained(tmp_path)
    assert shape_of(str(tmp_path)).parameters == by_json.parameters
    with pytest.raises(ValueError, match=r"no name of conf/model: .*opt-13b"):
        shape_of("opt-13")
    with pytest.raises(ValueError, match=r"^model_type=lama: transformers has no such family; did you mean llama"):
        shape_of('{"model_type": "lama"}')


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "opt": OPTConfig(ffn_dim=256, word_embed_proj_dim=64, max_position_embeddings=80, dropout=0.0, **SMALL),
    "gpt2": GPT2Config(
        vocab_size=64, n_embd=64, n_layer=3, n_head=4, n_positions=80, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "llama": LlamaConfig(intermediate_size=160, num_key_value_heads=2, max_position_embeddings=80, **SMALL),
    "mixtral": MixtralConfig(intermediate_size=96, num_key_value_heads=2, num_local_experts=4, **SMALL),
}


@pytest.mark.parametrize("family", list(CONFIGS))
def test_activations_are_what_autograd_saves(family: str) -> None:
    shape = measured(family, CONFIGS[family])
    body = AutoModel.from_config(CONFIGS[family], attn_implementation="sdpa").train()
    own = {t.untyped_storage().data_ptr() for t in [*body.parameters(), *body.buffers()]}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            saved[place] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        places = torch.arange(64).expand(3, -1)
        mask: Tensor | None = torch.ones(64, 64, dtype=torch.bool).tril().expand(3, 1, 64, 64)
        if family in ("opt", "gpt2"):
            mask = None  # with one the CPU's attention lays its output out by heads
        body(input_ids=places, position_ids=places, attention_mask=mask, use_cache=False)
    found = activations(shape, tokens=3 * 64, length=64, dtype="fp32")
    assert found.total(checkpointing=False) == pytest.approx(sum(saved.values()), rel=0.05)
    assert found.block_input == 3 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}),
        ("bloom", {}),
        ("mamba", {"state_size": 4}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    ],
)
def test_one_block_is_half_of_two(family: str, fields: dict[str, Any]) -> None:
    """Kinds of layers listed for one block, masks of another form, products by expert: all can be counted."""
    found = []
    for blocks in (1, 2):
        config = AutoConfig.for_model(family, **{**SMALL, "num_hidden_layers": blocks, **fields})
        found.append(activations(shape_of(config.to_dict()), tokens=64, length=64, dtype="fp32"))
    assert found[0].block == found[1].block >= 64 * 64 * 4 and found[0].outside == found[1].outside


def test_demands_move_as_they_should() -> None:
    shape = shape_of("opt-125m")
    base = Workload(ranks=8, stage=2)
    peaks = {stage: sft_demand(shape, Workload(ranks=8, stage=stage)).phases["train"] for stage in range(4)}
    totals = [sum(peaks[stage].values()) for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    less = sft_demand(shape, Workload(ranks=8, stage=2, checkpointing=True)).phases["train"]["activations"]
    assert less < peaks[2]["activations"] / 3
    half = sft_demand(shape, Workload(ranks=8, stage=2, micro_batch_tokens=4096)).phases["train"]["activations"]
    assert half == pytest.approx(peaks[2]["activations"] / 2, rel=0.01)
    shared = sft_demand(shape, Workload(ranks=8, stage=2, sequence=4)).phases["train"]
    assert shared["activations"] == pytest.approx(peaks[2]["activations"] / 4, rel=0.01)
    pairs = [replace(base, micro_batch_tokens=tokens, sides=2) for tokens in (1024, 2048, 4096)]  # of 2 x 1,024
    kept = [sft_demand(shape, work).phases["train"]["activations"] for work in pairs]
    assert kept[0] == kept[1] == pytest.approx(kept[2] / 2, rel=0.01), "a pair is not cut"
    gpu, cpu = 12 * BLOCK_ELEMENTS["cuda"], 12 * BLOCK_ELEMENTS["cpu"]  # a block of logits three times
    hidden = [owners["logits"] - gpu for owners in (shared, peaks[2])]  # gradients of hidden states
    assert hidden == [4 * 8192 // 4 * 768, 4 * 8192 * 768]
    assert sft_demand(shape, replace(base, on_cpu=True)).phases["train"]["logits"] == hidden[1] + cpu
    assert shared["optimizer"] == peaks[2]["optimizer"]  # ZeRO goes over all ranks
    on_host = replace(base, on_cpu=True, offload_optimizer="cpu")  # whatever share steps there, it is all one memory
    whole, part = (sft_demand(shape, replace(on_host, offload_ratio=ratio)) for ratio in (1.0, 0.25))
    assert part.elsewhere["train"]["host"] == pytest.approx(whole.elsewhere["train"]["host"], rel=1e-6)
    four = ppo_demand(shape, shape, base)
    assert four.phases["generate"]["cache"] == (65 * 320 + 64 * 512) * 2 * 12 * 768 * 2
    assert set(four.phases["score"]) >= {"actor", "critic", "reference", "reward", "twin"}
    held = four.phases["generate"]["twin"] + four.phases["generate"]["cache"]
    freed = ppo_demand(shape, shape, replace(base, keeps=False))
    assert freed.phases["generate"] == four.phases["generate"]
    for phase in ("score", "train actor", "train critic"):
        assert sum(four.phases[phase].values()) - sum(freed.phases[phase].values()) == held
    no_reference = ppo_demand(shape, shape, base, own_reference=False)
    assert no_reference.peak < four.peak and all("reference" not in phase for phase in no_reference.phases.values())
    three = ppo_demand(shape, shape, base, has_critic=False)
    assert "train critic" not in three.phases
    gone = sum(four.phases["train actor"].values()) - sum(three.phases["train actor"].values())
    assert gone == pytest.approx(12 * shape.parameters / 8, rel=0.01)  # its master and Adam's moments, over the ranks
    by_function = ppo_demand(shape, shape, base, has_reward=False)
    assert all("reward" not in phase for phase in by_function.phases.values()) and "train critic" in by_function.phases
    gone = sum(four.phases["train actor"].values()) - sum(by_function.phases["train actor"].values())
    assert gone == four.phases["train actor"]["reward"] >= 2 * shape.parameters // 8
    away = Workload(ranks=8, stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    assert ppo_demand(shape, shape, away).host > 2 * 12 * shape.parameters // 8


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=opt-125m", "gpus=2", "max_length=128", "micro_batch_tokens=512", "critic=opt-125m"]) == 0
    told = capsys.readouterr().out
    assert "125 M parameters" in told and "zero3, shards on host" in told and "cache" in told
    tables = []
    for word in ("true", "false"):
        assert main(["model=opt-125m", f"reward_model={word}"]) == 0
        tables.append(capsys.readouterr().out.partition("This engine")[2].splitlines())
    both, by_function = ([row.split() for row in table[1:3]] for table in tables)
    assert both[0][:5] == ["states", "sft", "reward", "dpo", "ppo"]
    assert by_function[0][:4] == ["states", "sft", "dpo", "ppo"]
    sft, _, dpo, ppo = map(float, both[1][2:6])  # behind zero0 and states
    assert ppo - float(by_function[1][4]) == pytest.approx(2 * 125.2e6 / 2**30, abs=0.02)
    # A prompt of 512 tokens has keys and values twice more beside the 1,536 that two sides of 1,024 are in a row.
    assert dpo - sft == pytest.approx(8192 * 1024 / 1536 * 12 * 2 * 768 * 2 / 2**30, abs=0.01)
    assert main(["model=opt-125m", "reference=false"]) == 0
    row = capsys.readouterr().out.partition("This engine")[2].splitlines()[2].split()
    assert ppo - float(row[5]) == pytest.approx(2 * 125.2e6 / 2**30, abs=0.02)
    pieces = ["model=opt-125m", "gpus=4", "pipeline_parallel=2", "max_length=128", "micro_batch_tokens=512"]
    assert main(pieces) == 0
    told = capsys.readouterr().out
    assert "train, piece 2" in told and "8 micro-batches a step" in told and "zero2, recomputing" in told
    assert "zero3" not in told.partition("in pieces")[2]
    assert main([*pieces, "tensor_parallel=2"]) == 2 and "tensor_parallel=1" in capsys.readouterr().err
    rows = ["model=opt-125m", "gpus=4", "sequence_parallel=2", "max_length=128", "micro_batch_tokens=512"]
    assert main(rows) == 0 and "every 2 ranks share out the tokens" in capsys.readouterr().out
    assert main([*rows, "tensor_parallel=2"]) == 2 and "tensor_parallel=1" in capsys.readouterr().err
    assert main(["model=nothing"]) == 2 and "conf/model" in capsys.readouterr().err
    assert main(["gpu=2"]) == 2 and "gpus=1" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "checkpointing=false" in capsys.readouterr().out
    assert main(["nvme_path=/no/such"]) == 2 and "nvme_path=/no/such" in capsys.readouterr().err
    assert main(["model=qwen3-0.6b", "gpus=5", "tensor_parallel=5"]) == 2
    assert "heads: 16, of keys and values 8" in capsys.readouterr().err
    assert main(['model={"model_type": "llama", "hidden_size": "x"}']) == 2 and "hidden_size" in capsys.readouterr().err
    assert main(["model=opt-125m", "states=bf16", "dtype=fp32"]) == 2 and "dtype=bf16" in capsys.readouterr().err
    assert main(["model=opt-125m", "lora_rank=8"]) == 0
    first = capsys.readouterr().out.partition("This engine")[2].splitlines()[2].split()
    adapters = 8 * 12 * (4 * 2 * 768 + 2 * 5 * 768)  # beside attention's four and the two maps of each MLP
    parameters = shape_of("opt-125m").parameters
    alone = 6 * (parameters + adapters) + 12 * adapters + 2 * (parameters - 12 * shape_of("opt-125m").block)
    assert float(first[1]) == pytest.approx(alone / GIB, abs=0.01)
    assert main(["model={bad"]) == 2 and "model={bad is not JSON" in capsys.readouterr().err
    for wrong in ("gpus=0", "dtype=int4", "checkpointing=maybe"):
        with pytest.raises(ValueError, match=wrong.split("=")[0]):
            parse([wrong])


def test_a_tensor_groups_ranks_hold_their_parts() -> None:
    """Counted by hand: matrices of attention and MLP, the head and its bias-free rows are halved, norms are not."""
    config = LlamaConfig(intermediate_size=160, num_key_value_heads=2, tie_word_embeddings=False, **SMALL)
    whole, part = measured("llama", config), measured("llama", config, tensor=2)
    split = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160  # q, o; k, v; gate, up, down
    assert whole.block - part.block == split // 2
    assert whole.parameters - part.parameters == (3 * split + 64 * 64) // 2  # the head's 64 rows too
    assert (part.cache_per_token, part.vocabulary) == (whole.cache_per_token // 2, 32)
    one, two = (activations(shape, tokens=64, length=64, dtype="bf16") for shape in (whole, part))
    # Inputs of norms and products stay whole: a hidden state four times; what is inside of attention and MLP is halved.
    assert one.block / 2 < two.block < one.block
    with pytest.raises(ValueError, match="without a tensor-parallel plan"):
        measured("opt", CONFIGS["opt"], tensor=2)
    work = Workload(dtype="fp32")
    twins = [sft_demand(part, work, generates=each).phases["generate"]["twin"] for each in (whole, part)]
    assert twins == [4 * whole.parameters, 4 * part.parameters], "a rank's part is no model to generate with"
    assert sft_demand(whole, work).phases["generate"]["twin"] == 0
    by_plan, alone = shape_of("opt-125m", 2), shape_of("opt-125m")  # conf/model has one for OPT
    assert by_plan.block == pytest.approx(alone.block / 2, rel=0.01)
    kept, wanted = (sft_demand(each, Workload()).phases["train"]["activations"] for each in (by_plan, alone))
    assert wanted / 2 < kept < 0.75 * wanted


def test_bf16_states_errors_and_packs() -> None:
    shape = shape_of("opt-125m")
    lean = sft_demand(shape, Workload(ranks=1, states="bf16")).phases["train"]
    assert (lean["parameters"], lean["optimizer"]) == (2 * shape.parameters, 4 * shape.parameters)
    one_bit = sft_demand(shape, Workload(ranks=4, errors=True)).phases["train"]
    assert one_bit["optimizer"] == (8 + 4 + 1) * shape.parameters
    packed = sft_demand(shape, Workload(on_cpu=True)).phases["generate"]
    # 12 blocks of 4 D x D and 2 D x 4D, and the head.
    assert packed["packs"] == 2 * (12 * 12 * 768 * 768 + 50272 * 768)
    assert sft_demand(shape, Workload()).phases["generate"]["packs"] == 0
    assert sft_demand(shape, Workload(on_cpu=True, in_place=True)).phases["generate"]["packs"] == 0
    wide = sft_demand(shape, Workload(on_cpu=True, in_place=True, dtype="fp32")).phases["generate"]
    assert wide["packs"] == 2 * packed["packs"]
    turned = sft_demand(measured("gpt2", CONFIGS["gpt2"]), Workload(on_cpu=True, in_place=True)).phases["generate"]
    width, blocks = CONFIGS["gpt2"].n_embd, CONFIGS["gpt2"].n_layer
    assert turned["packs"] == 2 * blocks * 8 * width * width  # not the head, and attention's are too small


def test_what_a_layout_shares_out_and_keeps_beside() -> None:
    """Copies shared by every two of eight ranks, a moving average, adapters beside a frozen model: by hand."""
    shape = measured("llama", CONFIGS["llama"])
    whole = shape.parameters
    work = Workload(ranks=8, shard_ranks=2, stage=3)
    states = sft_demand(shape, work).phases["train"]
    assert (states["parameters"], states["optimizer"]) == (4 * whole // 2, 8 * whole // 2)
    ppo = ppo_demand(shape, shape, replace(work, averages=True)).phases["train actor"]
    assert ppo["actor"] - ppo["critic"] == 4 * whole // 2
    found = ppo_demand(shape, shape, replace(work, adapters=100, adapted=4000)).phases["train actor"]
    assert found["actor"] == 4 * (whole + 100) // 2 + 8 * 100 // 2 and found["critic"] == 12 * whole // 2
    lone = sft_demand(shape, Workload(ranks=8, stage=1, step_tokens=8192))  # copies go as gradients come
    train = lone.phases["train"]
    assert (train["gathered"], train["gradients"]) == (2 * whole, 4 * whole // 8)
    assert lone.height("train") == sum(train.values()) - 4 * whole // 8
    scorer = measured("llama", CONFIGS["llama"], scores=True)  # one row of 64 in the place of the head's 64
    assert whole - scorer.parameters == 63 * 64 and scorer.vocabulary == 0


def test_what_is_generated_with() -> None:
    shape = measured("llama", CONFIGS["llama"])
    number = shape.cache_per_token * 2
    each = 768 * number  # 512 and 256 tokens

    def generate(**keys: Any) -> dict[str, int]:
        return sft_demand(shape, Workload(**keys)).phases["generate"]

    in_files: dict[str, Any] = {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}
    assert generate(**in_files)["twin"] == 2 * shape.parameters
    assert generate(**in_files, on_cpu=True)["twin"] == 0, "what is in files is mapped into the host's memory"
    assert generate(dtype="fp32", adapters=100, adapted=4000)["twin"] == 4 * 4000, "merged weights are copies"
    assert generate(streams=True)["twin"] == 2 * (shape.root + 2 * shape.block)
    assert generate(on_cpu=True)["cache"] == 64 * each
    assert generate(on_cpu=True, room=0)["cache"] == 8 * each
    assert generate(on_cpu=True, room=0, rollout_batch=4)["cache"] == 4 * each
    assert generate(on_cpu=True, cache_bytes=1000)["cache"] == 1000
    half = generate(on_cpu=True, room=16 * each + 10**6)
    beside = sum(size for owner, size in half.items() if owner != "cache")
    assert half["cache"] == max(8 * each, (16 * each + 10**6 - beside) // 2)


def test_prompts_on_a_gpu_have_slots_that_their_samples_share() -> None:
    shape = measured("llama", CONFIGS["llama"])

    def tokens(**keys: Any) -> int:
        found = sft_demand(shape, Workload(**keys)).phases["generate"]
        return found["cache"] // (2 * shape.cache_per_token)

    def slots(answers: int, prompts: int) -> int:
        """Prompts of 512 tokens; answers of 256 and the prompt's last, in 64s, and one to spare."""
        return 320 * (answers + 1) + 512 * prompts

    assert tokens() == slots(64, 64)
    assert tokens(answers=256, samples=4) == slots(64, 64), "64 prompts at a time, whichever come next"
    assert tokens(answers=64, samples=4) == slots(64, 16)
    assert tokens(rollout_batch=64, answers=12) == slots(12, 12)
    assert tokens(room=0) == slots(8, 8) and tokens(room=0, rollout_batch=4) == slots(4, 4)
    assert tokens(cache_bytes=1000) == slots(1, 1), "one has to fit"
