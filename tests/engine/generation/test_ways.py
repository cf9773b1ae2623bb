"""Models that the slot cache cannot serve decode in another way; docs/reference/generation.md lists them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.generation import rollouts
from engine.generation.batches.batch_decoding import _batches
from engine.generation.batches.same_length import OwnCacheDecoding
from engine.generation.rollouts import Rollouts
from engine.generation.sampling import Sampling
from tests.engine.generation.families import ENDS, POSITIONS, VOCABULARY, build, greedy_by_definition, ragged_prompts

PROMPTS = ragged_prompts(3, 11, 7, 1, 11, 5, 2, 14)
STREAMS = list(range(len(PROMPTS)))
GREEDY = Sampling(12, temperature=0, end_ids=ENDS, pad_id=ENDS[0])
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
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("slots", _GROUPED | {"no_rope_layers": [1, 0]}),
    "cohere2": ("slots", _GROUPED | {"sliding_window": 6, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "modernbert-decoder": ("slots", _MODERN | {"local_attention": 6, "global_attn_every_n_layers": 2}),
    "gpt_oss": ("padded", _GROUPED | {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "lfm2": ("padded", _GROUPED | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "diffllama": ("padded", _GROUPED),  # its attention calls the registered function twice a layer
    "bart": ("own cache", _BART),  # positions that nobody can tell it
    "mamba": ("own cache", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "roberta": ("whole", _MODERN | {"is_decoder": True}),  # positions from the ids that are not padding
    "rwkv": ("whole", {"hidden_size": 32, "num_hidden_layers": 2, "context_length": POSITIONS}),  # its state: for 1 row
    "openai-gpt": ("whole", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}),  # no cache
}


def model_of(family: str, **changes: Any) -> nn.Module:
    fields = WAYS[family][1] | {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model.eval()


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("engine.generation.rollouts._told", set())
    yield


@pytest.mark.parametrize("family", WAYS)
def test_the_fastest_way_that_is_the_model(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(family)
    rollouts = Rollouts(model, "cpu")
    assert rollouts.way == WAYS[family][0]
    told = [record.getMessage() for record in caplog.records if record.name == "engine.generation.rollouts"]
    assert len(told) == (rollouts.way != "slots") and all("slowly" in message for message in told)
    for sampling in (GREEDY, Sampling(9, temperature=0.8, seed=3)):
        answers = rollouts.generate(PROMPTS, sampling, STREAMS, batch_size=3)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer.token_ids]), use_cache=False).logits
            logits = logits[0, len(prompt) - 1 : -1].double() / (sampling.temperature or 1)
            expected = logits.log_softmax(-1)[range(len(answer.token_ids)), answer.token_ids]
            assert answer.logprobs == pytest.approx(expected.tolist(), abs=2e-4)
            if sampling is GREEDY:
                assert answer.token_ids == greedy_by_definition(model, prompt, GREEDY.max_new_tokens)[0]
    assert len({tuple(answer.token_ids) for answer in answers}) > 4


def test_who_is_told_no_positions_counts_the_padding() -> None:
    """Rotary positions from the cache's length: a prompt may lie anywhere in its row, but what follows right behind."""
    model = build("gpt_neox")
    forward = model.forward

    def untold(
        input_ids: Tensor, attention_mask: Any = None, past_key_values: Any = None, use_cache: Any = None
    ) -> Any:
        return forward(input_ids, attention_mask, past_key_values=past_key_values, use_cache=use_cache)

    model.forward = untold  # type: ignore[method-assign]
    rollouts = Rollouts(model, "cpu")
    assert rollouts.way == "padded"
    for prompt, answer in zip(PROMPTS, rollouts.generate(PROMPTS, GREEDY, STREAMS), strict=True):
        assert answer.token_ids == greedy_by_definition(model, prompt, GREEDY.max_new_tokens)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_of_its_own_are_seen_in_any_precision(dtype: torch.dtype) -> None:
    """In bf16 what wrong positions change may be no more than what rounding does."""
    model = model_of("roberta")
    with torch.no_grad():
        model.get_parameter("roberta.embeddings.position_embeddings.weight").mul_(0.05)
    rollouts = Rollouts(model.to(dtype), "cpu")
    assert rollouts.way != "padded" and rollouts.fallback == "it counts positions in a way of its own"


