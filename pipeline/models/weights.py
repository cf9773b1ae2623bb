"""The values of a model's parameters: read shard by shard from a folder, or initialized as the family defines."""

import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from engine import distributed, loading
from pipeline.errors import UserError
from pipeline.models.checks import warn_once
from pipeline.models.internals import initialize_module, unused_patterns
from pipeline.models.quantized import QuantizedLinear, quantized_layers
from pipeline.models.source import ModelSource

ROWS = 4096  # of a matrix that are in memory at once while tied parameters are compared
OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # old checkpoints store them


@torch.no_grad()
def fill(
    module: nn.Module, prefix: str, model: PreTrainedModel, source: ModelSource, *, zero_head: bool = False
) -> None:
    """Set the value of every parameter of a module.

    prefix: the prefix of the module's parameter names before the model's own names
    zero_head: whether a value head that the source lacks is zero

    Raises UserError if the files lack a parameter or have another shape.
    """
    named: dict[str, Tensor] = dict(module.named_parameters())
    quantized = quantized_layers(module)
    adapters = [name for name in named if ".lora_" in name]
    base_names = [name for name in named if name not in adapters]
    initialize = _initializer(model, zero_head)
    if source.folder is None:
        initialized = base_names
        for path, layer in quantized.items():
            layer.quantize(partial(_initial_weight, module, path, layer, source.seed, initialize))
    else:
        named |= loading.persistent_buffers(module)
        named |= {f"{path}.weight": layer.empty_weight("meta") for path, layer in quantized.items()}
        plain = {n: n.removeprefix(prefix).replace(".base_layer.", ".") for n in named if n not in adapters}
        loaded = _read({name: named[name] for name in plain}, plain, model, source, quantized)
        initialized = [name for name in base_names if name not in loaded]
    loading.initialize_parameters(module, [*adapters, *initialized], source.seed, initialize)


def _initial_weight(
    module: nn.Module, path: str, layer: QuantizedLinear, seed: int, initialize: Callable[[nn.Module, str], None]
) -> Tensor:
    """Return the random weight of a quantized layer: that of the linear layer that it replaces."""
    ins, outs = layer.in_features, layer.out_features
    linear = Conv1D(outs, ins) if layer.is_transposed else nn.Linear(ins, outs)
    module.set_submodule(path, linear)
    try:
        loading.initialize_parameters(module, [f"{path}.weight"], seed, initialize)
    finally:
        module.set_submodule(path, layer)
    return linear.weight.to(distributed.world().device)


def _stored_weight(layer: QuantizedLinear, name: str, files: loading.SafetensorsFolder, stored: str) -> Tensor:
    """Return the weight of a quantized layer, the tensor `stored` of the files."""
    weight = layer.empty_weight(distributed.world().device)
    loading.read_parameters({name: weight}, files, {name: stored})
    return weight


def _read(
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, str],
    model: PreTrainedModel,
    source: ModelSource,
    quantized: Mapping[str, QuantizedLinear],
) -> set[str]:
    """Read the tensors that the folder has, and return their names.

    Only buffers and the value head of a language model may be missing. A missing buffer keeps its initial value.
    Raises UserError if another parameter is missing or has another shape, or if the files have blocks that the model
    lacks or different values of tied parameters.
    """
    assert source.folder is not None
    files = loading.SafetensorsFolder(source.folder)
    names = _matching(plain, files.shapes, model.base_model_prefix)
    unused = sorted(set(files.shapes) - set(names.values()))
    try:
        if _missing_from(tensors, names):
            from pipeline.models.converted import ConvertedFolder  # imported here because few checkpoints need it

            converted = ConvertedFolder(source.folder, _without_values(model, source))
            names, unused = _matching(plain, converted.shapes, model.base_model_prefix), converted.unused
            files = converted
        if unused:
            empty = _without_values(model, source)
            _check_unused(unused, empty, source)
            _check_tied(files, empty, source)
        heads = [name for name in tensors if _is_value_head(name) and name not in names and is_reward_model(source)]
        _check_complete(source, [plain[name] for name in (*_missing_from(tensors, names), *heads)])
        layers = {f"{path}.weight": layer for path, layer in quantized.items()}
        loading.read_parameters({name: tensors[name] for name in names if name not in layers}, files, names)
        for name, layer in layers.items():
            layer.quantize(partial(_stored_weight, layer, name, files, names[name]))
    except ValueError as error:
        raise UserError(str(error)) from error
    return set(names)


def _missing_from(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> list[str]:
    """Return the parameters that the files lack, sorted. Buffers and value heads are left out."""
    return sorted(
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, nn.Parameter) and name not in names and not _is_value_head(name)
    )


def _without_values(model: PreTrainedModel, source: ModelSource) -> PreTrainedModel:
    """Return the model as transformers creates it before it reads a folder, with parameters on the meta device."""
    auto = AutoModelForSequenceClassification if hasattr(model, "score") else AutoModelForCausalLM
    return empty_model(auto, source.config, source)


