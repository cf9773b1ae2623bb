"""Pipeline parallelism gives the losses, gradient norms and weights of one process, for several families."""

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

STEPS, VOCABULARY = 2, 96
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},  # tied, narrow embedding with two projections
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True, "use_sliding_window": True,
              "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["global", "local", "global"], 1]], "window_size": 4,
                "embed_dropout": 0.0, "resid_dropout": 0.0, "attention_dropout": 0.0},  # blocks return tuples
    "rwkv": {"attention_hidden_size": 32},  # needs its states between layers
}  # fmt: skip
SGD = OptimizerConfig(lr=2.0, name="sgd", options={"momentum": 0.9}, max_grad_norm=0.03)  # Adam would magnify rounding
ROWS = ((2, 7), (1, 13), (3, 5), (1, 2))  # micro-batches of a step: rows, tokens a row
COUNT = sum(rows * (tokens - 1) for rows, tokens in ROWS)


def build_model(family: str, *, lora: bool = False, **more: Any) -> nn.Module:
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


def make_batches(step: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCABULARY, shape, generator=random) for shape in ROWS]


def make_engine(
    family: str, *, lora: bool = False, generates: bool = False, num_hidden_layers: int = 3, **layout: Any
) -> Engine:
    config = EngineConfig(**({"dtype": "fp32"} | layout))
    model = build_model(family, lora=lora, num_hidden_layers=num_hidden_layers)
    return initialize(model, config, optimizer=SGD, rollout_path="" if generates else None)


def take_step(engine: Engine, step: int) -> tuple[float, float]:
    """Run one update over this rank's share of a step. Return loss and gradient norm."""
    world = dist.world()
    update = engine.update(make_batches(step)[world.data_rank :: world.data_size], loss_of, COUNT)
    assert update.sums["tokens"] == COUNT
    return update.loss, update.grad_norm


def full_weights(engine: Engine) -> dict[str, Tensor]:
    """Return the parameters of the full model on every rank."""
    return {name: full.clone() for name, full in engine.full_parameters()}


def train(family: str, **layout: Any) -> dict[str, Any]:
    engine = make_engine(family, **layout)
    curve = [take_step(engine, step) for step in range(STEPS)]
    scored = engine.score(make_batches(STEPS), lambda module, ids: [loss_of(module, ids)[0].item()])
    with engine.scoring():
        logits = engine(input_ids=make_batches(STEPS)[0], use_cache=False).logits
    held = {name: dtensors.local(p.detach()).numel() for name, p in engine.module.named_parameters()}
    nowhere = [b for b in engine.module.buffers() if b.is_floating_point() and b.isnan().any()]
    assert all(b.untyped_storage().nbytes() == b.itemsize for b in nowhere), "a parameter of another rank takes memory"
    return {"curve": curve, "weights": full_weights(engine), "scored": scored, "logits": logits, "held": held}


