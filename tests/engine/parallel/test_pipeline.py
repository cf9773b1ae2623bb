"""Pipeline parallelism is a layout: losses, gradient norms and weights are those of one process, for any model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine import Engine, EngineConfig, OptimizerConfig, Sampling, initialize
from engine.parallel import dist, dtensors
from tests.ranks import run_ranks

STEPS, VOCABULARY = 3, 96
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},  # tied, narrow embedding with two projections
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True, "use_sliding_window": True,
              "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "gpt2": {"n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]], "window_size": 4,
                "embed_dropout": 0.0, "resid_dropout": 0.0, "attention_dropout": 0.0},  # blocks return tuples
    "rwkv": {"attention_hidden_size": 32},  # and states, which it needs
}  # fmt: skip
SGD = OptimizerConfig(lr=2.0, name="sgd", options={"momentum": 0.9}, max_grad_norm=0.03)  # Adam would magnify rounding
ROWS = ((2, 7), (1, 13), (3, 5), (1, 2))  # micro-batches of a step: rows, tokens a row
COUNT = sum(rows * (tokens - 1) for rows, tokens in ROWS)


def made(family: str, *, lora: bool = False, **more: Any) -> nn.Module:
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "num_attention_heads": 4}
    shape |= {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **(shape | FAMILIES[family] | more))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    if lora:
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]), model)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def loss_of(module: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
    logits = module(input_ids=ids, use_cache=False).logits[:, :-1].float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return loss, {"tokens": float(ids[:, 1:].numel()), "largest": logits.detach().max()}


def batches(step: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCABULARY, shape, generator=random) for shape in ROWS]


def engine_of(
    family: str, *, lora: bool = False, generates: bool = False, num_hidden_layers: int = 3, **layout: Any
) -> Engine:
    config = EngineConfig(**({"dtype": "fp32"} | layout))
    model = made(family, lora=lora, num_hidden_layers=num_hidden_layers)
    return initialize(model, config, optimizer=SGD, rollout_path="" if generates else None)


def advance(engine: Engine, step: int) -> tuple[float, float]:
    """One update over this rank's share of a step; its loss and gradient norm."""
    world = dist.world()
    update = engine.update(batches(step)[world.data_rank :: world.data_size], loss_of, COUNT)
    assert update.sums["tokens"] == COUNT
    return update.loss, update.grad_norm


def weights(engine: Engine) -> dict[str, Tensor]:
    """Of the whole model, on every rank."""
    return {name: whole.clone() for name, whole in engine.full_parameters()}


def trained(family: str, **layout: Any) -> dict[str, Any]:
    engine = engine_of(family, **layout)
    curve = [advance(engine, step) for step in range(STEPS)]
    scored = engine.score(batches(STEPS), lambda module, ids: [loss_of(module, ids)[0].item()])
    with engine.scoring():
        logits = engine(input_ids=batches(STEPS)[0], use_cache=False).logits
    held = {name: dtensors.local(p.detach()).numel() for name, p in engine.module.named_parameters()}
    nowhere = [b for b in engine.module.buffers() if b.is_floating_point() and b.isnan().any()]
    assert all(b.untyped_storage().nbytes() == b.itemsize for b in nowhere), "another rank's parameter has memory here"
    return {"curve": curve, "weights": weights(engine), "scored": scored, "logits": logits, "held": held}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for (loss, norm), (its_loss, its_norm) in zip(found["curve"], wanted["curve"], strict=True):
        assert loss == pytest.approx(its_loss, rel=1e-5)
        assert norm == pytest.approx(its_norm, rel=1e-5)
    assert found["curve"][0][1] > SGD.max_grad_norm, "nothing was clipped"
    torch.testing.assert_close(torch.tensor(found["scored"]), torch.tensor(wanted["scored"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["logits"], wanted["logits"], rtol=1e-4, atol=1e-5)
    assert found["weights"].keys() == wanted["weights"].keys()
    for name, weight in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: n + m)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("opt", {}),
    ("llama", {"pipeline_schedule": "gpipe", "zero_stage": 2}),
    ("qwen3", {"activation_checkpointing": True}),
    ("gpt2", {"zero_stage": 1}),
    ("gpt_neo", {}),
    ("llama", {"lora": True}),
]


