"""1-bit Adam (Tang et al., 2021, arXiv:2102.02888, algorithm 1): after a warm-up only signs of the momentum are sent.

For `freeze_step` steps it is AdamW on averaged gradients. Then the variance stays as it is, each rank updates the
momentum with its own gradient, and the ranks average the momenta in two compressed hops with error feedback:

    rank i:      m_i = b1 m + (1 - b1) g_i      c_i = C[m_i + e_i]          e_i <- m_i + e_i - c_i
    chunk owner: a = mean_i c_i + E             m <- C[a]                    E <- a - m

C is the sign with one scale a parameter (and chunk, on the way back). Moments are corrected for their bias as in Adam,
which keeps the step continuous where the variance freezes. A number whose gradient was zero all through the warm-up (an
embedding's row of a token that did not come) stays as it is from then on: every number gets a share of the momentum's
scale, which the paper's formula would divide by epsilon alone there. Error buffers belong to a number of ranks: at
another one they begin at zero again.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.compression.signs import pack, scale_of, unpack
from engine.parallel import dist, dtensors

BUCKET = 2**24  # numbers averaged in one collective
ERRORS = ("worker_error_of_", "server_error_of_")  # the states' names begin so; the number of ranks follows


@dataclass(frozen=True)
class _Segment:
    """One parameter's place in the rows that are sent: `numbers` of it, `part` (a multiple of 8) with each rank."""

    parameter: Tensor
    numbers: int
    part: int
    first: int  # byte of its signs in a row

    def cut(self, values: Tensor, ranks: int) -> Tensor:
        """A parameter's numbers as (ranks, part), zeros at the end."""
        cut = values.new_zeros(ranks * self.part)
        cut[: self.numbers] = values.reshape(-1)
        return cut.view(ranks, self.part)

    def with_rank(self, rank: int) -> int:
        """How many of the parameter's numbers lie in a rank's part."""
        return max(0, min(self.part, self.numbers - rank * self.part))


