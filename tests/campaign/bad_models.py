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
    ("hidden_size", "wide", "hidden_size"),
    ("hidden_size", 64, "has shape"),
    ("hidden_size", 33, "config.json"),
    ("num_hidden_layers", 1, "defines fewer layers"),
    ("num_hidden_layers", 3, "parameters are missing"),
    ("num_hidden_layers", 0, "num_hidden_layers=0: must be a whole number"),
    ("num_hidden_layers", 10**9, "num_hidden_layers=1000000000: must be a whole number"),
    ("num_hidden_layers", "2", "num_hidden_layers"),
    ("num_attention_heads", 0, "config.json|cannot be built"),
    ("vocab_size", 100, "has shape|embedding rows"),
    ("vocab_size", 10**15, "vocab_size"),
    ("max_position_embeddings", 16, "has 16 positions"),
    ("architectures", 5, "architectures"),
    ("architectures", "LlamaForCausalLM", "architectures"),
    ("architectures", ["LlamaForSequenceClassification"], "not a language model"),
    ("model_type", "nobody-knows", "is not supported by transformers"),
    ("model_type", 3, "config.json"),
    ("rope_parameters", "fast", "config.json|cannot be built"),
    ("rope_parameters", {"rope_type": "spiral"}, "config.json|cannot be built|spiral"),
    ("hidden_act", "nope", "cannot be built|config.json"),
    ("quantization_config", {"quant_method": "fp8"}, "quantized weights"),
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
        case("config.json is cut off", "config.json", writes("model/config.json", '{"model_type": ')),
        case("config.json is a list", "config.json", writes("model/config.json", "[]")),
        case("config.json is empty", "config.json", writes("model/config.json", "")),
        case("config.json of 5,000 digits", "config.json", writes("model/config.json", f'{{"vocab_size": {DIGITS}}}')),
        case("no config.json", "config.json", (MODEL / "config.json").unlink),
        case("no weights", "no model.safetensors", WEIGHTS.unlink),
        case("pickled weights", "a pickle file", _pickle),
        case("half the weights", "not a complete safetensors file", _cut),
        case("empty weights", "not a complete safetensors file", writes(WEIGHTS.as_posix(), b"")),
        case("a pointer of Git LFS", "git lfs pull", writes(WEIGHTS.as_posix(), b"version https://git-lfs...")),
        case("a header of 2**60 bytes", "not a complete", writes(WEIGHTS.as_posix(), struct.pack("<Q", 2**60))),
        case("NaN in one weight", r"NaN or infinite values in 1 of .*layers\.1\.mlp", _change(_nan)),
        case("infinity in every weight", r"NaN or infinite values in \d\d of", _change(_infinite)),
        case("integer weights", "torch.int8, as quantized weights have", _change(_integers)),
        case("bfloat16 weights", "", _change(_bfloat16), status=0),
        case(
            "an unknown tensor",
            "does not use 1 tensors of the files, for example model.extra",
            _change(_extra),
            status=0,
        ),
        case("a misspelt tensor", "parameters are missing", _change(_misspelt)),
        case("a tensor of another shape", "has shape", _change(_transposed)),
        case("no embedding", "parameters are missing", _change(_no_embedding)),
        case("an index outside its folder", "not in its folder", _index("../other.safetensors")),
        case("an index of absolute paths", "not in its folder", _index("/etc/hostname")),
        case("an index of a missing file", "no model-9.safetensors", _index("model-9.safetensors")),
        case("an index of numbers", "is damaged", _index(3)),
        case("an index of a missing tensor", "has no tensor", _index("model.safetensors", more="model.none.weight")),
        case("an index without a map", "is damaged", writes("model/model.safetensors.index.json", "{}")),
        case("an empty index", "is damaged", writes("model/model.safetensors.index.json", '{"weight_map": {}}')),
        case("no tokenizer", "there is no tokenizer", (MODEL / "tokenizer.json").unlink),
        case("a damaged tokenizer", "the tokenizer cannot be read", writes("model/tokenizer.json", "{")),
        case("a tokenizer without a vocabulary", "the tokenizer cannot be read", _tokenizer(model={"type": "BPE"})),
        case("no end token", "has no end token", _settings(eos_token=None)),
        case("an end token of a number", "tokenizer", _settings(eos_token=3)),
        case("settings of the tokenizer as a list", "tokenizer", writes("model/tokenizer_config.json", "[1]")),
        case("an unknown tokenizer class", "", _settings(tokenizer_class="NobodyTokenizer"), status=0),
        case("a larger vocabulary", "embedding rows", _larger_vocabulary),
        case("model.path is a file", "is a file: set the folder of the model", lambda: None, "model.path=a.jsonl"),
        case("model.path is no model", "not a model folder", lambda: None, "model.path=/usr"),
    ]
    ppo = ("stage=ppo", "actor=model", *SHORT, *PPO, "data.path=a.jsonl", "name=x")
    nan = torch.full((1, 32), torch.nan)
    other = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    scorers: list[tuple[str, str, Callable[[], None], str]] = [
        ("no value head", "score.weight", _head(None), "reward"),
        ("a misspelt value head", "score.weight", _head("scor.weight"), "reward"),
        ("a reward model of NaN", "NaN or infinite", _head("score.weight", nan), "reward"),
        ("a language model as reward model", "not a reward model", lambda: None, "model"),
        ("another tokenizer", "has another tokenizer", writes("reward/chat_template.jinja", other), "reward"),
    ]
    for name, says, change, folder in scorers:
        arguments, prepare = (*ppo, f"reward={folder}"), _with_data(change)
        found.append(Case("model", name, arguments, says, prepare=prepare, needs=("model", "reward")))
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


def _infinite(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(torch.inf)


def _integers(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.mul(100).to(torch.int8) for name, tensor in tensors.items()})


def _bfloat16(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


def _extra(tensors: dict[str, Tensor]) -> None:
    tensors["model.extra.weight"] = torch.zeros(3)


def _misspelt(tensors: dict[str, Tensor]) -> None:
    tensors["model.nrom.weight"] = tensors.pop("model.norm.weight")


def _transposed(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.contiguous()


def _no_embedding(tensors: dict[str, Tensor]) -> None:
    del tensors["model.embed_tokens.weight"]


def _head(name: str | None, value: Tensor | None = None) -> Callable[[], None]:
    """Return a function that renames, replaces or removes the head of the reward model."""

    def edit(tensors: dict[str, Tensor]) -> None:
        head = tensors.pop("score.weight")
        if name is not None:
            tensors[name] = head if value is None else value

    return _change(edit, Path("reward/model.safetensors"))


def _cut() -> None:
    WEIGHTS.write_bytes(WEIGHTS.read_bytes()[:-1000])


def _pickle() -> None:
    WEIGHTS.unlink()
    torch.save({}, MODEL / "pytorch_model.bin")


def _index(file: Any, more: str | None = None) -> Callable[[], None]:
    """Return a function that writes an index in which every tensor, and one more, is in one file."""

    def write() -> None:
        names = [*load_file(WEIGHTS), *([more] if more else [])]
        content = {"weight_map": dict.fromkeys(names, file)}
        (MODEL / "model.safetensors.index.json").write_text(json.dumps(content))

    return write


def _larger_vocabulary() -> None:
    file = MODEL / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    late = [{"id": 300 + number, "content": f"<|late-{number}|>", **flags} for number in range(300)]
    content["added_tokens"] += late
    file.write_text(json.dumps(content))
