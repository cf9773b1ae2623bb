"""A language model's head split over the ranks of a tensor group by rows of the vocabulary (Shoeybi et al., 2019,
arXiv:1909.08053, section 3), and log-probabilities from it: neither its weight nor its logits are ever whole.

An embedding that the head is tied to is split with it: each rank looks up the tokens that are its own, and the sum over
ranks has them all. A forward of the head itself still gives whole logits, gathered, to whoever asks for those.

A head stays whole on every rank where its rows don't divide by the ranks, where it is no plain linear layer (an adapter
sits on it), and where a third module shares its weight.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine import kernels
from engine.parallel import autograd_collectives, dist, dtensors, tensor


def split_head(module: nn.Module, mesh: DeviceMesh) -> None:
    """Split the head of the outermost language model inside, in place, over the one-dimensional `mesh`."""
    for path, model in module.named_modules():
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
        if head is not None:
            embedding = model.get_input_embeddings()  # type: ignore[operator]
            if _can_be_split(module, head, embedding, mesh.size()):
                tied = embedding.weight is head.weight
                tensor.column_wise(f"{path}: the head", head, mesh, gather=True)
                if tied:
                    embedding._parameters["weight"] = head.weight
                    _own_tokens(embedding, mesh)
            return


def _can_be_split(module: nn.Module, head: nn.Module, embedding: nn.Module, ranks: int) -> bool:
    if type(head) is not nn.Linear or len(head.weight) % ranks:
        return False
    owners = [child for child in module.modules() if any(p is head.weight for p in child._parameters.values())]
    return all(owner is head or (owner is embedding and isinstance(owner, nn.Embedding)) for owner in owners)


def _own_tokens(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Let an embedding look up this rank's rows, and add what the others found."""
    group, inner = mesh.get_group(), embedding.forward
    rows = dtensors.local(embedding.weight.detach()).shape[0]
    first = mesh.get_local_rank() * rows

    def forward(ids: Tensor) -> Tensor:
        elsewhere = (ids < first) | (ids >= first + rows)
        padding = embedding.padding_idx
        embedding.padding_idx = None if padding is None or not 0 <= padding - first < rows else padding - first
        try:
            with tensor.replaced_parameters(embedding, dtensors.local):
                found = inner((ids - first).clamp(0, rows - 1))
        finally:
            embedding.padding_idx = padding  # initialisers of the whole module read it
        return autograd_collectives.summed(found.masked_fill(elsewhere[..., None], 0), group)

    embedding.forward = forward  # type: ignore[method-assign, assignment]


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` (N,) and entropies, (N,) fp32 each, from a head that is whole or split.

    hidden: (N, D); weight: (V, D); targets: (N,) int64; bias: (V,). `softcap` c bounds logits to c tanh(logit / c)
    (Gemma 2). Of a head that `split_head` split, every rank of the group calls, with the same hidden states and, in
    backward, the same upstream gradients. Formulas, precision: engine/kernels/token_logprobs.py. Raises ValueError
    where the shapes don't fit or the temperature is not positive.
    """
    if not isinstance(weight, DTensor):
        return kernels.token_logprobs(hidden, weight, targets, temperature, bias, softcap)
    mesh, rows = weight.device_mesh, dtensors.local(weight)
    group: Any = mesh.get_group()
    reduce = kernels.Reduce(partial(dist.all_reduce_max, group=group), partial(dist.all_reduce_sum, group=group))
    shift = None if bias is None else dtensors.local(bias)
    first = mesh.get_local_rank() * len(rows)
    return kernels.split_token_logprobs(hidden, rows, targets, first, reduce, temperature, shift, softcap)
