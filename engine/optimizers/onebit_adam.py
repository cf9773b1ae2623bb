"""1-bit Adam (Tang et al., 2021, arXiv:2102.02888, algorithm 1): after a warm-up, ranks send signs of the momentum.

For `freeze_step` steps the optimizer is AdamW on averaged gradients. Then the variance is frozen, each rank updates the
momentum with its own gradient, and the ranks average the momenta in two compressed hops with error feedback:

    rank i:      m_i = b1 m + (1 - b1) g_i      c_i = C[m_i + e_i]          e_i <- m_i + e_i - c_i
    chunk owner: a = mean_i c_i + E             m <- C[a]                    E <- a - m

    C[x] = |x|_2 / sqrt(n) sign(x),  sign(0) = 1 (section 4), with one scale per parameter, and per chunk in hop two

Moments are corrected for their bias as in Adam, so the step is continuous where the variance freezes. An element whose
gradient was zero during the whole warm-up (the embedding of an unused token) does not change afterwards: its variance
is zero, and its share of the momentum's scale would be divided by epsilon. The errors e and E belong to one number of
ranks; at another number they start at zero again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from engine.optimizers import ERRORS
from engine.parallel import collectives, dist, dtensors, meshes


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam for parameters that are replicated on all ranks, with gradients that are local to each rank.

    Call `squared_norm` before clipping and `step`. After the warm-up a step sends 2 bits per parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int = 100_000,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(f"freeze_step={freeze_step} is below 1: the warm-up estimates the variance. Use 1 or more")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.freeze_step = freeze_step
        ranks = dist.world().size
        self._errors = tuple(f"{prefix}{ranks}" for prefix in ERRORS)
        for parameter in self._parameters():
            local = dtensors.local(parameter.detach())
            sizes = (local.numel(), _chunk(local.numel(), ranks))
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),  # on the host, which reads it in each step
                **{name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")},
                **{n: _rank_rows(local.new_zeros(1, size)) for n, size in zip(self._errors, sizes, strict=True)},
            }

    @property
    def steps(self) -> int:
        """Return the number of steps done."""
        return int(self.state[self._parameters()[0]]["step"])

    @property
    def is_warming_up(self) -> bool:
        """Return whether the next step belongs to the warm-up."""
        return self.steps < self.freeze_step

    @torch.no_grad()
    def squared_norm(self) -> float:
        """Average the gradients over ranks during the warm-up; return the sum of their squares.

        After the warm-up gradients stay local. The result is then the mean over ranks, an upper bound of the squared
        norm of the mean gradient.
        """
        gradients = self._gradients()
        if self.is_warming_up:
            for gradient in gradients:
                collectives.all_reduce(gradient.div_(dist.world().size), kind="reduce")
            return dtensors.squared_norm(gradients).item()
        squared = dtensors.squared_norm(gradients)
        collectives.all_reduce(squared.div_(dist.world().size), kind="reduce")
        return squared.item()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        is_warming_up, steps = self.is_warming_up, self.steps + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update_moments(parameter, group["betas"], is_warming_up)
        with_gradient = [p for p in self._parameters() if p.grad is not None]
        if not is_warming_up and dist.world().size > 1 and with_gradient:
            self._average_momenta(with_gradient)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"].fill_(steps)
                if parameter.grad is not None:
                    self._update(parameter, group, steps)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [dtensors.local(p.grad) for p in self._parameters() if p.grad is not None]

    def _state(self, parameter: Tensor, name: str) -> Tensor:
        """Return the local part of a state, flat."""
        return dtensors.local(self.state[parameter][name]).view(-1)

    def _update_moments(self, parameter: Tensor, betas: tuple[float, float], is_warming_up: bool) -> None:
        if parameter.grad is None:
            return
        gradient = dtensors.local(parameter.grad).reshape(-1)
        self._state(parameter, "exp_avg").lerp_(gradient, 1.0 - betas[0])
        if is_warming_up:
            square = self._state(parameter, "exp_avg_sq")
            square.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])

    def _average_momenta(self, parameters: Sequence[Tensor]) -> None:
        """Set every momentum to the compressed mean over ranks."""
        ranks, rank = dist.world().size, dist.world().rank
        sent = [self._compress_momentum(parameter, ranks) for parameter in parameters]
        widths = [rows.shape[1] for rows in sent]
        means = []
        received = collectives.all_to_all(torch.cat(sent, 1), kind="reduce")
        for parameter, rows in zip(parameters, received.split(widths, 1), strict=True):
            total = self._state(parameter, self._errors[1])
            total.add_(decompress(rows).mean(0))
            size = max(0, min(len(total), dtensors.local(parameter).numel() - rank * len(total)))
            total[size:] = 0.0  # padding
            means.append(compress(total, size, rows=1))
        row = torch.cat(means, 1)
        gathered = row.new_empty(ranks, row.shape[1])
        collectives.all_gather(gathered.view(-1), row.view(-1), kind="reduce")
        for parameter, rows in zip(parameters, gathered.split(widths, 1), strict=True):
            momentum = self._state(parameter, "exp_avg")
            momentum.copy_(decompress(rows).view(-1)[: len(momentum)])

    def _compress_momentum(self, parameter: Tensor, ranks: int) -> Tensor:
        """Return the compressed sum of momentum and error, (ranks, bytes), and store the new error."""
        total = self._state(parameter, self._errors[0]).add_(self._state(parameter, "exp_avg"))
        size = total.numel()
        padded = total.new_zeros(ranks * _chunk(size, ranks))
        padded[:size] = total
        compressed = compress(padded, size, rows=ranks)
        total.copy_(padded[:size])
        return compressed

    def _update(self, parameter: Tensor, group: dict[str, Any], steps: int) -> None:
        first, second = group["betas"]
        root = self._state(parameter, "exp_avg_sq").sqrt()
        root.div_((1.0 - second ** min(steps, self.freeze_step)) ** 0.5).masked_fill_(root == 0.0, math.inf)
        weights = dtensors.local(parameter).view(-1).mul_(1.0 - group["lr"] * group["weight_decay"])
        rate = group["lr"] / (1.0 - first**steps)
        weights.addcdiv_(self._state(parameter, "exp_avg"), root.add_(group["eps"]), value=-rate)


def scale_of(values: Tensor, size: int) -> Tensor:
    """Return |x|_2 / sqrt(size): () fp32. `values` may be padded with zeros; the scale of no elements is 0."""
    return torch.linalg.vector_norm(values) / max(size, 1) ** 0.5


def pack(values: Tensor) -> Tensor:
    """Return the signs of (..., 8 k) values as (..., k) bytes, the first value in the lowest bit."""
    bits = (values >= 0).view(torch.uint8).unflatten(-1, (-1, 8))
    return (bits << torch.arange(8, dtype=torch.uint8, device=values.device)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Return (..., k) bytes as (..., 8 k) fp32 values 1 and -1."""
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.float().mul_(2.0).sub_(1.0).flatten(-2)


def compress(values: Tensor, size: int, *, rows: int) -> Tensor:
    """Return C[values] as bytes (rows, 4 + k), and subtract C[values] from the first `size` values in place.

    Each row has the fp32 scale of all values and the signs of its share of them. `values` is padded behind `size`.
    """
    scale, signs = scale_of(values, size), pack(values)
    values[:size] -= torch.where(values[:size] >= 0, scale, -scale)
    return torch.cat([scale.repeat(rows, 1).view(torch.uint8), signs.view(rows, -1)], 1)


def decompress(rows: Tensor) -> Tensor:
    """Return the values (rows, 8 k) of compressed rows (rows, 4 + k)."""
    return unpack(rows[:, 4:]).mul_(rows[:, :4].contiguous().view(torch.float32))


def _chunk(size: int, ranks: int) -> int:
    """Return the elements of a parameter that each rank averages: a multiple of 8."""
    return -(-size // (8 * ranks)) * 8


def _rank_rows(row: Tensor) -> Tensor:
    """Return the rows (1, n) of all ranks as one tensor (ranks, n), so that a checkpoint has all of them."""
    ranks = meshes.zero_mesh(stage=0)["replicate"]
    return DTensor.from_local(row, ranks, [Shard(0)], run_check=False)