def assert_equal_runs(actual: dict[str, Any], reference: dict[str, Any]) -> None:
    for (loss, norm), (its_loss, its_norm) in zip(actual["curve"], reference["curve"], strict=True):
        assert loss == pytest.approx(its_loss, rel=1e-5)
        assert norm == pytest.approx(its_norm, rel=1e-5)
    assert actual["curve"][0][1] > SGD.max_grad_norm, "nothing was clipped"
    torch.testing.assert_close(torch.tensor(actual["scored"]), torch.tensor(reference["scored"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(actual["logits"], reference["logits"], rtol=1e-4, atol=1e-5)
    assert actual["weights"].keys() == reference["weights"].keys()
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: n + m)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("opt", {}),
    ("llama", {"zero_stage": 2}),
    ("qwen3", {"activation_checkpointing": True}),
    ("gpt_neo", {"zero_stage": 1}),
    ("llama", {"lora": True}),
]


def train_cases(pipeline_parallel: int, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [train(family, pipeline_parallel=pipeline_parallel, **layout) for family, layout in cases]


def test_two_stages_train_like_one_rank() -> None:
    expected = train_cases(1, CASES)
    ranks = run_ranks(train_cases, 2, 2, CASES)
    for result in ranks:
        for (family, _), actual, reference in zip(CASES, result, expected, strict=True):
            assert_equal_runs(actual, reference)
            assert sum(actual["held"].values()) < 0.8 * sum(reference["held"].values()), family
    both = [set(result[0]["held"]) for result in ranks]
    assert both[0] | both[1] == set(expected[0]["held"])
    assert both[0] & both[1] == {"model.decoder.embed_tokens.weight"}, "OPT's tied embedding must be on both ranks"


ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.1)
FOUR = [("qwen3", {"zero_stage": 2})]


def averaged_engine(**layout: Any) -> Engine:
    engine = initialize(build_model("opt", num_hidden_layers=2), EngineConfig(dtype="fp32", **layout), optimizer=ADAM)
    engine.start_averaging(0.5)
    return engine


def weights_and_averages(engine: Engine) -> list[dict[str, Tensor]]:
    """Return the last weights and their averages."""
    results = [full_weights(engine)]
    with engine.averaged():
        return [*results, full_weights(engine)]


def run_on_four_ranks(folder: Path) -> dict[str, Any]:
    """Train two stages on two shares of the data, exchange checkpoints with one rank, then train four stages."""
    results: dict[str, Any] = {"cases": train_cases(2, FOUR)}
    layout: dict[str, Any] = {"pipeline_parallel": 2, "zero_stage": 1}
    engine = averaged_engine(**layout)
    take_step(engine, 0)
    engine.save(folder / "four")
    take_step(engine, 1)
    again = averaged_engine(**layout)
    again.load(folder / "four")
    take_step(again, 1)
    results["undisturbed"], results["resumed"] = weights_and_averages(engine), weights_and_averages(again)
    other = averaged_engine(**layout)
    other.load(folder / "one")
    results["loaded"] = weights_and_averages(other)
    deeper = make_engine("opt", **layout)  # the first rank's two blocks are in the other checkpoint too
    deeper.save(folder / "deeper")
    for one, saved in ((deeper, "one"), (other, "deeper")):
        with pytest.raises(ValueError, match=r"parameter.model.decoder.layers.2\..* absent"):
            one.load(folder / saved)
    results["four stages"] = train("opt", num_hidden_layers=4, pipeline_parallel=4)
    return results


def test_four_ranks_combine_stages_with_zero_and_exchange_checkpoints(tmp_path: Path) -> None:
    expected = {"cases": train_cases(1, FOUR), "four stages": train("opt", num_hidden_layers=4)}
    engine = averaged_engine()
    take_step(engine, 0)
    engine.save(tmp_path / "one")
    for result in run_ranks(run_on_four_ranks, 4, tmp_path):
        for actual, reference in zip(result["cases"], expected["cases"], strict=True):
            assert_equal_runs(actual, reference)
        assert_equal_runs(result["four stages"], expected["four stages"])
        for resumed, undisturbed in zip(result["resumed"], result["undisturbed"], strict=True):
            assert all(torch.equal(resumed[name], weight) for name, weight in undisturbed.items())
        for loaded, written in zip(result["loaded"], weights_and_averages(engine), strict=True):
            assert all(torch.equal(loaded[name], weight) for name, weight in written.items())
    back = averaged_engine()
    back.load(tmp_path / "four")
    take_step(back, 1)
    for actual, reference in zip(weights_and_averages(back), result["undisturbed"], strict=True):
        for name, weight in reference.items():
            torch.testing.assert_close(actual[name], weight, atol=2e-5, rtol=1e-4)
            assert not torch.equal(weight, weights_and_averages(engine)[0][name]), f"{name} has not moved"


def generate(engine: Engine) -> list[tuple[int, ...]]:
    how = Sampling(max_new_tokens=6, end_ids=(), seed=3)
    with engine.generating(keep=False) as rollouts:
        return [tuple(each.token_ids) for each in rollouts.generate([[5, 6, 7], [8, 9]], how, [0, 1])]


def run_one_micro_batch(pipeline_parallel: int) -> dict[str, Any]:
    """Train with fewer micro-batches than stages, generate, and train in bf16."""
    torch.set_num_threads(1)
    engine = make_engine("qwen3", generates=True, pipeline_parallel=pipeline_parallel)
    update = engine.update([torch.tensor([[3, 4, 5], [6, 7, 8], [9, 10, 11]])], loss_of, 6)
    engine.dry_run(torch.tensor([[3, 4, 5], [6, 7, 8]]), loss_of)
    results = {"update": (update.loss, update.grad_norm), "answers": generate(engine), "weights": full_weights(engine)}
    streamed = make_engine("qwen3", generates=True, pipeline_parallel=pipeline_parallel)
    streamed.flip.stream = True
    results["streamed"] = generate(streamed)
    half = make_engine("opt", dtype="bf16", pipeline_parallel=pipeline_parallel)
    return results | {"bf16": [take_step(half, step) for step in range(STEPS)]}


def test_fewer_micro_batches_than_ranks() -> None:
    expected = run_one_micro_batch(1)
    for result in run_ranks(run_one_micro_batch, 2, 2):
        assert result["update"] == pytest.approx(expected["update"], rel=1e-5)
        assert result["answers"] == expected["answers"]
        assert result["streamed"] == expected["streamed"]
        torch.testing.assert_close(result["weights"], expected["weights"], atol=1e-5, rtol=1e-5)
        for actual, reference in zip(result["bf16"], expected["bf16"], strict=True):
            assert actual == pytest.approx(reference, rel=2e-2)


def collect_refusals() -> list[str]:
    """Return the message of each refusal."""
    messages = []
    parts: list[tuple[Any, dict[str, Any]]] = [
        (lambda: nn.Linear(4, 4), {}),
        (lambda: nn.Sequential(build_model("llama"), build_model("llama")), {}),
        (lambda: build_model("llama", num_hidden_layers=1), {}),
        (lambda: build_model("rwkv"), {}),
        (lambda: build_model("llama"), {"pipeline_parallel": 3}),
        (lambda: build_model("llama"), {"zero_stage": 3, "offload_optimizer": "cpu"}),
        (lambda: build_model("llama"), {"tensor_parallel": 2}),
    ]
    for make, layout in parts:
        with pytest.raises(ValueError) as problem:
            initialize(make(), EngineConfig(**({"dtype": "fp32", "pipeline_parallel": 2} | layout)), optimizer=SGD)
        messages.append(str(problem.value))
    engine = make_engine("llama", pipeline_parallel=2)
    for wrong in (
        lambda: engine(input_ids=make_batches(0)[0]),
        lambda: engine.backward(torch.zeros(())),
        lambda: engine.update([{"no": "ids"}] * 2, loss_of, 1),
        lambda: engine.update([object()] * 2, loss_of, 1),
        lambda: engine.score_to_learn(make_batches(0), lambda module, ids: [loss_of(module, ids)[0]]),
    ):
        with pytest.raises(ValueError) as problem:
            wrong()
        messages.append(str(problem.value))
    return messages


def test_unsupported_models_and_settings_are_refused() -> None:
    reference = (
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
        "a module that is called outside of Engine.update supports no gradients",
    )
    for actual in run_ranks(collect_refusals, 2):
        for message, part in zip(actual, reference, strict=True):
            assert part in message