def test_positions_kept_for_padding_are_none_to_use() -> None:
    rollouts = Rollouts(model_of("roberta"), "cpu")  # 64, the first 3 of them padding's
    assert len(rollouts.generate([[13] * 57], Sampling(4), [0])[0].token_ids) == 4
    with pytest.raises(ValueError, match="58 tokens and 4 new ones do not fit the model's 61 positions"):
        rollouts.generate([[13] * 58], Sampling(4), [0])


def test_a_length_at_which_every_position_changes_is_the_last() -> None:
    """LongRoPE's frequencies are those of the longest sequence of a forward."""
    torch.manual_seed(0)
    sides = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 24}
    fields = _GROUPED | {"vocab_size": VOCABULARY, "rope_parameters": {"rope_type": "longrope", **sides}}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("phi3", original_max_position_embeddings=24, pad_token_id=2, **fields)
    ).eval()
    rollouts = Rollouts(model, "cpu")
    for prompt, answer in zip(PROMPTS[:3], rollouts.generate(PROMPTS[:3], GREEDY, [0] * 3), strict=True):
        assert answer.token_ids == greedy_by_definition(model, prompt, GREEDY.max_new_tokens)[0]
    with pytest.raises(ValueError, match=r"13 tokens and 12 new ones .* 24 positions of the same frequencies"):
        rollouts.generate([[13] * 13], GREEDY, [0])
    with torch.no_grad():  # why
        short, long = (model(torch.arange(length)[None]).logits[0, :24] for length in (24, 25))
    assert (short - long).abs().max() > 1e-3


@pytest.mark.parametrize(("broken", "left"), [("begin", "whole"), ("go_on", "whole"), ("nothing", "own cache")])
def test_a_way_that_says_something_else_is_not_taken(broken: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken != "nothing":
        right = getattr(OwnCacheDecoding, broken)
        monkeypatch.setattr(OwnCacheDecoding, broken, lambda self, *rest: right(self, *rest).roll(1, -1))
    assert Rollouts(model_of("bart"), "cpu").way == left


def test_what_looks_at_other_tokens_is_refused() -> None:
    """At those that follow, as an encoder does, or at those of the sequences beside."""

    def mix(_: nn.Module, __: Any, output: Any) -> None:
        output.logits += 0.1 * output.logits.mean(0)

    follows, beside = model_of("roberta", is_decoder=False), model_of("openai-gpt")
    beside.register_forward_hook(mix)
    for model, advice in ((follows, "; with model.attention=eager they may not"), (beside, "")):
        rollouts = Rollouts(model, "cpu")
        for _ in range(2):
            with pytest.raises(ValueError, match=f"can't generate: its logits change .* the sequences beside{advice}$"):
                rollouts.generate(PROMPTS, GREEDY, STREAMS)


def test_slots_that_say_something_else_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = rollouts.SlotDecoder.forward

    def off(self: rollouts.SlotDecoder, *rest: Any) -> Tensor:
        return right(self, *rest).roll(1, -1)

    monkeypatch.setattr(rollouts.SlotDecoder, "forward", off)
    assert Rollouts(build("llama"), "cpu").fallback == "it says something else when it attends over the slot cache"


def test_batches_by_hand() -> None:
    assert [*_batches([3, 5, 5, 3, 5], 2, 4, alike=False)] == [[1, 2], [4, 0], [3]]
    assert [*_batches([3, 5, 5, 3, 5], 2, 4, alike=True)] == [[1, 2], [4], [0, 3]]
    assert [*_batches([3000] * 4, 9, 1000, alike=True)] == [[0, 1], [2, 3]], "2 of 4,000 tokens in 8,192"
    assert [*_batches([], 2, 4, alike=True)] == []


def test_the_table_of_families_is_true() -> None:
    """What is built here and in the other tests of families stands in the row of its way."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "generation.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(slots|padded|own cache|whole)`[^|]*\| ([^|]*) \|$", page, re.MULTILINE))
    families = {way: set(re.findall(r"[\w-]+", row)) for way, row in rows.items()}
    for family, (way, _) in WAYS.items():
        assert family in families[way], f"{family} decodes by {way}"
    for family in ("opt", "gpt2", "llama", "qwen3", "mixtral", "gemma3_text"):
        assert family in families["slots"]
    assert {"bloom", "gptj", "falcon"} <= families["padded"]
    everyone = [family for each in families.values() for family in each]
    assert len(everyone) == len(set(everyone))