def all_cases(pipeline_parallel: int, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [trained(family, pipeline_parallel=pipeline_parallel, **layout) for family, layout in cases]


def test_two_ranks_hold_one_model_between_them() -> None:
    alone = all_cases(1, CASES)
    ranks = run_ranks(all_cases, 2, 2, CASES)
    for found in ranks:
        for (family, _), mine, wanted in zip(CASES, found, alone, strict=True):
            same(mine, wanted)
            assert sum(mine["held"].values()) < 0.8 * sum(wanted["held"].values()), family
    both = [set(found[0]["held"]) for found in ranks]
    assert both[0] | both[1] == set(alone[0]["held"])
    assert both[0] & both[1] == {"model.decoder.embed_tokens.weight"}, "OPT's head is its embedding"


ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.1)
FOUR = [("qwen3", {"zero_stage": 1}), ("opt", {"zero_stage": 2})]


def averaging(**layout: Any) -> Engine:
    engine = initialize(made("opt", num_hidden_layers=4), EngineConfig(dtype="fp32", **layout), optimizer=ADAM)
    engine.start_averaging(0.5)
    return engine


def both_weights(engine: Engine) -> list[dict[str, Tensor]]:
    """The last ones, and their average."""
    found = [weights(engine)]
    with engine.averaged():
        return [*found, weights(engine)]


def four(folder: Path) -> dict[str, Any]:
    """Two pieces over two shares of the data; checkpoints there and back; then one piece a rank."""
    found: dict[str, Any] = {"cases": all_cases(2, FOUR)}
    layout: dict[str, Any] = {"pipeline_parallel": 2, "zero_stage": 1}
    engine = averaging(**layout)
    for step in range(2):
        advance(engine, step)
    engine.save(folder / "four")
    advance(engine, 2)
    again = averaging(**layout)
    again.load(folder / "four")
    advance(again, 2)
    found["left alone"], found["resumed"] = both_weights(engine), both_weights(again)
    other = averaging(**layout)
    other.load(folder / "one")
    found["loaded"] = both_weights(other)
    found["four pieces"] = trained("opt", num_hidden_layers=4, pipeline_parallel=4)
    return found


def test_four_ranks_compose_it_with_zero_and_share_checkpoints_with_one(tmp_path: Path) -> None:
    alone = {"cases": all_cases(1, FOUR), "four pieces": trained("opt", num_hidden_layers=4)}
    engine = averaging()
    for step in range(2):
        advance(engine, step)
    engine.save(tmp_path / "one")
    for found in run_ranks(four, 4, tmp_path):
        for mine, wanted in zip(found["cases"], alone["cases"], strict=True):
            same(mine, wanted)
        same(found["four pieces"], alone["four pieces"])
        for resumed, left_alone in zip(found["resumed"], found["left alone"], strict=True):
            assert all(torch.equal(resumed[name], weight) for name, weight in left_alone.items())
        for loaded, written in zip(found["loaded"], both_weights(engine), strict=True):
            assert all(torch.equal(loaded[name], weight) for name, weight in written.items())
    back = averaging()
    back.load(tmp_path / "four")
    advance(back, 2)
    for mine, wanted in zip(both_weights(back), found["left alone"], strict=True):
        for name, weight in wanted.items():
            torch.testing.assert_close(mine[name], weight, atol=2e-5, rtol=1e-4)
            assert not torch.equal(weight, both_weights(engine)[0][name]), f"{name} has not moved"


