"""Model folders and tokenizers that are damaged or do not fit."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.campaign.bad_configs import DIGITS, writes
from tests.campaign.bad_data import chats, lines
from tests.campaign.cases import PPO, SFT, SHORT, Case

MODEL = Path("model")
WEIGHTS = MODEL / "model.safetensors"
DATA = writes("a.jsonl", lines(chats()))
FOLDER = ("model.path=model", *SHORT, *SFT, "data.path=a.jsonl")
"""SFT of the model folder."""
FIELDS: list[tuple[str, Any, str]] = [
    ("hidden_size", 33, "config.json"),
    ("num_hidden_layers", 1, "defines fewer layers"),
    ("num_attention_heads", 0, "config.json|cannot be built"),
    ("vocab_size", 100, "has shape|embedding rows"),
    ("max_position_embeddings", 16, "has 16 positions"),
    ("architectures", "LlamaForCausalLM", "architectures"),
    ("model_type", 3, "config.json"),
    ("rope_parameters", "fast", "config.json|cannot be built"),
    ("rope_parameters", {"rope_type": "spiral"}, "config.json|cannot be built|spiral"),
    ("hidden_act", "nope", "cannot be built|config.json"),
    ("quantization_config", "fp8", "quantized weights|config.json"),
    ("eos_token_id", "end", "config.json"),
    ("initializer_range", -1, "config.json"),
]


def cases() -> list[Case]:
    """Return the cases."""

    def case(name: str, says: str, change: Callable[[], None], *more: str, status: int = 2) -> Case:
        return Case("model", name, (*FOLDER, *more), says, status, prepare=_with_data(change), needs=("model",))

    found = [case("plain", "", lambda: None, status=0)]
    found += [case(f"{name}={value!r}", says, _config(**{name: value})) for name, value, says in FIELDS]
    found += [
        case("config.json of 5,000 digits", "config.json", writes("model/config.json", f'{{"vocab_size": {DIGITS}}}')),
        case("empty weights", "not a complete safetensors file", writes(WEIGHTS.as_posix(), b"")),
        case("a header of 2**60 bytes", "not a complete", writes(WEIGHTS.as_posix(), struct.pack("<Q", 2**60))),
        case("NaN in one weight", r"NaN or infinite values in 1 of .*layers\.1\.mlp", _change(_nan)),
        case("bfloat16 weights", "", _change(_bfloat16), status=0),
        case("a tensor of another shape", "has shape", _change(_transposed)),
        case("a tokenizer without a vocabulary", "the tokenizer cannot be read", _tokenizer(model={"type": "BPE"})),
        case("an end token of a number", "tokenizer", _settings(eos_token=3)),
        case("settings of the tokenizer as a list", "tokenizer", writes("model/tokenizer_config.json", "[1]")),
        case("an unknown tokenizer class", "", _settings(tokenizer_class="NobodyTokenizer"), status=0),
        case("model.path is no model", "not a model folder", lambda: None, "model.path=/usr"),
    ]
    ppo = ("stage=ppo", "actor=model", "reward=reward", *SHORT, *PPO, "data.path=a.jsonl", "name=x")
    nan = torch.full((1, 32), torch.nan)
    for name, says, change in (
        ("a misspelt value head", "score.weight", _head("scor.weight")),
        ("a reward model of NaN", "NaN or infinite", _head("score.weight", nan)),
    ):
        found.append(Case("model", name, ppo, says, prepare=_with_data(change), needs=("model", "reward")))
    return found


def _with_data(change: Callable[[], None]) -> Callable[[], None]:
    def prepare() -> None:
        DATA()
        change()

    return prepare


def _config(**fields: Any) -> Callable[[], None]:
    return lambda: _edit(MODEL / "config.json", fields)


def _settings(**fields: Any) -> Callable[[], None]:
    return lambda: _edit(MODEL / "tokenizer_config.json", fields)


def _tokenizer(**fields: Any) -> Callable[[], None]:
    return lambda: _edit(MODEL / "tokenizer.json", fields)


def _edit(file: Path, fields: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _change(edit: Callable[[dict[str, Tensor]], None], file: Path = WEIGHTS) -> Callable[[], None]:
    """Return a function that edits the tensors of a file."""

    def change() -> None:
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan


def _bfloat16(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


def _transposed(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.contiguous()


def _head(name: str, value: Tensor | None = None) -> Callable[[], None]:
    """Return a function that renames or replaces the head of the reward model."""

    def edit(tensors: dict[str, Tensor]) -> None:
        head = tensors.pop("score.weight")
        tensors[name] = head if value is None else value

    return _change(edit, Path("reward/model.safetensors"))
