"""The inference model: a plain copy of a training module's architecture that holds the weights to generate with.

The training module is sharded, has hooks, and has full precision. The inference model has full parameters in the
compute precision and no hooks. `sync` gives it the live weights. A live parameter that is not sharded, has no
adapter, and has the right precision and device is shared, not copied. All others are copied by `weight_sync.py` into
one block of memory that `sync` allocates once. The live module is only read.

With `stream` the parameters of a block exist only while the block runs (`block_streaming.py`). With `tensor_parallel`
neighbouring ranks share a generator, and each rank receives only its slice of the split matrices.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.generation.weight_sync import (
    LiveParameter,
    aligned_bytes,
    base_name,
    copy_weight,
    divide_memory,
    live_parameters,
    split_regions,
)
from engine.host_memory import allocate
from engine.parallel import dist, dtensors, zero
from engine.parallel.dtensors import Region

if TYPE_CHECKING:
    from engine.generation.block_streaming import BlockStream


class InferenceModel:
    """The copy of a training module that generates: `module`, after `sync`.

    After each sync, `bytes` is the number of bytes that were copied (0 if everything is shared).
    """

    def __init__(
        self,
        blueprint: nn.Module,
        source: nn.Module,
        dtype: torch.dtype,
        *,
        tensor_parallel: int = 1,
        plan: Mapping[str, str] | None = None,
        stream: bool = False,
        parameters: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        """Use `blueprint`, a module of the architecture, as the inference model. It may be on the meta device.

        `source` is the live module, sharded by FSDP2 or plain, with or without LoRA layers. `dtype` is the precision to
        generate with, on this rank's device. Each group of `tensor_parallel` neighbouring ranks splits the module by
        `plan`, by default the plan of the model's class. With `parameters`, which yields name and full tensor of each
        live parameter on every rank, `source` is not used.
        Raises ValueError if `source` lacks a parameter of `blueprint`, or if the module cannot be split.
        """
        self.device = dist.world().device
        self.dtype, self.bytes = dtype, 0
        self.module = strip_for_inference(blueprint)
        self._regions: Mapping[str, Region] = {}  # of the parameters that tensor parallelism splits
        if tensor_parallel > 1:
            self._regions = split_regions(move_to_meta(self.module), tensor_parallel, plan)
        self.stream: BlockStream | None = None
        if stream:
            from engine.generation import block_streaming

            self.stream = block_streaming.BlockStream(self.module, dtype, self.device)
        self._source = source if parameters is None else self.module
        self._parameters = parameters
        self._names = {name: names for names in zero.parameter_names(self.module).values() for name in names}
        self._buffers: dict[str, Tensor] = {}
        self.release()
        live = live_parameters(self._source)
        missing = [name for name in self._names if name not in live]
        if missing:
            raise ValueError(
                f"the training module has no parameter {missing[0]}, which the inference model needs (and "
                f"{len(missing) - 1} more); both must have the same architecture"
            )

    @torch.no_grad()
    def sync(self) -> None:
        """Copy or share the current values of the live parameters. Collective."""
        live = self._live_parameters()
        names: dict[LiveParameter, list[str]] = {}  # tied parameters have several
        for name in self._names:
            names.setdefault(live[name], []).append(name)
        firsts = {of_parameter[0]: parameter for parameter, of_parameter in names.items()}
        to_copy = {name: parameter for name, parameter in firsts.items() if not self._can_share(name, parameter)}
        streamed = [] if self.stream is None else [name for name in to_copy if self.stream.block_of(name) is not None]
        if self.stream is not None:
            self.stream.start({name: to_copy.pop(name) for name in streamed})
        buffers = self._buffers_for(to_copy)
        for name, parameter in to_copy.items():
            copy_weight(parameter, buffers[name], self._regions.get(name))
        self.bytes = sum(buffer.nbytes for buffer in buffers.values())
        for name, parameter in firsts.items():
            if name not in streamed:
                values = buffers.get(name, dtensors.local(parameter.parameter.detach()))
                zero.assign_parameter(self.module, names[parameter], nn.Parameter(values, requires_grad=False))
        self._share_module_buffers()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Free the copied parameters. `sync` allocates and fills them again."""
        if self.stream is not None:
            self.stream.release()
        move_to_meta(self.module)
        self._buffers = {}

    def tensors(self) -> list[Tensor]:
        """Return the parameters that are in memory, shared live ones included, and the memory of streamed blocks."""
        parameters = [parameter.detach() for parameter in self.module.parameters() if not parameter.is_meta]
        return [*parameters, *(self.stream.memory if self.stream is not None else [])]

    def _live_parameters(self) -> dict[str, LiveParameter]:
        if self._parameters is None:
            return live_parameters(self._source)
        device, live = torch.device("cpu") if self.stream is not None else self.device, dict[str, LiveParameter]()
        for name, full in self._parameters():
            live |= dict.fromkeys(self._names.get(name, ()), LiveParameter(full.to(device, self.dtype), None))
        return live

    def _can_share(self, name: str, live: LiveParameter) -> bool:
        """Return whether the inference model can use the live parameter's own memory."""
        parameter = live.parameter
        return (
            live.lora is None
            and name not in self._regions
            and dtensors.is_full(parameter)
            and parameter.dtype == self.dtype
            and dtensors.local(parameter.detach()).device == self.device
        )

    def _buffers_for(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return memory for these parameters: the existing memory if it was allocated for the same names."""
        shapes = {name: self.module.get_parameter(name).shape for name in names}
        if self._buffers.keys() != shapes.keys():
            self._buffers = {}  # free the old memory before the new is allocated
            memory = allocate(aligned_bytes(shapes.values(), self.dtype), self.device)
            self._buffers = dict(zip(shapes, divide_memory(memory, shapes.values(), self.dtype), strict=True))
        return self._buffers

    def _share_module_buffers(self) -> None:
        """Use the live module's buffers (rotary frequencies, for example) where they have values."""
        live = {base_name(name): buffer for name, buffer in self._source.named_buffers(remove_duplicate=False)}
        for name, own in [*self.module.named_buffers(remove_duplicate=False)]:
            shared = live.get(base_name(name))
            used = own if shared is None or shared.is_meta else shared.detach()
            owner, _, leaf = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[leaf] = used.to(self.device)


def strip_for_inference(module: nn.Module) -> nn.Module:
    """Remove adapters from a module, in place, and switch off dropout, gradients and gradient checkpointing.

    An adapter over a packed weight remains: the packed weight is shared, and nothing can be merged into it.
    """
    for path, layer in [(path, child) for path, child in module.named_modules() if hasattr(child, "lora_A")]:
        if not zero.is_packed(layer.base_layer):  # type: ignore[arg-type]
            module.set_submodule(path, layer.base_layer)  # type: ignore[arg-type]
    module.eval().requires_grad_(False)
    if hasattr(module, "config"):
        module.config.use_cache = True  # type: ignore[union-attr]
    return module


def move_to_meta(module: nn.Module) -> nn.Module:
    """Free the memory of a module's parameters, in place; tied parameters stay tied."""
    for parameter, names in zero.parameter_names(module).items():
        zero.assign_parameter(module, names, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
    return module
