"""The hybrid flip: a twin of a training module that generates.

A training module is sharded, hooked and in full precision; generation wants whole parameters in compute precision and
no hooks. The twin is the same architecture, plain. `refresh` fills it from the live module: what is sharded, of another
precision or under an adapter is gathered, cast and merged (`gather.py`) into one stretch of memory that is allocated
once, and on CPUs shared by the ranks of a host; any other parameter shares the live one's memory, so that nothing is
copied. What is frozen is gathered once. The live module is only read: a base that is rewritten and restored in
16 bit drifts.

Left out: tensor-parallel layouts.
"""

import math
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.parallel import dist
from engine.parallel.host_memory import share
from engine.rollout.gather import Piece, gather

ALIGNED = 64  # bytes: where a parameter begins


@dataclass(frozen=True)
class _Origin:
    """Where a parameter of the twin comes from: a live one, and the LoRA layer over it, if any."""

    parameter: Tensor
    adapter: nn.Module | None


@dataclass(frozen=True)
class _Buffers:
    """The memory of what is gathered, by name. `shared` is True where all ranks have the same."""

    whole: Tensor
    named: Mapping[str, Tensor]
    shared: bool


class Twin:
    """The generation side of a training module: `module`, after `refresh`.

    `seconds`, `bytes` and `changed` tell of the last flip: bytes are what was written into buffers, 0 where everything
    is shared; `changed` are the modules whose parameters may be others than before.
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
        self.changed: set[nn.Module] = set()
        self.module = _plain(blueprint)
        self._source = source
        self._buffers: _Buffers | None = None
        self._seen: dict[str, tuple[int, int, int]] = {}  # frozen parameters in the buffers, as they were when read
        self.release()
        origins = _origins(source)
        lacking = [name for name, _, _ in _slots(self.module) if name not in origins]
        if lacking:
            raise ValueError(f"the live module has no {lacking[0]}, which the twin needs ({len(lacking)} such names)")

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the live parameters as they are now. Collective; what FSDP2 keeps gathered is released before."""
        began = time.perf_counter()
        origins = _origins(self._source)
        first_name: dict[tuple[int, int], str] = {}  # tied parameters are filled once
        for name, _, _ in _slots(self.module):
            first_name.setdefault((id(origins[name].parameter), id(origins[name].adapter)), name)
        firsts = {name: origins[name] for name in first_name.values()}
        wanted = {name: origin for name, origin in firsts.items() if not self._can_share(origin)}
        buffers = self._buffers_for(wanted)
        kept = self._unchanged(firsts)
        due = [Piece(o.parameter, o.adapter, buffers.named[name]) for name, o in wanted.items() if name not in kept]
        if buffers.shared:
            dist.barrier()  # until the last rank has ceased to read
        self.bytes = gather(due, shared=buffers.shared)
        if buffers.shared:
            dist.barrier()
        self._hand_out(origins, first_name, kept)
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
        self._buffers = None
        self._seen.clear()

    def _can_share(self, origin: _Origin) -> bool:
        """Whether the twin can use the live parameter's own memory."""
        live = origin.parameter
        return (
            origin.adapter is None
            and dist.is_whole(live)
            and live.dtype == self.dtype
            and dist.local(live.detach()).device == self.device
        )

    def _buffers_for(self, wanted: Mapping[str, _Origin]) -> _Buffers:
        """Memory for these parameters: what there is, if it is for the same ones."""
        if self._buffers is not None and self._buffers.named.keys() == wanted.keys():
            return self._buffers
        self._buffers = None
        self._seen.clear()
        sizes = {name: math.prod(origin.parameter.shape) * self.dtype.itemsize for name, origin in wanted.items()}
        total = sum(-(-size // ALIGNED) * ALIGNED for size in sizes.values())
        common = share(total) if total and dist.world().size > 1 and self.device.type == "cpu" else None
        memory = torch.empty(total, dtype=torch.uint8, device=self.device) if common is None else common
        named, at = {}, 0
        for name, size in sizes.items():
            named[name] = memory[at : at + size].view(self.dtype).view(wanted[name].parameter.shape)
            at += -(-size // ALIGNED) * ALIGNED
        self._buffers = _Buffers(memory, named, common is not None)
        return self._buffers

    def _unchanged(self, origins: Mapping[str, _Origin]) -> set[str]:
        """The frozen parameters that the twin has as they are, on all ranks."""
        frozen = {name: o.parameter for name, o in origins.items() if o.adapter is None}
        seen = {name: _stamp(live) for name, live in frozen.items() if not live.requires_grad}
        kept = sorted(name for name, stamp in seen.items() if self._seen.get(name) == stamp)
        self._seen = seen
        agreed = len(set(dist.gather_objects(zlib.crc32(" ".join(kept).encode())))) == 1
        return set(kept) if agreed else set()

    def _hand_out(
        self, origins: Mapping[str, _Origin], first_name: Mapping[tuple[int, int], str], kept: set[str]
    ) -> None:
        """Give the twin's modules their parameters, tied ones the same; notes whose are not `kept`."""
        assert self._buffers is not None
        parameters: dict[str, nn.Parameter] = {}
        self.changed = set()
        for name, owner, leaf in _slots(self.module):
            origin = origins[name]
            first = first_name[id(origin.parameter), id(origin.adapter)]
            if first not in parameters:
                tensor = self._buffers.named.get(first, dist.local(origin.parameter.detach()))
                parameters[first] = nn.Parameter(tensor, requires_grad=False)
            owner._parameters[leaf] = parameters[first]
            if first not in kept:
                self.changed.add(owner)

    def _share_buffers(self) -> None:
        """Buffers (rotary frequencies and the like) are the live module's, wherever it has values for them."""
        live = dict(_named(self._source, "_buffers"))
        for path, owner in self.module.named_modules(remove_duplicate=False):
            for leaf, own in owner._buffers.items():
                theirs = live.get(_join(path, leaf))
                if own is not None:
                    use = own if theirs is None or theirs.is_meta else theirs.detach()
                    owner._buffers[leaf] = use.to(self.device)


def _stamp(live: Tensor) -> tuple[int, int, int]:
    """Changes where a parameter is written to in place, whole or this rank's part of it, or put elsewhere."""
    part = dist.local(live)  # without gradients: the part itself, which counts what is written to it
    return part.data_ptr(), part._version, live._version


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
