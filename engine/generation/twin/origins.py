"""Which live parameter each one of a twin comes from, by the name that it has without adapters."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Origin:
    """Where a parameter of the twin comes from: a live one, and the LoRA layer over it, if any."""

    parameter: Tensor
    adapter: nn.Module | None


def on_meta(module: nn.Module) -> nn.Module:
    """Take a module's parameters their memory."""
    for _, owner, leaf in slots(module):
        parameter = owner._parameters[leaf]
        assert parameter is not None
        owner._parameters[leaf] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    return module


def plain(blueprint: nn.Module) -> nn.Module:
    """The blueprint as it generates: without adapters, not training (so no dropout, no gradient checkpointing)."""
    if hasattr(blueprint, "get_base_model"):  # peft's own wrapper
        blueprint = blueprint.get_base_model()  # type: ignore[operator]
    for path, layer in [(path, child) for path, child in blueprint.named_modules() if hasattr(child, "lora_A")]:
        owner, _, leaf = path.rpartition(".")
        blueprint.get_submodule(owner)._modules[leaf] = layer.base_layer  # type: ignore[assignment]
    blueprint.eval().requires_grad_(False)
    if hasattr(blueprint, "config"):
        blueprint.config.use_cache = True  # type: ignore[union-attr]
    return blueprint


def slots(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(name, module that owns it, its name there) of every parameter, tied ones under each of their names."""
    return [
        (join(path, leaf), owner, leaf)
        for path, owner in module.named_modules(remove_duplicate=False)
        for leaf, parameter in owner._parameters.items()
        if parameter is not None
    ]


def origins_of(source: nn.Module) -> dict[str, Origin]:
    """The live parameters under the names they have without adapters."""
    adapters = {path: layer for path, layer in source.named_modules(remove_duplicate=False) if hasattr(layer, "lora_A")}
    for path, layer in adapters.items():
        _check_adapter(path, layer)
    origins = {}
    for name, parameter in named(source, "_parameters", strip=False):
        path, _, leaf = name.rpartition(".")
        layer = adapters.get(path.removesuffix(".base_layer")) if path.endswith(".base_layer") else None
        adapter = layer if leaf == "weight" and layer is not None and not layer.merged else None
        origins[_base_name(name)] = Origin(parameter, adapter)
    return origins


def named(module: nn.Module, kind: str, *, strip: bool = True) -> list[tuple[str, Tensor]]:
    """Parameters or buffers (`kind` is the attribute that holds them) by name, duplicates included."""
    found = []
    for path, owner in module.named_modules(remove_duplicate=False):
        for leaf, tensor in getattr(owner, kind).items():
            if tensor is not None:
                name = join(path, leaf)
                found.append((_base_name(name) if strip else name, tensor))
    return found


def _base_name(name: str) -> str:
    """A parameter's name without what peft puts around and into it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _check_adapter(path: str, layer: nn.Module) -> None:
    """Refuse adapters that are not W + scaling * B @ A: leaving their rest out would be silently wrong."""
    odd = bool(getattr(layer, "lora_variant", None)) or any(getattr(layer, "lora_bias", {}).values())
    if odd or not all(name in layer.lora_A for name in layer.active_adapters):  # type: ignore[operator, union-attr]
        raise ValueError(f"{path}: only plain LoRA on linear layers can be merged to generate; no DoRA, no LoRA bias")


def join(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