def answers(engine: Engine) -> list[tuple[int, ...]]:
    how = Sampling(max_new_tokens=6, end_ids=(), pad_id=0, seed=3)
    with engine.generating(keep=False) as rollouts:
        return [tuple(each.token_ids) for each in rollouts.generate([[5, 6, 7], [8, 9]], how, [0, 1])]


def one_micro_batch(pipeline_parallel: int) -> dict[str, Any]:
    """Fewer micro-batches than ranks, in bf16, and what the model says then."""
    torch.set_num_threads(1)
    engine = engine_of("qwen3", generates=True, pipeline_parallel=pipeline_parallel)
    update = engine.update([torch.tensor([[3, 4, 5], [6, 7, 8], [9, 10, 11]])], loss_of, 6)
    engine.dry_run(torch.tensor([[3, 4, 5], [6, 7, 8]]), loss_of)
    found = {"update": (update.loss, update.grad_norm), "answers": answers(engine), "weights": weights(engine)}
    streamed = engine_of("qwen3", generates=True, pipeline_parallel=pipeline_parallel)
    streamed.flip.stream = True
    found["streamed"] = answers(streamed)
    half = engine_of("opt", dtype="bf16", pipeline_parallel=pipeline_parallel)
    return found | {"bf16": [advance(half, step) for step in range(STEPS)]}


def test_fewer_micro_batches_than_ranks() -> None:
    alone = one_micro_batch(1)
    for found in run_ranks(one_micro_batch, 2, 2):
        assert found["update"] == pytest.approx(alone["update"], rel=1e-5)
        assert found["answers"] == alone["answers"]
        assert found["streamed"] == alone["streamed"]
        torch.testing.assert_close(found["weights"], alone["weights"], atol=1e-5, rtol=1e-5)
        for mine, wanted in zip(found["bf16"], alone["bf16"], strict=True):
            assert mine == pytest.approx(wanted, rel=2e-2)


def refused() -> list[str]:
    """The messages of two ranks."""
    messages = []
    parts: list[tuple[Any, dict[str, Any]]] = [
        (lambda: nn.Linear(4, 4), {}),
        (lambda: nn.Sequential(made("llama"), made("llama")), {}),
        (lambda: made("llama", num_hidden_layers=1), {}),
        (lambda: made("rwkv"), {}),
        (lambda: made("llama"), {"pipeline_parallel": 3}),
        (lambda: made("llama"), {"zero_stage": 3, "offload_optimizer": "cpu"}),
        (lambda: made("llama"), {"tensor_parallel": 2}),
    ]
    for make, layout in parts:
        with pytest.raises(ValueError) as problem:
            initialize(make(), EngineConfig(**({"dtype": "fp32", "pipeline_parallel": 2} | layout)), optimizer=SGD)
        messages.append(str(problem.value))
    engine = engine_of("llama", pipeline_parallel=2)
    for wrong in (
        lambda: engine(input_ids=batches(0)[0]),
        lambda: engine.backward(torch.zeros(())),
        lambda: engine.update([{"no": "ids"}] * 2, loss_of, 1),
        lambda: engine.update([object()] * 2, loss_of, 1),
    ):
        with pytest.raises(ValueError) as problem:
            wrong()
        messages.append(str(problem.value))
    return messages


def test_what_cannot_be_is_refused_and_says_why() -> None:
    wanted = (
        "Linear has 0. Use zero_stage=3",
        "Sequential has 2",
        "more than the 1 blocks of the model",
        "RwkvModel needs more from its blocks (not enough values to unpack (expected 3, got 1)). Use zero_stage=3",
        "pipeline_parallel=3 does not divide the 2 ranks",
        "zero_stage=0, 1 or 2, offload_optimizer=none",
        "tensor_parallel=1",
        "a module that is called outside of Engine.update supports no gradients",
        "Call update",
        "input_ids",
        "input_ids",
    )
    for found in run_ranks(refused, 2):
        for message, part in zip(found, wanted, strict=True):
            assert part in message
