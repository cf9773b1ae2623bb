"""Models that the slot cache does not support use transformers' `generate` in the first batching mode that is exact.

Each mode is compared with full forwards of the model.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.generation.decode_step import SlotModel
from engine.generation.generator import Generator
from engine.generation.sampling import Sampling
from engine.generation.transformers_fallback import TransformersFallback
from tests.engine.generation.families import ENDS, POSITIONS, VOCABULARY, build, greedy_by_definition, ragged_prompts

PROMPTS = ragged_prompts(3, 11, 1, 11, 14)
STREAMS = list(range(len(PROMPTS)))
GREEDY = Sampling(12, temperature=0, end_ids=ENDS)
_MODERN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_GROUPED: dict[str, Any] = _MODERN | {"num_key_value_heads": 2, "head_dim": 8}
_BART: dict[str, Any] = {
    "d_model": 32,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": POSITIONS,
    "is_encoder_decoder": False,
    "is_decoder": True,
}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("slots", _GROUPED | {"no_rope_layers": [1, 0]}),
    "cohere2": ("slots", _GROUPED | {"sliding_window": 6, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "modernbert-decoder": ("slots", _MODERN | {"local_attention": 6, "global_attn_every_n_layers": 2}),
    "gemma4": (  # its forward needs the padding token of its text configuration
        "slots",
        {
            "text_config": _GROUPED
            | {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
            | {"global_head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": _GROUPED,
        },
    ),
    "gpt_oss": ("padded", _GROUPED | {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "lfm2": ("padded", _GROUPED | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "diffllama": ("padded", _GROUPED),  # its attention calls the registered function twice a layer
    "bart": ("same length", _BART),  # takes no position ids
    "mamba": ("padded", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "qwen3_next": (  # its linear attention has a state instead of keys and values
        "padded",
        _GROUPED
        | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "roberta": ("no cache", _MODERN | {"is_decoder": True}),  # computes positions from the tokens that are not padding
    "rwkv": (
        "no cache",
        {"hidden_size": 32, "num_hidden_layers": 2, "context_length": POSITIONS},
    ),  # its state is for one row
    "openai-gpt": ("padded", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}),  # has no cache
}


def model_of(family: str, **changes: Any) -> nn.Module:
    fields = MODES[family][1] | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model.eval()


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("engine.generation.generator._warned", set())
    yield


@pytest.mark.parametrize("family", MODES)
def test_every_family_generates_as_its_plain_forward(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(family)
    rollouts = Generator(model, "cpu")
    assert rollouts.mode == MODES[family][0]
    warned = [record.getMessage() for record in caplog.records if record.name == "engine.generation.generator"]
    assert len(warned) == (rollouts.mode != "slots") and all("slowly" in message for message in warned)
    for sampling in (GREEDY, Sampling(9, temperature=0.8, seed=3)):
        answers = rollouts.generate(PROMPTS, sampling, STREAMS, batch_size=3)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer.token_ids]), use_cache=False).logits
            logits = logits[0, len(prompt) - 1 : -1].double() / (sampling.temperature or 1)
            expected = logits.log_softmax(-1)[range(len(answer.token_ids)), answer.token_ids]
            assert answer.logprobs == pytest.approx(expected.tolist(), abs=2e-4)
            if sampling is GREEDY:
                assert (
                    answer.token_ids == greedy_by_definition(model, prompt, answer.token_ids, GREEDY.max_new_tokens)[0]
                )
    assert len({tuple(answer.token_ids) for answer in answers}) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_positions_are_detected_in_any_precision(dtype: torch.dtype) -> None:
    """In bf16, wrong positions may change logits less than rounding does, so the check compares in fp32 too."""
    model = model_of("roberta")
    with torch.no_grad():
        model.get_parameter("roberta.embeddings.position_embeddings.weight").mul_(0.05)
    rollouts = Generator(model.to(dtype), "cpu")
    assert rollouts.mode != "padded" and rollouts.fallback == "its own positions do not count from 0"


def test_positions_reserved_for_padding_are_not_used() -> None:
    rollouts = Generator(model_of("roberta"), "cpu")  # 64 positions, of which the first 3 are for padding
    assert len(rollouts.generate([[13] * 57], Sampling(4), [0])[0].token_ids) == 4
    with pytest.raises(ValueError, match="58 tokens and max_new_tokens=4 do not fit into the 61 positions"):
        rollouts.generate([[13] * 58], Sampling(4), [0])


def test_generation_stops_at_a_length_that_changes_all_positions() -> None:
    """LongRoPE chooses its frequencies by the longest sequence of a forward."""
    torch.manual_seed(0)
    sides = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 24}
    fields = _GROUPED | {"vocab_size": VOCABULARY, "rope_parameters": {"rope_type": "longrope", **sides}}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("phi3", original_max_position_embeddings=24, pad_token_id=2, **fields)
    ).eval()
    rollouts = Generator(model, "cpu")
    for prompt, answer in zip(PROMPTS[:3], rollouts.generate(PROMPTS[:3], GREEDY, [0] * 3), strict=True):
        assert answer.token_ids == greedy_by_definition(model, prompt, answer.token_ids, GREEDY.max_new_tokens)[0]
    with pytest.raises(ValueError, match=r"13 tokens and max_new_tokens=12 .* 24 positions .* rotary frequencies"):
        rollouts.generate([[13] * 13], GREEDY, [0])
    with torch.no_grad():  # the cause: the same token has other logits in a longer sequence
        short, long = (model(torch.arange(length)[None]).logits[0, :24] for length in (24, 25))
    assert (short - long).abs().max() > 1e-3


@pytest.mark.parametrize(("broken", "mode"), [("same length", "no cache"), ("nothing", "same length")])
def test_a_batching_mode_with_wrong_logits_is_not_used(broken: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TransformersFallback._generate

    def generate(self: TransformersFallback, prompts: Any, batching: Any, *rest: Any) -> Any:
        steps = original(self, prompts, batching, *rest)
        logits = next(steps)
        while True:
            tokens = yield logits.roll(1, -1) if batching.name == broken else logits
            logits = steps.send(tokens)

    monkeypatch.setattr(TransformersFallback, "_generate", generate)
    assert Generator(model_of("bart"), "cpu").mode == mode


def test_an_error_of_the_model_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("bloom")
    rollouts = Generator(model, "cpu")
    assert rollouts.mode == "padded"

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        rollouts.generate(PROMPTS, GREEDY, STREAMS)


def test_models_that_attend_to_other_tokens_are_refused() -> None:
    """An encoder attends to later tokens. The other model mixes the sequences of a batch."""

    def mix(_: nn.Module, __: Any, output: Any) -> None:
        output.logits += 0.1 * output.logits.mean(0)

    encoder, mixing = model_of("roberta", is_decoder=False), model_of("openai-gpt")
    mixing.register_forward_hook(mix)
    for model, advice in ((encoder, "; model.attention=eager may avoid that"), (mixing, "")):
        rollouts = Generator(model, "cpu")
        for _ in range(2):
            with pytest.raises(
                ValueError, match=f"cannot generate: its logits change .* the other sequences of a batch{advice}$"
            ):
                rollouts.generate(PROMPTS, GREEDY, STREAMS)


def test_a_slot_cache_with_wrong_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotModel.__call__
    monkeypatch.setattr(SlotModel, "__call__", lambda self, *rest: original(self, *rest).roll(1, -1))
    assert Generator(build("llama"), "cpu").fallback == "its logits differ from those of its plain forward"


def test_the_documented_table_of_families_is_correct() -> None:
    """Each family of this file and of tests/engine/generation/families.py is in the documented row of its mode."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "generation.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(slots|padded|same length|no cache)`[^|]*\| ([^|]*) \|$", page, re.MULTILINE))
    families = {mode: set(re.findall(r"[\w-]+", row)) for mode, row in rows.items()}
    for family, (mode, _) in MODES.items():
        assert family in families[mode], f"{family} generates by {mode}"
    for family in ("opt", "gpt2", "llama", "qwen3", "mixtral", "gemma3_text"):
        assert family in families["slots"]
    assert {"bloom", "gptj", "falcon"} <= families["padded"]
    documented = [family for each in families.values() for family in each]
    assert len(documented) == len(set(documented))
