"""Splitting a transformers model for pipeline parallelism: each rank keeps a range of blocks, in place.

Parameter names and the model's own forward stay those of the full model. The first rank also has the modules that run
before the blocks, which a forward that stops at the first block finds. The last rank has all other modules (final norm,
head). Every other parameter becomes a NaN buffer that shares the memory of one number: a result that used it by mistake
would be NaN.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True, eq=False)
class PipelineSplit:
    """The modules of one pipeline rank.

    `blocks` are the blocks of rank `rank` of `size`. `tied` names the parameters that the first and the last rank share
    (an embedding that is the head too). `hidden_size` is D.
    """

    rank: int
    size: int
    blocks: tuple[nn.Module, ...]
    tied: frozenset[str]
    hidden_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


class SkippedBlock(nn.Module):
    """Replaces a block of another rank; returns its input.

    The output is a tuple: models whose blocks return tuples read its first element, others pass it to the next block.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        attributes = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        # A model's loop may read plain attributes of a block, such as the kind of its attention.
        plain = {n: value for n, value in attributes.items() if isinstance(value, bool | int | float | str | None)}
        self.__dict__.update(plain)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)


def split_of(module: nn.Module) -> PipelineSplit | None:
    """Return the split that `split_model` has applied to a module, or None."""
    return vars(module).get("pipeline_split")


