"""The values of a model's parameters: read shard by shard from its folder, or drawn as its family draws them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from engine.loading import SafetensorsFolder, copy_local, draw_parameters, read_parameters
from pipeline.errors import UserError
from pipeline.models.source import ModelSource


@torch.no_grad()
def fill(
    module: nn.Module, prefix: str, model: PreTrainedModel, source: ModelSource, *, zero_head: bool = False
) -> None:
    """Give every parameter its value. `prefix` is what our module puts before the model's own names; `zero_head` makes
    a value head that the source lacks zero.
    """
    parameters = dict(module.named_parameters())
    adapters = [name for name in parameters if ".lora_" in name]
    own = [name for name in parameters if name not in adapters]
    plain = {name: name.removeprefix(prefix).replace(".base_layer.", ".") for name in own}
    draw: list[str] = list(adapters)
    if source.folder is None:
        draw += list(plain)
    else:
        draw += _read(module, plain, model, source)
    draw_parameters(module, draw, source.seed, _initializer(model, zero_head))


def _read(module: nn.Module, plain: Mapping[str, str], model: PreTrainedModel, source: ModelSource) -> list[str]:
    """Read what the folder has; return the names it lacks (only a value head may lack)."""
    assert source.folder is not None
    folder = SafetensorsFolder(source.folder)
    names = _matching(plain, set(folder.names()), model.base_model_prefix)
    lacking = [name for name in plain if name not in names]
    parameters = dict(module.named_parameters())
    if all(_is_value_head(name) for name in lacking):
        try:
            read_parameters({name: parameters[name] for name in names}, folder, names)
        except ValueError as error:
            raise UserError(str(error)) from error
        return lacking
    return _read_through_transformers(parameters, plain, model, source)


def _matching(plain: Mapping[str, str], available: set[str], base: str) -> dict[str, str]:
    """Our name -> the file's name. A base model's files lack the prefix that a model with a head has, or have it."""
    found: dict[str, str] = {}
    for name, own in plain.items():
        for candidate in (own, f"{base}.{own}", own.removeprefix(f"{base}.")):
            if candidate in available:
                found[name] = candidate
                break
    return found


def _read_through_transformers(
    parameters: Mapping[str, nn.Parameter], plain: Mapping[str, str], model: PreTrainedModel, source: ModelSource
) -> list[str]:
    """For files whose names transformers converts on the way in (fused experts, old layouts): whole, on the host."""
    auto: Any = AutoModelForSequenceClassification if hasattr(model, "score") else AutoModelForCausalLM
    loaded, report = auto.from_pretrained(
        source.folder,
        config=source.config,
        dtype=torch.float32,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # told below, in our words
        trust_remote_code=source.trust_remote_code,
    )
    check_report(source, report)
    whole = dict(loaded.named_parameters(remove_duplicate=False))
    lacking = [name for name, own in plain.items() if own in report["missing_keys"]]
    unknown = [own for name, own in plain.items() if own not in whole and name not in lacking]
    if unknown:
        raise UserError(f"{source.folder}: {unknown[0]} is no parameter of the model that transformers loads")
    for name, own in plain.items():
        if name not in lacking:
            copy_local(parameters[name], whole[own])
    return lacking


def check_report(source: ModelSource, report: Mapping[str, Any]) -> None:
    """Raises UserError where transformers found no value for a parameter, or one of another shape."""
    for name, there, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{source.folder}: {name} has shape {tuple(there)}, the model wants {tuple(wanted)}; "
            "its config.json does not belong to these weights"
        )
    missing = sorted(name for name in report["missing_keys"] if not _is_value_head(name))
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
