"""The hybrid flip: a twin of a training module that generates.

A training module is sharded, hooked and in full precision; generation wants whole parameters in compute precision and
no hooks. The twin is the same architecture, plain. `refresh` fills it from the live module: what is sharded, of another
precision or under an adapter is gathered, cast and merged (`gather.py`) into one stretch of memory that is allocated
once, and on CPUs shared by the ranks of a host; any other parameter shares the live one's memory, so that nothing is
copied. What is frozen is gathered once. The live module is only read: a base that is rewritten and restored in
16 bit drifts.

With `stream` the blocks' parameters are gathered as they run (`streaming.py`), so that they never are there at once.
With `tensor_parallel` neighbouring ranks generate together, and each gathers its part of the split matrices only.
"""

import math
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.generation.twin.cuts import Cut, split
from engine.generation.twin.gather import Piece, gather
from engine.generation.twin.origins import Origin, join, named, on_meta, origins_of, plain, slots
from engine.generation.twin.streaming import BlockStream
from engine.parallel import dist, dtensors
from engine.parallel.shared_memory import share

ALIGNED = 64  # bytes: where a parameter begins


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
        self,
        blueprint: nn.Module,
        source: nn.Module,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        tensor_parallel: int = 1,
        plan: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> None:
        """`blueprint` is the twin's architecture; its buffers have values, its parameters may be on the meta device,
        its adapters are taken out. The twin takes it over.

        `source` is the live module: FSDP2-sharded or plain, with or without LoRA (peft) inside. `dtype` is the
        precision to generate in, `device` the place (this rank's by default). Every `tensor_parallel` neighbours split
        the twin, by `plan` or by the one that came with it. Raises ValueError where the two don't fit together, and
        where the model can't be split.
        """
        self.device = device or dist.world().device
        self.dtype, self.seconds, self.bytes = dtype, 0.0, 0
        self.changed: set[nn.Module] = set()
        self.module = plain(blueprint)
        self._cuts: Mapping[str, Cut] = {}
        if tensor_parallel > 1:
            self._cuts = split(on_meta(self.module), tensor_parallel, plan)
        self.stream = BlockStream(self.module, dtype, self.device) if stream else None
        self._source = source
        self._buffers: _Buffers | None = None
        self._seen: dict[str, tuple[int, int, int]] = {}  # frozen parameters in the buffers, as they were when read
        self.release()
        origins = origins_of(source)
        lacking = [name for name, _, _ in slots(self.module) if name not in origins]
        if lacking:
            raise ValueError(f"the live module has no {lacking[0]}, which the twin needs ({len(lacking)} such names)")

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the live parameters as they are now. Collective; what FSDP2 keeps gathered is released before."""
        began = time.perf_counter()
        origins = origins_of(self._source)
        first_name: dict[tuple[int, int], str] = {}  # tied parameters are filled once
        for name, _, _ in slots(self.module):
            first_name.setdefault((id(origins[name].parameter), id(origins[name].adapter)), name)
        firsts = {name: origins[name] for name in first_name.values()}
        wanted = {name: origin for name, origin in firsts.items() if not self._can_share(name, origin)}
        streamed = {name for name in wanted if self.stream is not None and self.stream.block_of(name) is not None}
        if self.stream is not None:
            self.stream.serve({name: self._piece(name, wanted.pop(name)) for name in sorted(streamed)})
        buffers = self._buffers_for(wanted)
        kept = self._unchanged(firsts)
        due = [self._piece(name, origin, buffers.named[name]) for name, origin in wanted.items() if name not in kept]
        if buffers.shared:
            dist.barrier()  # until the last rank has ceased to read
        self.bytes = gather(due, shared=buffers.shared)
        if buffers.shared:
            dist.barrier()
        self._hand_out(origins, first_name, kept, streamed)
        self._share_buffers()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - began

    def release(self) -> None:
        """Free the gathered parameters. `refresh` brings them back."""
        if self.stream is not None:
            self.stream.release()
        on_meta(self.module)
        self._buffers = None
        self._seen.clear()

    def held(self) -> list[Tensor]:
        """The parameters that are here now, live ones that it shares among them, and what blocks pass through."""
        here = [parameter.detach() for parameter in self.module.parameters() if not parameter.is_meta]
        return [*here, *(self.stream.memory if self.stream is not None else [])]

    def _piece(self, name: str, origin: Origin, target: Tensor | None = None) -> Piece:
        """What to gather; without a target, one that has the right shape but no memory."""
        if target is None:
            target = torch.empty(self.module.get_parameter(name).shape, device="meta")
        return Piece(origin.parameter, origin.adapter, target, self._cuts.get(name))

    def _can_share(self, name: str, origin: Origin) -> bool:
        """Whether the twin can use the live parameter's own memory."""
        live = origin.parameter
        return (
            origin.adapter is None
            and name not in self._cuts
            and dtensors.is_whole(live)
            and live.dtype == self.dtype
            and dtensors.local(live.detach()).device == self.device
        )

    def _buffers_for(self, wanted: Mapping[str, Origin]) -> _Buffers:
        """Memory for these parameters: what there is, if it is for the same ones."""
        if self._buffers is not None and self._buffers.named.keys() == wanted.keys():
            return self._buffers
        self._buffers = None
        self._seen.clear()
        shapes = {name: self.module.get_parameter(name).shape for name in wanted}
        sizes = {name: math.prod(shape) * self.dtype.itemsize for name, shape in shapes.items()}
        total = sum(-(-size // ALIGNED) * ALIGNED for size in sizes.values())
        alike = dist.world().size > 1 and self.device.type == "cpu" and not self._cuts
        common = share(total) if total and alike else None
        memory = torch.empty(total, dtype=torch.uint8, device=self.device) if common is None else common
        named, at = {}, 0
        for name in _neighbours(sizes):
            size = sizes[name]
            named[name] = memory[at : at + size].view(self.dtype).view(shapes[name])
            at += -(-size // ALIGNED) * ALIGNED
        self._buffers = _Buffers(memory, named, common is not None)
        return self._buffers

    def _unchanged(self, origins: Mapping[str, Origin]) -> set[str]:
        """The frozen parameters that the twin has as they are, on all ranks."""
        frozen = {name: o.parameter for name, o in origins.items() if o.adapter is None}
        seen = {name: _stamp(live) for name, live in frozen.items() if not live.requires_grad}
        kept = sorted(name for name, stamp in seen.items() if self._seen.get(name) == stamp)
        self._seen = seen
        agreed = len(set(dist.gather_objects(zlib.crc32(" ".join(kept).encode())))) == 1
        return set(kept) if agreed else set()

    def _hand_out(
        self,
        origins: Mapping[str, Origin],
        first_name: Mapping[tuple[int, int], str],
        kept: set[str],
        streamed: set[str],
    ) -> None:
        """Give the twin's modules their parameters, tied ones the same; notes whose are not `kept`."""
        assert self._buffers is not None
        parameters: dict[str, nn.Parameter] = {}
        self.changed = set()
        for name, owner, leaf in slots(self.module):
            origin = origins[name]
            first = first_name[id(origin.parameter), id(origin.adapter)]
            if first in streamed:
                continue
            if first not in parameters:
                tensor = self._buffers.named.get(first, dtensors.local(origin.parameter.detach()))
                parameters[first] = nn.Parameter(tensor, requires_grad=False)
            owner._parameters[leaf] = parameters[first]
            if first not in kept:
                self.changed.add(owner)

    def _share_buffers(self) -> None:
        """Buffers (rotary frequencies and the like) are the live module's, wherever it has values for them."""
        live = dict(named(self._source, "_buffers"))
        for path, owner in self.module.named_modules(remove_duplicate=False):
            for leaf, own in owner._buffers.items():
                theirs = live.get(join(path, leaf))
                if own is not None:
                    use = own if theirs is None or theirs.is_meta else theirs.detach()
                    owner._buffers[leaf] = use.to(self.device)


def _neighbours(names: Iterable[str]) -> list[str]:
    """In the order in which they lie: what a block's layers have under one name (their weights, their biases) together.

    So that layers which read the same input can be one product (`engine/generation/side_by_side.py`).
    """
    blocks: dict[str, dict[str, list[str]]] = {}
    for name in names:
        owner, _, leaf = name.rpartition(".")
        blocks.setdefault(owner.rpartition(".")[0], {}).setdefault(leaf, []).append(name)
    return [name for leaves in blocks.values() for together in leaves.values() for name in together]


def _stamp(live: Tensor) -> tuple[int, int, int]:
    """Changes where a parameter is written to in place, whole or this rank's part of it, or put elsewhere."""
    part = dtensors.local(live)  # without gradients: the part itself, which counts what is written to it
    return part.data_ptr(), part._version, live._version
