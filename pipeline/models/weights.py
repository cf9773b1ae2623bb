"""The values of a model's parameters: read shard by shard from its folder, or drawn as its family draws them."""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from engine import loading
from pipeline.errors import UserError
from pipeline.models.source import ModelSource


@torch.no_grad()
def fill(
    module: nn.Module, prefix: str, model: PreTrainedModel, source: ModelSource, *, zero_head: bool = False
) -> None:
    """Give every parameter its value. `prefix` is what our module puts before the model's own names; `zero_head` makes
    a value head that the source lacks zero.
    """
    named: dict[str, Tensor] = dict(module.named_parameters())
    adapters = [name for name in named if ".lora_" in name]
    wanted = [name for name in named if name not in adapters]
    if source.folder is None:
        drawn = wanted
    else:
        named |= loading.persistent_buffers(module)
        plain = {n: n.removeprefix(prefix).replace(".base_layer.", ".") for n in named if n not in adapters}
        read = _read({name: named[name] for name in plain}, plain, model, source)
        drawn = [name for name in wanted if name not in read]
    loading.initialize_parameters(module, [*adapters, *drawn], source.seed, _initializer(model, zero_head))


def _read(
    tensors: Mapping[str, Tensor], plain: Mapping[str, str], model: PreTrainedModel, source: ModelSource
) -> set[str]:
    """Read what the folder has; return the names of it. Only a value head may lack, and a buffer, which then keeps the
    value that it was made with.
    """
    assert source.folder is not None
    files: loading.TensorFolder = loading.SafetensorsFolder(source.folder)
    names = _matching(plain, files.shapes, model.base_model_prefix)
    try:
        if _lacking(tensors, names):
            from pipeline.models.converted import ConvertedFolder  # few checkpoints need it

            files = ConvertedFolder(loading.SafetensorsFolder(source.folder), _without_values(model, source))
            names = _matching(plain, files.shapes, model.base_model_prefix)
        _check_complete(source, [plain[name] for name in _lacking(tensors, names)])
        loading.read_parameters({name: tensors[name] for name in names}, files, names)
    except ValueError as error:
        raise UserError(str(error)) from error
    return set(names)


def _lacking(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> list[str]:
    return sorted(
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, nn.Parameter) and name not in names and not _is_value_head(name)
    )


def _without_values(model: PreTrainedModel, source: ModelSource) -> PreTrainedModel:
    """The plain model, as transformers makes it before it reads a folder."""
    auto: Any = AutoModelForSequenceClassification if hasattr(model, "score") else AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        empty: PreTrainedModel = auto.from_config(
            source.config, dtype=torch.float32, trust_remote_code=source.trust_remote_code
        )
    empty.tie_weights()
    return empty


def _matching(plain: Mapping[str, str], available: Container[str], base: str) -> dict[str, str]:
    """Our name -> the file's name. A base model's files lack the prefix that a model with a head has, or have it."""
    found: dict[str, str] = {}
    for name, own in plain.items():
        for candidate in (own, f"{base}.{own}", own.removeprefix(f"{base}.")):
            if candidate in available:
                found[name] = candidate
                break
    return found


def check_report(source: ModelSource, report: Mapping[str, Any]) -> None:
    """Raises UserError where transformers found no value for a parameter, or one of another shape."""
    for name, there, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{source.folder}: {name} has shape {tuple(there)}, the model wants {tuple(wanted)}; "
            "its config.json does not belong to these weights"
        )
    _check_complete(source, sorted(name for name in report["missing_keys"] if not _is_value_head(name)))


def _check_complete(source: ModelSource, missing: Sequence[str]) -> None:
    if missing:
        raise UserError(
            f"{source.folder}: {len(missing)} parameters are in no file, {missing[0]} for one; "
            "the weights do not belong to this config.json, or the download is incomplete"
        )


def _is_value_head(name: str) -> bool:
    return name.split(".")[-2:] == ["score", "weight"]


def _initializer(model: PreTrainedModel, zero_head: bool) -> Callable[[nn.Module, str], None]:
    """How one module's parameters are drawn: LoRA's B zero, a value head narrow or zero, the rest as its family's."""

    def initialize(module: nn.Module, name: str) -> None:
        if ".lora_B" in name:
            return
        if ".lora_A" in name and isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif name.rpartition(".")[2] == "score" and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.0 if zero_head else 1.0 / math.sqrt(module.in_features + 1))
        else:
            model._init_weights(module)

    return initialize
