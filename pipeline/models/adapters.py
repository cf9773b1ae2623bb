"""LoRA adapters (Hu et al., 2021, arXiv:2106.09685): add them to a model with peft."""

import logging

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipeline.config.stage_sections import LoraConfig
from pipeline.errors import UserError

# peft imports bitsandbytes if it is installed, which warns about a CPU kernel that zerochat does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze a model and add adapters to its linear layers. A value head remains trainable.

    Raises UserError if `lora.targets` matches no module or a module that does not support adapters. The parameters must
    be tied already, as in a model that transformers loads.
    """
    from peft import LoraConfig as PeftLora  # imported here because most runs have no adapters
    from peft import inject_adapter_in_model

    config = PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft accepts a float
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora.targets),
        fan_in_fan_out=any(type(module) is Conv1D for module in model.modules()),  # otherwise peft warns
    )
    model.requires_grad_(False)
    names = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if is_linear(module)})
    # The wrapper has no configuration. If peft finds the family of a mixture, it converts some names to its experts'.
    wrapper = nn.ModuleDict({"model": model})
    try:
        inject_adapter_in_model(config, wrapper)
    except ValueError as error:
        raise UserError(f"lora.targets={lora.targets} matches no module; this model has {', '.join(names)}") from error
    value_head, embedding = getattr(model, "score", None), model.get_input_embeddings().weight
    for name, layer in model.named_modules():
        base = getattr(layer, "base_layer", None)
        if base is not None and (not is_linear(base) or base.weight is embedding or layer is value_head):
            raise UserError(
                f"lora.targets={lora.targets} matches {name}, which cannot have adapters: it is the value head, shares "
                f"its weight with the embedding, or is not linear. Remove it; other modules are {', '.join(names)}"
            )
    if isinstance(value_head, nn.Linear):
        value_head.requires_grad_(True)


def _targets(model: PreTrainedModel, targets: list[str] | str) -> list[str]:
    """Return the names of target modules. `all-linear`: all linear layers except the output head and the value head."""
    if targets != "all-linear":
        return [targets] if isinstance(targets, str) else targets
    head = model.get_output_embeddings()
    return [
        f"model.{name}"
        for name, module in model.named_modules()
        if is_linear(module) and module is not head and name not in ("score", "lm_head")
    ]


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes a linear map of its last dimension.

    A subclass of `nn.Linear` may compute something else, for example a router. One call with a small input decides.
    """
    if type(module) in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    try:
        out = module(torch.empty(1, 2, module.in_features, dtype=module.weight.dtype, device=module.weight.device))
    except Exception:  # its forward needs other arguments
        return False
    return isinstance(out, Tensor) and out.shape == (1, 2, module.out_features)