def empty_model(auto: Any, config: PretrainedConfig, source: ModelSource, **options: Any) -> PreTrainedModel:
    """Return a model with tied parameters on the meta device. Its buffers have their values.

    transformers would initialize the parameters on the meta device, too, which takes most of the time.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: PreTrainedModel = auto.from_config(
            config, dtype=torch.float32, trust_remote_code=source.trust_remote_code, **options
        )
    model.tie_weights()
    return model


def _matching(plain: Mapping[str, str], available: Container[str], base: str) -> dict[str, str]:
    """Return {the module's name: the file's name} of each tensor in the files.

    Names in the files may have the base model's prefix or lack it.
    """
    matches: dict[str, str] = {}
    for name, model_name in plain.items():
        for candidate in (model_name, f"{base}.{model_name}", model_name.removeprefix(f"{base}.")):
            if candidate in available:
                matches[name] = candidate
                break
    return matches


def _check_unused(stored: Sequence[str], empty: PreTrainedModel, source: ModelSource) -> None:
    """Raise UserError if tensors of the files are further blocks or experts; warn about other tensors without a use.

    `empty` is the complete model, also under pipeline parallelism. Tensors that transformers expects to be unused, tied
    tensors, and the head of a language model that becomes a scorer are neither.
    """
    base = f"{empty.base_model_prefix}."
    tensors = {*empty.state_dict(keep_vars=True), *dict(empty.named_buffers())}
    known = {name.removeprefix(base) for name in tensors}
    ignored = [re.compile(pattern) for pattern in (*unused_patterns(empty), *OLD_BUFFERS)]
    unknown = [
        name
        for name in stored
        if name.removeprefix(base) not in known and not any(pattern.search(name) for pattern in ignored)
    ]
    blocks = {re.sub(r"\d+", "N", name) for name in known}
    for name in unknown:
        if re.search(r"\d", name) and re.sub(r"\d+", "N", name.removeprefix(base)) in blocks:
            raise UserError(
                f"{source.folder}: the files have {name}, but config.json defines fewer layers or experts: the weights "
                "do not belong to config.json. Correct its num_hidden_layers (or number of experts), or download the "
                "model again"
            )
    if hasattr(empty, "score") and not is_reward_model(source):
        unknown = [name for name in unknown if name.startswith(base)]
    if unknown:
        warn_once(f"{source.folder}: the model does not use {len(unknown)} tensors of the files, such as {unknown[0]}")


def _check_tied(files: loading.SafetensorsFolder, empty: PreTrainedModel, source: ModelSource) -> None:
    """Raise UserError if the files have different values for parameters that the model shares.

    transformers does not tie such parameters, whatever config.json defines. The values are compared in blocks of rows.
    """
    tied: dict[int, dict[str, str]] = {}
    for name, parameter in empty.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), {})[name] = name
    for names in tied.values():
        stored = sorted(_matching(names, files.shapes, empty.base_model_prefix).values())
        rows = files.shapes[stored[0]][0] if len(stored) > 1 else 0
        for start in range(0, rows, ROWS):
            region = (slice(start, min(start + ROWS, rows)),)
            # NaN equals nothing, and is refused when the parameters are read.
            first, *others = (files.read(name, (region,)).float().nan_to_num() for name in stored)
            if not all(torch.equal(first, other) for other in others):
                raise UserError(
                    f"{source.folder}: config.json ties {' and '.join(stored)}, but the files have different values "
                    "for them: set tie_word_embeddings to false in config.json"
                )


def is_reward_model(source: ModelSource) -> bool:
    """Return whether a source has a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in source.config.architectures or [])


def check_report(source: ModelSource, report: Mapping[str, Any]) -> None:
    """Raise UserError if transformers found no value for a parameter, or a value of another shape."""
    for name, stored_shape, model_shape in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{source.folder}: {name} has shape {tuple(stored_shape)}, but config.json defines {tuple(model_shape)}: "
            "the weights do not belong to config.json"
        )
    _check_complete(source, sorted(name for name in report["missing_keys"] if not _is_value_head(name)))


def _check_complete(source: ModelSource, missing: Sequence[str]) -> None:
    """Raise UserError if any parameter is missing."""
    if missing:
        raise UserError(
            f"{source.folder}: {len(missing)} parameters are missing from the files, for example {missing[0]}: the "
            "weights do not belong to config.json, or the download is incomplete"
        )


def _is_value_head(name: str) -> bool:
    return name.split(".")[-2:] == ["score", "weight"]


def _initializer(model: PreTrainedModel, zero_head: bool) -> Callable[[nn.Module, str], None]:
    """Return a function that initializes the parameters of one module, which are zero before the call.

    LoRA's B matrices stay zero. A value head is sampled with standard deviation 1 / sqrt(D + 1), or is zero with
    `zero_head`. The model's family defines the other parameters.
    """

    def initialize(module: nn.Module, name: str) -> None:
        if ".lora_B" in name:
            return
        if ".lora_A" in name and isinstance(module, nn.Linear):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        elif name.rpartition(".")[2] == "score" and isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.0 if zero_head else 1.0 / math.sqrt(module.in_features + 1))
        else:
            # The initialization of Mamba's mixers also writes into the layers below them, which initialize themselves.
            module._modules = {key: _without_storage(child) for key, child in module.named_children()}
            initialize_module(model, module)

    return initialize


def _without_storage(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters are on the meta device, as those of a plain model."""
    if isinstance(module, QuantizedLinear):
        return nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    copied = object.__new__(type(module))  # `copy` would call the constructor of an FSDP unit
    vars(copied).update(vars(module))
    copied._parameters = {
        key: None if p is None else nn.Parameter(torch.empty(p.shape, device="meta"))
        for key, p in module._parameters.items()
    }
    copied._modules = {key: _without_storage(child) for key, child in module.named_children()}
    return copied