def split_model(module: nn.Module, *, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> PipelineSplit:
    """Remove in place what pipeline rank `rank` of `size` does not compute; parameters may be on the meta device.

    `dtype` is the precision of the hidden states. Raises ValueError for a module that cannot be split.
    """
    blocks = _block_list(module, size)
    model = _language_model(module, blocks)
    before, hidden_size = _modules_before(model, blocks[0])
    _check_hidden_states_suffice(model, blocks)
    ranges = _block_ranges(len(blocks), size)
    held = [_parameters_of_rank(module, blocks, ranges, before, each) for each in range(size)]
    tied = _tied(module, held)
    for index, block in enumerate(blocks):
        if index not in ranges[rank]:
            blocks[index] = SkippedBlock(block)
    for owner in list(module.modules()):
        _remove_parameters(owner, held[rank], dtype, device)
    split = PipelineSplit(rank, size, tuple(blocks[index] for index in ranges[rank]), tied, hidden_size)
    vars(module)["pipeline_split"] = split  # not an attribute assignment: that would register the blocks again
    return split


def _block_list(module: nn.Module, ranks: int) -> nn.ModuleList:
    found = list(_outermost_lists(module))
    if len(found) != 1:
        raise ValueError(
            f"pipeline_parallel={ranks} needs a model with one list of blocks; {type(module).__name__} has "
            f"{len(found)}. Use zero_stage=3 instead"
        )
    if len(found[0]) < ranks:
        raise ValueError(
            f"pipeline_parallel={ranks} is more than the {len(found[0])} blocks of the model. Use at most "
            f"pipeline_parallel={len(found[0])}"
        )
    return found[0]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _outermost_lists(child)
        elif any(True for _ in child.parameters()):
            yield child


def _language_model(module: nn.Module, blocks: nn.ModuleList) -> nn.Module:
    """Return the module that runs the blocks: transformers' base model."""
    for child in module.modules():
        base = getattr(child, "base_model", None)
        if isinstance(base, nn.Module) and hasattr(child, "config") and any(m is blocks for m in base.modules()):
            return base
    raise ValueError(
        f"pipeline_parallel needs a language model of transformers; {type(module).__name__} contains none. Use "
        "zero_stage=3 instead"
    )


class _BlockReached(Exception):
    """Stops a forward at a block, with the inputs of the block."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self.inputs = inputs


def _modules_before(model: nn.Module, block: nn.Module) -> tuple[set[nn.Module], int]:
    """Return the modules that run before the first block, and the hidden size."""
    ran: set[nn.Module] = set()
    handles = [child.register_forward_pre_hook(lambda child, _: ran.add(child)) for child in model.modules()]
    try:
        hidden, *others = _block_inputs(block, model)
    finally:
        for handle in handles:
            handle.remove()
    if any(tensor.requires_grad for tensor in _tensors(others)):
        raise ValueError(
            f"pipeline_parallel sends hidden states only; the blocks of {type(model).__name__} need other inputs with "
            "gradients. Use zero_stage=3 instead"
        )
    return ran, hidden.shape[-1]


def _check_hidden_states_suffice(model: nn.Module, blocks: nn.ModuleList) -> None:
    """Refuse a model whose loop reads more from its blocks than hidden states, such as recurrent states."""
    originals = list(blocks)
    try:
        for index, block in enumerate(originals[:-1]):
            blocks[index] = SkippedBlock(block)
        _block_inputs(originals[-1], model)
    except Exception as problem:  # any error of the model's own code
        raise ValueError(
            f"pipeline_parallel sends hidden states only; {type(model).__name__} needs more from its blocks "
            f"({problem}). Use zero_stage=3 instead"
        ) from problem
    finally:
        for index, block in enumerate(originals):
            blocks[index] = block


def _block_inputs(block: nn.Module, model: nn.Module) -> list[Any]:
    """Return the inputs of a block in a forward of two tokens. Parameters are zeros without memory."""

    def stop(_: nn.Module, args: Any, kwargs: Any) -> None:
        raise _BlockReached([*args, *kwargs.values()])

    handle = block.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    devices = [t.device for t in [*model.buffers(), *model.parameters()] if not t.is_meta]
    device = devices[0] if devices else torch.device("cpu")
    zeros = {n: torch.zeros(1, device=device, requires_grad=True).expand(p.shape) for n, p in model.named_parameters()}
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            functional_call(model, zeros, kwargs={"input_ids": ids, "use_cache": False})
    except _BlockReached as reached:
        return reached.inputs
    finally:
        handle.remove()
    raise ValueError(
        f"pipeline_parallel: the forward of {type(model).__name__} does not call its blocks. Use zero_stage=3 instead"
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _block_ranges(blocks: int, ranks: int) -> list[range]:
    """Return the consecutive blocks of each rank. The first ranks get the remainder: the last rank has the head."""
    base, remainder = divmod(blocks, ranks)
    ends = [base * (rank + 1) + min(rank + 1, remainder) for rank in range(ranks)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _parameters_of_rank(
    module: nn.Module, blocks: nn.ModuleList, ranges: list[range], before: set[nn.Module], rank: int
) -> set[int]:
    """Return the ids of a rank's parameters."""
    own = {id(parameter) for index in ranges[rank] for parameter in blocks[index].parameters()}
    in_blocks = {child for block in blocks for child in block.modules()}
    for child in module.modules():
        if child not in in_blocks and rank == (0 if child in before else len(ranges) - 1):
            own |= {id(parameter) for parameter in child.parameters(recurse=False)}
    return own


def _tied(module: nn.Module, held: list[set[int]]) -> frozenset[str]:
    """Return the names of the parameters that two ranks have. Raises ValueError if these are not the first and last."""
    ends = held[0] & held[-1]
    for name, parameter in module.named_parameters():
        if sum(id(parameter) in own for own in held) > 1 and id(parameter) not in ends:
            raise ValueError(
                f"pipeline_parallel={len(held)} would put {name} on two ranks, because two blocks share it. Use a "
                "smaller pipeline_parallel, or zero_stage=3"
            )
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in ends)


def _remove_parameters(owner: nn.Module, own: set[int], dtype: torch.dtype, device: torch.device) -> None:
    """Replace the parameters of other ranks by NaN buffers without memory."""
    for leaf, parameter in list(owner._parameters.items()):
        if parameter is not None and id(parameter) not in own:
            del owner._parameters[leaf]
            nan = torch.full((), torch.nan, dtype=dtype, device=device).expand(parameter.shape)
            owner.register_buffer(leaf, nan, persistent=False)
