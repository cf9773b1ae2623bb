"""Splitting a transformers model for pipeline parallelism: each rank keeps a range of blocks, in place.

Parameter names and the model's own forward stay those of the full model. The first rank also has the modules that run
before the blocks, which a forward that stops at the first block finds. The last rank has all other modules (final norm,
head). Every other parameter becomes a NaN buffer that shares the memory of one number: a result that used it by mistake
would be NaN.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.internals import tree_leaves
from engine.parallel import zero


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
        # A model's loop may read plain attributes of a block, such as the kind of its attention.
        vars(self).update({name: value for name, value in vars(block).items() if not name.startswith("_")})

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)


def split_model(module: nn.Module, *, rank: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Remove in place what pipeline rank `rank` of `size` does not compute; parameters may be on the meta device.

    The attribute `pipeline_split` of the module is then its `PipelineSplit`. `dtype` is the precision of the hidden
    states. Raises ValueError for a module that cannot be split.
    """
    blocks = _block_list(module, size)
    before, hidden_size = _run_to_last_block(module, blocks)
    indices_by_rank = [indices.tolist() for indices in torch.arange(len(blocks)).tensor_split(size)]
    rank_of = dict.fromkeys(before, 0)
    for block_rank, indices in enumerate(indices_by_rank):
        for index in indices:
            rank_of |= dict.fromkeys(blocks[index].modules(), block_rank)
    ranks_of = defaultdict[Tensor, set[int]](set)
    for child in module.modules():
        for p in child.parameters(recurse=False):
            ranks_of[p].add(rank_of.get(child, size - 1))
    shared = {name: ranks_of[p] for name, p in module.named_parameters() if len(ranks_of[p]) > 1}
    for name, ranks in shared.items():
        if ranks != {0, size - 1}:
            raise ValueError(
                f"pipeline_parallel={size} would put {name} on two ranks, because two blocks share it. Use a "
                "smaller pipeline_parallel, or zero_stage=3"
            )
    own_blocks = tuple(blocks[index] for index in indices_by_rank[rank])
    for index, block in enumerate(blocks):
        if index not in indices_by_rank[rank]:
            blocks[index] = SkippedBlock(block)
    nan = torch.full((), torch.nan, dtype=dtype, device=device)
    for owner in list(module.modules()):
        for leaf, parameter in list(owner._parameters.items()):
            if parameter is not None and rank not in ranks_of[parameter]:
                del owner._parameters[leaf]
                owner.register_buffer(leaf, nan.expand(parameter.shape), persistent=False)
    split = PipelineSplit(rank, size, own_blocks, frozenset(shared), hidden_size)
    vars(module)["pipeline_split"] = split  # not an attribute assignment: that would register the blocks again


def _block_list(module: nn.Module, ranks: int) -> nn.ModuleList:
    """Return the one outermost list of blocks of a module."""
    blocks = set(zero.blocks(module))
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and not blocks.isdisjoint(m)]
    if len(lists) != 1:
        raise ValueError(
            f"pipeline_parallel={ranks} needs a model with one list of blocks; {type(module).__name__} has "
            f"{len(lists)}. Use zero_stage=3 instead"
        )
    if len(lists[0]) < ranks:
        raise ValueError(
            f"pipeline_parallel={ranks} is more than the {len(lists[0])} blocks of the model. Use at most "
            f"pipeline_parallel={len(lists[0])}"
        )
    return lists[0]


def _run_to_last_block(module: nn.Module, blocks: nn.ModuleList) -> tuple[set[nn.Module], int]:
    """Return the modules that run before the blocks, and the hidden size.

    Runs the model on two tokens up to its last block, with all other blocks skipped. Parameters are zeros without
    memory. Raises ValueError if blocks need more from each other than hidden states (recurrent states, for example).
    """
    bases = (getattr(child, "base_model", None) for child in module.modules() if hasattr(child, "config"))
    model = next((m for m in bases if isinstance(m, nn.Module) and blocks in m.modules()), None)
    if model is None:
        raise ValueError(
            f"pipeline_parallel needs a language model of transformers; {type(module).__name__} contains none. Use "
            "zero_stage=3 instead"
        )
    ran, originals = set[nn.Module](), list(blocks)
    handles = [child.register_forward_pre_hook(lambda child, _: ran.add(child)) for child in model.modules()]
    handles.append(originals[-1].register_forward_pre_hook(_stop_at_block, prepend=True, with_kwargs=True))
    device = next((t.device for t in [*model.buffers(), *model.parameters()] if not t.is_meta), torch.device("cpu"))
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        for index, block in enumerate(originals[:-1]):
            blocks[index] = SkippedBlock(block)
        zeros = {
            name: torch.zeros(1, device=device, requires_grad=True).expand(p.shape)
            for name, p in model.named_parameters()
        }
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            functional_call(model, zeros, kwargs={"input_ids": ids, "use_cache": False})
        raise ValueError("its forward does not call them")
    except ForwardEnd as reached:
        hidden, *others = (leaf for leaf in tree_leaves(reached.value) if isinstance(leaf, Tensor))
        if any(tensor.requires_grad for tensor in others):
            raise _needs_more(model, "other inputs with gradients") from None
        return ran, hidden.shape[-1]
    except Exception as problem:  # any error of the model's own code
        raise _needs_more(model, problem) from problem
    finally:
        for handle in handles:
            handle.remove()
        for index, block in enumerate(originals):
            blocks[index] = block


class ForwardEnd(Exception):
    """Ends a forward at a block, with the inputs or the outputs of the block."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def _stop_at_block(_: nn.Module, args: Any, kwargs: Any) -> None:
    raise ForwardEnd([*args, *kwargs.values()])


def _needs_more(model: nn.Module, problem: object) -> ValueError:
    return ValueError(
        f"pipeline_parallel sends hidden states only; {type(model).__name__} needs more from its blocks ({problem}). "
        "Use zero_stage=3 instead"
    )
