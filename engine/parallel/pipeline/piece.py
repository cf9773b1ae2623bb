"""A rank's piece of a language model, cut in place: names, and the model's own forward, stay those of the whole model.

Which parameters belong in front of the blocks (to the first rank) is seen in a forward that ends at the first block;
what is neither there nor in a block (final norm, head) belongs to the last rank. On the other ranks a parameter is NaN,
in one number's memory: what a piece makes of it must never reach a result, and would not stay unseen if it did.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True, eq=False)
class Piece:
    """Which part of a module this is: `rank` of `size`, with these blocks.

    `tied` names the parameters that the first and the last rank both hold (an embedding that is the head as well);
    `width` is the hidden size D.
    """

    rank: int
    size: int
    blocks: tuple[nn.Module, ...]
    tied: frozenset[str]
    width: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


def piece_of(module: nn.Module) -> Piece | None:
    """Which piece a module that `cut` was called for is; None for others."""
    return vars(module).get("piece")


def cut(module: nn.Module, *, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Piece:
    """Leave of a module what pipeline rank `rank` of `size` computes, in place; parameters may be on the meta device.

    `dtype` is the precision of what is sent. Raises ValueError for a module that can't be cut so.
    """
    listed = _block_list(module, size)
    model = _language_model(module, listed)
    front, width = _in_front(model, listed[0])
    _check_loop(model, listed)
    shares = _dealt(len(listed), size)
    held = [_held(module, listed, shares, front, each) for each in range(size)]
    tied = _tied(module, held)
    for place, block in enumerate(listed):
        if place not in shares[rank]:
            listed[place] = Elsewhere(block)
    for owner in list(module.modules()):
        _let_go(owner, held[rank], dtype, device)
    blocks = tuple(listed[place] for place in shares[rank])
    piece = Piece(rank, size, blocks, tied, width)
    vars(module)["piece"] = piece  # with the module: sharded blocks refer to it
    return piece


class Elsewhere(nn.Module):
    """In the place of a block that another rank has; hands its input on.

    As a tuple of one: a model whose blocks return tuples takes the first, any other hands the tuple to its next block.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(block).items() if _is_plain(name, value)})

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)


def _is_plain(name: str, value: Any) -> bool:
    """What a model's loop may ask of a block: the kind of its attention, its number."""
    return not name.startswith("_") and isinstance(value, bool | int | float | str | None)


def _block_list(module: nn.Module, ranks: int) -> nn.ModuleList:
    found = list(_outermost_lists(module))
    if len(found) != 1:
        has = f"{type(module).__name__} has {len(found)}"
        raise ValueError(f"pipeline_parallel deals out one list of blocks, and {has}; use zero_stage=3 instead")
    if len(found[0]) < ranks:
        raise ValueError(f"pipeline_parallel={ranks} is more than the {len(found[0])} blocks that there are")
    return found[0]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _outermost_lists(child)
        elif any(True for _ in child.parameters()):
            yield child


def _language_model(module: nn.Module, listed: nn.ModuleList) -> nn.Module:
    """The backbone that runs the blocks: what transformers calls the base model."""
    for child in module.modules():
        base = getattr(child, "base_model", None)
        if isinstance(base, nn.Module) and hasattr(child, "config") and any(m is listed for m in base.modules()):
            return base
    raise ValueError(f"pipeline_parallel cuts language models of transformers, and {type(module).__name__} has none")


class _AtBlock(Exception):
    """The forward has come to the block."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = args
        self.keywords = kwargs


def _in_front(model: nn.Module, block: nn.Module) -> tuple[set[nn.Module], int]:
    """The modules that run before the first block, and the width of what it gets."""
    ran: set[nn.Module] = set()
    handles = [child.register_forward_pre_hook(lambda child, _: ran.add(child)) for child in model.modules()]
    try:
        hidden, *others = _inputs_of(block, model)
    finally:
        for handle in handles:
            handle.remove()
    if any(tensor.requires_grad for tensor in _tensors(others)):
        raise ValueError("pipeline_parallel sends hidden states only; this model's blocks get other learned inputs too")
    return ran, hidden.shape[-1]


def _check_loop(model: nn.Module, listed: nn.ModuleList) -> None:
    """Refuse a model that wants more of its blocks than hidden states, such as recurrent states."""
    blocks = list(listed)
    try:
        for place, block in enumerate(blocks[:-1]):
            listed[place] = Elsewhere(block)
        _inputs_of(blocks[-1], model)
    except Exception as problem:  # whatever a model's own code may say
        what = f"{type(model).__name__} wants more of its blocks ({problem}); use zero_stage=3 instead"
        raise ValueError(f"pipeline_parallel sends hidden states only; {what}") from problem
    finally:
        for place, block in enumerate(blocks):
            listed[place] = block


def _inputs_of(block: nn.Module, model: nn.Module) -> list[Any]:
    """What a block gets in a forward of two tokens with zeros for parameters, which are given no memory."""

    def stop(_: nn.Module, args: Any, kwargs: Any) -> None:
        raise _AtBlock(args, kwargs)

    handle = block.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    there = [t.device for t in [*model.buffers(), *model.parameters()] if not t.is_meta]
    device = there[0] if there else torch.device("cpu")
    flat = {n: torch.zeros(1, device=device, requires_grad=True).expand(p.shape) for n, p in model.named_parameters()}
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            functional_call(model, flat, kwargs={"input_ids": ids, "use_cache": False})
    except _AtBlock as reached:
        return [*reached.inputs, *reached.keywords.values()]
    finally:
        handle.remove()
    raise ValueError(f"pipeline_parallel: {type(model).__name__} does not run its blocks; use zero_stage=3 instead")


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)


def _dealt(blocks: int, ranks: int) -> list[range]:
    """Neighbouring blocks for each rank, as equally as can be; the last, which has the head, gets none of the rest."""
    base, more = divmod(blocks, ranks)
    ends = [base * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _held(module: nn.Module, listed: nn.ModuleList, shares: list[range], front: set[nn.Module], rank: int) -> set[int]:
    """The parameters (their ids) of a rank."""
    own = {id(parameter) for place in shares[rank] for parameter in listed[place].parameters()}
    inside = {child for block in listed for child in block.modules()}
    for child in module.modules():
        if child not in inside and rank == (0 if child in front else len(shares) - 1):
            own |= {id(parameter) for parameter in child.parameters(recurse=False)}
    return own


def _tied(module: nn.Module, held: list[set[int]]) -> frozenset[str]:
    """Names of the parameters that two ranks have, which must be the first and the last."""
    ends = held[0] & held[-1]
    for name, parameter in module.named_parameters():
        if sum(id(parameter) in own for own in held) > 1 and id(parameter) not in ends:
            raise ValueError(f"pipeline_parallel: blocks of two ranks share {name}; use fewer ranks, or zero_stage")
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in ends)


def _let_go(owner: nn.Module, own: set[int], dtype: torch.dtype, device: torch.device) -> None:
    """Take a module the parameters that are another rank's."""
    for leaf, parameter in list(owner._parameters.items()):
        if parameter is not None and id(parameter) not in own:
            del owner._parameters[leaf]
            nowhere = torch.full((), torch.nan, dtype=dtype, device=device).expand(parameter.shape)
            owner.register_buffer(leaf, nowhere, persistent=False)
