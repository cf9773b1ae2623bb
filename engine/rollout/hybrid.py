"""The hybrid flip: a twin of a training module that generates.

A training module is sharded, hooked and in full precision; generation wants whole parameters in compute precision and
no hooks. The twin is the same architecture, plain. `refresh` fills it from the live module: a parameter that is
sharded, of another precision or under an adapter is gathered, cast and merged into a buffer that is allocated once; any
other shares the live parameter's memory, so that nothing is copied. The live module is only read: a base that is
rewritten and restored in 16 bit drifts.

Left out: gathers in buckets, tensor-parallel layouts, moving optimizer states away.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.merging import adapter_delta
from engine.parallel import dist


@dataclass(frozen=True)
class _Origin:
    """Where a parameter of the twin comes from: a live one, and the LoRA layer over it, if any."""

    parameter: Tensor
    adapter: nn.Module | None


class Twin:
    """The generation side of a training module: `module`, after `refresh`.

    `seconds` and `bytes` tell of the last flip; bytes are what was written into buffers, 0 where everything is shared.
    """

    def __init__(
        self, blueprint: nn.Module, source: nn.Module, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        """`blueprint` is the twin's architecture; its buffers have values, its parameters may be on the meta device,
        its adapters are taken out. The twin takes it over.

        `source` is the live module: FSDP2-sharded or plain, with or without LoRA (peft) inside. `dtype` is the
        precision to generate in, `device` the place (this rank's by default). Raises ValueError where the two don't
        fit together.
        """
        self.device = device or dist.world().device
        self.dtype, self.seconds, self.bytes = dtype, 0.0, 0
        self.module = _plain(blueprint)
        self._source = source
        self._buffers: dict[str, Tensor] = {}
        self.release()
        origins = _origins(source)
        lacking = [name for name, _, _ in _slots(self.module) if name not in origins]
        if lacking:
            raise ValueError(f"the live module has no {lacking[0]}, which the twin needs ({len(lacking)} such names)")

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the live parameters as they are now. Collective; what FSDP2 keeps gathered is released before."""
        began, self.bytes = time.perf_counter(), 0
        origins = _origins(self._source)
        first_name: dict[tuple[int, int], str] = {}  # tied parameters are filled once
        filled: dict[str, nn.Parameter] = {}
        for name, owner, leaf in _slots(self.module):
            origin = origins[name]
            first = first_name.setdefault((id(origin.parameter), id(origin.adapter)), name)
            if first == name:
                filled[name] = nn.Parameter(self._fill(name, origin), requires_grad=False)
            owner._parameters[leaf] = filled[first]
        self._share_buffers()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - began

    def release(self) -> None:
        """Free the gathered parameters. `refresh` brings them back."""
        for _, owner, leaf in _slots(self.module):
            parameter = owner._parameters[leaf]
            assert parameter is not None
            owner._parameters[leaf] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        self._buffers.clear()

    def _fill(self, name: str, origin: _Origin) -> Tensor:
        """The twin's tensor: the live one where that can be shared, else this name's buffer, filled."""
        live, adapter = origin.parameter.detach(), origin.adapter
        if adapter is None and not dist.is_whole(live):
            live = live.to(self.dtype)  # cast before the gather: fewer bytes on the wire
        whole = dist.full_tensor(live)
        if adapter is None and dist.is_whole(live) and whole.dtype == self.dtype and whole.device == self.device:
            self._buffers.pop(name, None)
            return whole
        if name not in self._buffers:
            self._buffers[name] = torch.empty(whole.shape, dtype=self.dtype, device=self.device)
        buffer = self._buffers[name]
        if adapter is None:
            buffer.copy_(whole)
        else:
            buffer.copy_(whole.float() + adapter_delta(adapter, whole.device))  # a new tensor: `whole` may be live
        self.bytes += buffer.numel() * buffer.element_size()
        return buffer

    def _share_buffers(self) -> None:
        """Buffers (rotary frequencies and the like) are the live module's, wherever it has values for them."""
        live = dict(_named(self._source, "_buffers"))
        for path, owner in self.module.named_modules(remove_duplicate=False):
            for leaf, own in owner._buffers.items():
                theirs = live.get(_join(path, leaf))
                if own is not None:
                    use = own if theirs is None or theirs.is_meta else theirs.detach()
                    owner._buffers[leaf] = use.to(self.device)


def _plain(blueprint: nn.Module) -> nn.Module:
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


def _slots(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """(name, module that owns it, its name there) of every parameter, tied ones under each of their names."""
    return [
        (_join(path, leaf), owner, leaf)
        for path, owner in module.named_modules(remove_duplicate=False)
        for leaf, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _origins(source: nn.Module) -> dict[str, _Origin]:
    """The live parameters under the names they have without adapters."""
    adapters = {path: layer for path, layer in source.named_modules(remove_duplicate=False) if hasattr(layer, "lora_A")}
    for path, layer in adapters.items():
        _check_adapter(path, layer)
    origins = {}
    for name, parameter in _named(source, "_parameters", strip=False):
        path, _, leaf = name.rpartition(".")
        layer = adapters.get(path.removesuffix(".base_layer")) if path.endswith(".base_layer") else None
        adapter = layer if leaf == "weight" and layer is not None and not layer.merged else None
        origins[_base_name(name)] = _Origin(parameter, adapter)
    return origins


def _named(module: nn.Module, kind: str, *, strip: bool = True) -> list[tuple[str, Tensor]]:
    """Parameters or buffers (`kind` is the attribute that holds them) by name, duplicates included."""
    found = []
    for path, owner in module.named_modules(remove_duplicate=False):
        for leaf, tensor in getattr(owner, kind).items():
            if tensor is not None:
                name = _join(path, leaf)
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


def _join(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf
