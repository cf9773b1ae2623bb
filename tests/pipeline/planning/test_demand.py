"""Predicted bytes and seconds of stages against sums by hand."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig, OPTConfig

from engine import EngineConfig
from engine.kernels.token_logprobs import BLOCK_ELEMENTS
from engine.memory import GenerationLoad, ModelShape, Rates, Workload, measure_shape, phases
from pipeline.planning.demand import Demand, predict_bytes, predict_seconds, stage_seconds
from pipeline.planning.stage_task import StageModel, StageTask

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = LlamaConfig(intermediate_size=160, num_key_value_heads=2, max_position_embeddings=80, **SMALL)
OPT_125M = OPTConfig(
    vocab_size=50272, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, ffn_dim=3072,
    word_embed_proj_dim=768,
)  # fmt: skip
ALL_SLOTS = (65 * 256 + 64 * 512) * 2  # bytes of the numbers: answers of 256 tokens, one slot to spare


@pytest.fixture(scope="module")
def opt() -> ModelShape:
    return measure_shape("opt-125m", OPT_125M)


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return measure_shape("llama", LLAMA)


def work(ranks: int = 8, **keys: Any) -> Workload:
    """Return a workload with these fields of the workload or of its engine."""
    own = {key: keys.pop(key) for key in list(keys) if key in Workload.__dataclass_fields__}
    return Workload(EngineConfig(**{"zero_stage": 2, **keys}), ranks, **own)


def sft(shape: ModelShape, layout: Workload, **load: Any) -> Demand:
    return predict_bytes(StageTask("sft", {"policy": StageModel(shape, layout)}, GenerationLoad(**load)))


def ppo_models(actor: ModelShape, scorer: ModelShape, layout: Workload) -> dict[str, StageModel]:
    """Return the models of PPO. The critic and the reward model train no adapters."""
    plain = replace(layout, adapters=0, has_average=False)
    return {
        "actor": StageModel(actor, layout),
        "critic": StageModel(scorer, plain),
        "reference": StageModel(actor, layout, "shared" if layout.adapters else "frozen"),
        "reward": StageModel(scorer, plain, "frozen"),
    }


def ppo(shape: ModelShape, layout: Workload, **load: Any) -> Demand:
    models = ppo_models(shape, replace(shape, vocabulary=0), layout)
    return predict_bytes(StageTask("ppo", models, GenerationLoad(**load)))


def test_bytes_by_layout(opt: ModelShape) -> None:
    train = {stage: sft(opt, work(zero_stage=stage)).phases["train"] for stage in range(4)}
    totals = [sum(train[stage].values()) for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    less = sft(opt, work(activation_checkpointing=True)).phases["train"]["activations"]
    assert less < train[2]["activations"] / 3
    half = sft(opt, work(micro_batch_tokens=4096)).phases["train"]["activations"]
    assert half == pytest.approx(train[2]["activations"] / 2, rel=0.01)
    shared = sft(opt, work(sequence_parallel=4)).phases["train"]
    assert shared["activations"] == pytest.approx(train[2]["activations"] / 4, rel=0.01)
    assert shared["optimizer"] == train[2]["optimizer"]  # ZeRO shards over all ranks


def test_logits(opt: ModelShape) -> None:
    gpu, cpu = 12 * BLOCK_ELEMENTS["cuda"], 12 * BLOCK_ELEMENTS["cpu"]  # a block of logits three times
    hidden = 4 * 8192 * 768  # gradients of hidden states
    assert sft(opt, work()).phases["train"]["logits"] == hidden + gpu
    assert sft(opt, work(sequence_parallel=4)).phases["train"]["logits"] == hidden / 4 + gpu
    assert sft(opt, work(is_cpu=True)).phases["train"]["logits"] == hidden + cpu


def test_ppo_holds_four_models_and_the_generator(opt: ModelShape) -> None:
    four = ppo(opt, work())
    assert four.phases["generate"]["cache"] == ALL_SLOTS * 2 * 12 * 768
    assert set(four.phases["score"]) >= {"actor", "critic", "reference", "reward", "inference_model"}
    held = sum(four.phases["generate"][owner] for owner in ("inference_model", "cache"))
    freed = ppo(opt, work(), keep=False)
    assert freed.phases["generate"] == four.phases["generate"]
    for phase in ("score", "train actor", "train critic"):
        assert sum(four.phases[phase].values()) - sum(freed.phases[phase].values()) == held
    offloaded = work(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu")
    assert ppo(opt, offloaded).host > 2 * 12 * opt.parameters // 8
    parked = ppo(opt, work(), park_optimizer=True)
    moments = 8 * opt.parameters // 8
    assert four.phases["generate"]["actor"] - parked.phases["generate"]["actor"] == parked.host == moments


def test_prepacked_linears(opt: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepacked(shape: ModelShape, **keys: Any) -> int:
        return sft(shape, work(**keys)).phases["generate"]["prepacked_linears"]

    monkeypatch.setattr(phases, "copies_weights", lambda dtype: True)
    # 12 blocks of 4 D x D and 2 D x 4D, and the head.
    every = 12 * 12 * 768 * 768 + 50272 * 768
    assert prepacked(opt, is_cpu=True) == 2 * every and prepacked(opt) == 0
    assert prepacked(opt, is_cpu=True, dtype="fp32") == 4 * every
    monkeypatch.setattr(phases, "copies_weights", lambda dtype: False)
    assert prepacked(opt, is_cpu=True) == 0


def test_shards_average_and_adapters(llama: ModelShape) -> None:
    full = llama.parameters
    layout = work(shard_ranks=2, zero_stage=3)  # copies shared by every two of eight ranks
    states = sft(llama, layout).phases["train"]
    assert (states["parameters"], states["optimizer"]) == (4 * full // 2, 8 * full // 2)
    average = ppo(llama, replace(layout, has_average=True)).phases["train actor"]
    assert average["actor"] - average["critic"] == 4 * full // 2
    adapters = ppo(llama, replace(layout, adapters=100)).phases["train actor"]
    assert adapters["actor"] == (2 * full + 12 * 100) // 2 and adapters["critic"] == 12 * full // 2
    assert "reference" not in adapters, "the reference is the actor under its adapters"
    one = sft(llama, work(zero_stage=1, step_tokens=8192))  # copies are freed as gradients come
    train = one.phases["train"]
    assert (train["gathered"], train["gradients"]) == (2 * full, 4 * full // 8)
    assert train["overlap"] == -4 * full // 8 and one.device_bytes("train") == sum(train.values())


def test_weights_for_generation(llama: ModelShape) -> None:
    def weights(layout: Workload, **load: Any) -> int:
        return sft(llama, layout, **load).phases["generate"]["inference_model"]

    in_files: dict[str, Any] = {"zero_stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"}
    assert weights(work(1, **in_files)) == 2 * llama.parameters
    assert weights(work(1, **in_files, is_cpu=True)) == 0, "files are mapped into the host's memory"
    merged = sum(layer.parameters for layer in llama.linears if not layer.is_head)
    assert 0 < merged < llama.parameters
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        assert weights(work(1, dtype=dtype, adapters=100)) == size * merged, "merged weights are copies"
    assert weights(work(2, adapters=100)) == 2 * llama.parameters
    assert weights(work(1), stream=True) == 2 * (llama.root + 2 * llama.block)
    assert weights(work(1, dtype="fp32")) == 0
    half = measure_shape("llama", LLAMA, tensor=2)
    for generates in (llama, half):
        layout = work(1, dtype="fp32", tensor_parallel=2)
        task = StageTask("sft", {"policy": StageModel(half, layout)}, generates=generates)
        assert predict_bytes(task).phases["generate"]["inference_model"] == 4 * generates.parameters


def test_cache(llama: ModelShape) -> None:
    number = 2 * llama.cache_per_token

    def tokens(free_bytes: int | None = None, **load: Any) -> int:
        task = StageTask("sft", {"policy": StageModel(llama, work(1))}, GenerationLoad(**load))
        return predict_bytes(task, free_bytes=free_bytes).phases["generate"]["cache"] // number

    def slots(answers: int, prompts: int) -> int:
        """Return the bytes of prompts of 512 tokens and answers of 256 tokens, with one spare slot."""
        return 256 * (answers + 1) + 512 * prompts

    assert tokens() == slots(64, 64)
    assert tokens(sequences=256, samples=4) == slots(64, 64), "64 prompts at a time, whichever come next"
    assert tokens(sequences=64, samples=4) == slots(64, 16)
    assert tokens(sequences=12, slots=12) == slots(12, 12)
    assert tokens(free_bytes=0) == slots(8, 8) and tokens(free_bytes=0, slots=4) == slots(4, 4)
    assert tokens(cache_bytes=1000) == slots(1, 1), "one has to fit"
    assert slots(8, 8) <= tokens(free_bytes=40 * 768 * number + 10**6) <= 20 * 768


def test_vllm_has_weights_and_pages_of_its_own(llama: ModelShape) -> None:
    full = 2 * llama.parameters

    def stage(layout: Workload, **load: Any) -> Demand:
        return sft(llama, layout, uses_vllm=True, slots=256, **load)

    gpu = stage(work(2, zero_stage=3))
    owners = gpu.phases["generate"]
    assert owners["weight_sync"] == owners["inference_model"] == full, "the gathered copy, and vLLM's own weights"
    assert "cache" not in gpu.phases["train"]
    assert owners["cache"] == 256 * (512 + 256) * 2 * llama.cache_per_token
    assert stage(work(2), cache_bytes=12345).phases["generate"]["cache"] == 12345
    assert stage(work(1, dtype="fp32")).phases["generate"]["weight_sync"] == 0, "vLLM copies the trained weights"
    cpu = stage(work(2, is_cpu=True))
    for owner in ("inference_model", "cache"):  # on a CPU, vLLM cannot free them
        assert cpu.phases["train"][owner] == cpu.phases["generate"][owner]


def test_seconds_by_hand(llama: ModelShape) -> None:
    rates = Rates(
        forward=1e-9, backward=2e-9, decode=1e-7, head=1e-4, adam=1e-9, host_adam=4e-9, all_reduce=1e-9,
    )  # fmt: skip
    layout = work(
        2,
        zero_stage=1,
        dtype="fp32",
        activation_checkpointing=True,
        max_length=100,
        micro_batch_tokens=200,
        is_cpu=True,
    )
    scorer = measure_shape("llama", LLAMA, scores=True)
    models = ppo_models(llama, scorer, layout)
    task = StageTask("ppo", models, GenerationLoad(response=10, slots=2), sequences=8, passes=2)
    blocks = 3 * llama.block
    forward = 400 * blocks * 1e-9
    head = 1e-4 * 40  # of the responses' tokens
    train = 4 * forward  # recomputing is a second forward
    sent = [4 * shape.parameters * 1e-9 for shape in (llama, scorer)]
    cached = 2 * 4 * llama.cache_per_token * 1e-9 / 28  # both sequences' keys and values of a token in fp32
    wanted = {
        "generate": 2 * 10 * (blocks * 1e-7 + 2 * 1e-4 / 3 + 95 * cached) + 0.9 * forward,
        "score": 4 * forward + 2 * head / 3,
        "train": 2 * (2 * train + head + sum(sent)),
        "step": 2 * (llama.parameters + scorer.parameters) / 2 * 1e-9,
    }
    assert predict_seconds(task, rates) == pytest.approx(wanted)
    shared = predict_seconds(task, rates, shares_forward=True)
    assert shared["score"] == pytest.approx(2 * forward + head / 3)
    short = replace(task, tokens=50.0, response=5.0, steps=3, answered=6, scored=8)
    seconds = predict_seconds(short, rates)
    assert seconds["generate"] == pytest.approx(
        2 * 5 * (blocks * 1e-7 + 2 * 1e-4 / 3 + 47.5 * cached) + 0.9 * forward / 2
    )
    assert seconds["train"] == pytest.approx(2 * (2 * train / 2 + head / 2 + sum(sent)))
    answers = 6 / 2 / 2 * 10 * (blocks * 1e-7 + 2 * 1e-4 / 3)  # of the largest length
    scores = 8 / 2 * 50 * (blocks * 1e-9 + 1e-4 / 3)
    total = stage_seconds(short, rates, seconds)
    assert total == pytest.approx(3 * sum(seconds.values()) + answers + scores)