class OneBitAdam(torch.optim.Optimizer):
    """Parameters are whole on every rank and the same; their gradients are this rank's alone.

    `squared_norm` goes before clipping and `step`. Sent after the warm-up: 2 bits a parameter and step.
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
            raise ValueError(f"freeze_step must be at least 1, not {freeze_step}: the variance comes from the warm-up")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.freeze_step = freeze_step
        self._errors = tuple(f"{error}{dist.world().size}" for error in ERRORS)
        for parameter in self._parameters():
            self._make_state(parameter)

    @property
    def taken(self) -> int:
        """Steps done."""
        return int(self.state[self._parameters()[0]]["step"])

    @property
    def warming(self) -> bool:
        """Whether the coming step is one of the warm-up."""
        return self.taken < self.freeze_step

    @torch.no_grad()
    def squared_norm(self) -> float:
        """Average gradients over ranks while warming up; the sum of their squares.

        After the warm-up gradients stay apart. What is returned is then the mean over ranks, at least as much as the
        squared norm of the mean.
        """
        gradients = self._gradients()
        if self.warming:
            dist.average(gradients, bucket=BUCKET)
            return dtensors.squared_norm(gradients).item()
        squared = dtensors.squared_norm(gradients)
        dist.average([squared], bucket=1)
        return squared.item()

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        torch._foreach_mul_(self._gradients(), factor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        warming, after = self.warming, self.taken + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self._take_gradient(parameter, group["betas"], warming)
        if not warming and dist.world().size > 1:
            self._average_momenta([p for p in self._parameters() if p.grad is not None])
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"].fill_(after)
                if parameter.grad is not None:
                    self._move(parameter, group, after)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _gradients(self) -> list[Tensor]:
        return [dtensors.local(p.grad) for p in self._parameters() if p.grad is not None]

    def _make_state(self, parameter: Tensor) -> None:
        world, numbers = dist.world(), dtensors.local(parameter).numel()
        worker, server = self._errors
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {
            "step": step,
            **moments,
            worker: dist.rank_rows(dtensors.local(parameter.detach()).new_zeros(1, numbers)),
            server: dist.rank_rows(dtensors.local(parameter.detach()).new_zeros(1, _part(numbers, world.size))),
        }

    def _take_gradient(self, parameter: Tensor, betas: tuple[float, float], warming: bool) -> None:
        if parameter.grad is None:
            return
        gradient, state = dtensors.local(parameter.grad), self.state[parameter]
        dtensors.local(state["exp_avg"]).lerp_(gradient, 1.0 - betas[0])
        if warming:
            dtensors.local(state["exp_avg_sq"]).mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])

    def _average_momenta(self, parameters: list[Tensor]) -> None:
        """Both hops; leaves the same momentum on every rank."""
        segments = _segments(parameters, dist.world().size)
        received = dist.exchange_rows(self._compress_own(segments))
        gathered = dist.gather_rows(self._compress_part(segments, received))
        for index, segment in enumerate(segments):
            scales, signs = _scales(gathered, index), _signs(gathered, segment)
            whole = unpack(signs).mul_(scales[:, None]).view(-1)[: segment.numbers]
            momentum = dtensors.local(self.state[segment.parameter]["exp_avg"])
            momentum.copy_(whole.view(momentum.shape))

    def _compress_own(self, segments: list[_Segment]) -> Tensor:
        """Rows (ranks, bytes): what goes to the owner of each part."""
        rows = _rows(segments, dist.world().size)
        for index, segment in enumerate(segments):
            state = self.state[segment.parameter]
            error = dtensors.local(state[self._errors[0]]).view(-1)
            total = error.add_(dtensors.local(state["exp_avg"]).reshape(-1))
            scale = scale_of(total, segment.numbers)
            cut = segment.cut(total, dist.world().size)
            _scales(rows, index)[:] = scale
            _signs(rows, segment)[:] = pack(cut)
            total.sub_(torch.where(total >= 0, scale, -scale))
        return rows

    def _compress_part(self, segments: list[_Segment], received: Tensor) -> Tensor:
        """This rank's part of the mean of what it received, as one row (1, bytes)."""
        row = _rows(segments, 1)
        for index, segment in enumerate(segments):
            numbers = segment.with_rank(dist.world().rank)
            error = dtensors.local(self.state[segment.parameter][self._errors[1]]).view(-1)
            sent = unpack(_signs(received, segment)).mul_(_scales(received, index)[:, None])  # (ranks, part)
            total = error.add_(sent.mean(0))
            total[numbers:] = 0.0
            scale = scale_of(total, numbers)
            _scales(row, index)[:] = scale
            _signs(row, segment)[:] = pack(total[None])
            total[:numbers] -= torch.where(total[:numbers] >= 0, scale, -scale)
        return row

    def _move(self, parameter: Tensor, group: dict[str, Any], steps: int) -> None:
        (first, second), state = group["betas"], self.state[parameter]
        root = dtensors.local(state["exp_avg_sq"]).sqrt().div_((1.0 - second ** min(steps, self.freeze_step)) ** 0.5)
        root.masked_fill_(root == 0.0, math.inf)
        weights = dtensors.local(parameter).mul_(1.0 - group["lr"] * group["weight_decay"])
        rate = group["lr"] / (1.0 - first**steps)
        weights.addcdiv_(dtensors.local(state["exp_avg"]), root.add_(group["eps"]), value=-rate)


def _part(numbers: int, ranks: int) -> int:
    return -(-numbers // (8 * ranks)) * 8


def _segments(parameters: list[Tensor], ranks: int) -> list[_Segment]:
    """Places in a row: a fp32 scale for every parameter, then their signs."""
    segments, first = [], 4 * len(parameters)
    for parameter in parameters:
        numbers = dtensors.local(parameter).numel()
        segments.append(_Segment(parameter, numbers, _part(numbers, ranks), first))
        first += segments[-1].part // 8
    return segments


def _rows(segments: list[_Segment], ranks: int) -> Tensor:
    last = segments[-1]
    size = last.first + last.part // 8
    device = dtensors.local(last.parameter).device
    return torch.zeros(ranks, -(-size // 4) * 4, dtype=torch.uint8, device=device)  # scales want whole words


def _scales(rows: Tensor, index: int) -> Tensor:
    """(rows,) fp32: a parameter's scales, sharing memory."""
    return rows[:, 4 * index : 4 * index + 4].view(torch.float32)[:, 0]


def _signs(rows: Tensor, segment: _Segment) -> Tensor:
    """(rows, part / 8) bytes of a parameter's signs, sharing memory."""
    return rows[:, segment.first : segment.first + segment.part // 8]
