"""LoRA adapters (Hu et al., 2021, arXiv:2106.09685) through peft: where they go in, and a model without them."""

from collections.abc import Iterator
from contextlib import contextmanager

from peft import LoraConfig as PeftLora
from peft import inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine import Engine
from pipeline.config.schema import LoraConfig
from pipeline.errors import UserError


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze a model and put adapters beside its linear maps; a value head stays trained.

    Raises UserError where `lora.targets` matches nothing.
    """
    config = PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes a float as well
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora.targets),
    )
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(f"lora.targets={lora.targets} matches no module; this model has {', '.join(names)}") from error
    head = getattr(model, "score", None)
    if isinstance(head, nn.Linear):
        head.requires_grad_(True)


def _targets(model: PreTrainedModel, targets: list[str] | str) -> list[str] | str:
    """`all-linear` is every linear map inside the blocks: not the head, not the value head."""
    if targets != "all-linear":
        return targets
    head = model.get_output_embeddings()
    kinds = (nn.Linear, Conv1D)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and module is not head and name not in ("score", "lm_head")
    ]


@contextmanager
def adapters_off(engine: Engine) -> Iterator[None]:
    """The model under its adapters: the reference of a LoRA policy."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in engine.module.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
