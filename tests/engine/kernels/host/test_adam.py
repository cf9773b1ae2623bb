"""One pass of Adam in C against torch's fused step and against the definition in float64."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.host import adam as kernel
from engine.kernels.host import library

pytestmark = pytest.mark.skipif(not kernel.available(), reason="no C compiler")
SIZES = (1, 31, 32, 200, 3 * library.SHARE + 77)
GROUP = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def states(size: int) -> list[Tensor]:
    """A parameter and two moments somewhere in the middle of training."""
    return [torch.randn(size), 0.1 * torch.randn(size), 0.01 * torch.rand(size)]


def defined(parameter: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, step: int, decoupled: bool) -> Tensor:
    """The papers' formulas in float64: the new parameter."""
    lr, (first, second), decay = GROUP["lr"], GROUP["betas"], GROUP["weight_decay"]
    weight, change = parameter.double(), gradient.double()
    if not decoupled:
        change = change + decay * weight
    mean = first * mean.double() + (1 - first) * change
    square = second * square.double() + (1 - second) * change**2
    hat, spread = mean / (1 - first**step), square / (1 - second**step)
    return weight - lr * hat / (spread.sqrt() + GROUP["eps"]) - (lr * decay * weight if decoupled else 0.0)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_a_step_is_what_the_papers_say(size: int, dtype: torch.dtype, decoupled: bool) -> None:
    torch.manual_seed(size)
    parameter, mean, square = states(size)
    gradient, target = torch.randn(size).to(dtype), torch.zeros(size, dtype=torch.bfloat16)
    wanted = defined(parameter, mean, square, 0.5 * gradient.double(), 3, decoupled)
    kernel.adam(parameter, mean, square, gradient, step=3, group=GROUP, decoupled=decoupled, factor=0.5, target=target)
    torch.testing.assert_close(parameter.double(), wanted, rtol=3e-7, atol=1e-8)
    assert torch.equal(target, parameter.bfloat16())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.4)])  # torch reckons a mean from its nearer side
@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_a_step_has_the_bits_of_torchs_vectors(
    kind: type[torch.optim.Adam], betas: tuple[float, float], decay: float
) -> None:
    vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # elsewhere torch rounds in other places
    torch.manual_seed(0)
    size = 64 * library.SHARE  # whole vectors for any number of threads
    weight = torch.nn.Parameter(torch.randn(size))
    optimizer = kind([weight], lr=0.01, betas=betas, weight_decay=decay, fused=True)
    parameter, mean, square = weight.detach().clone(), torch.zeros(size), torch.zeros(size)
    for step in (1, 2, 3):
        gradient = torch.randn(size)
        weight.grad = gradient * 0.37
        optimizer.step()
        kernel.adam(
            parameter, mean, square, gradient, step=step, group=optimizer.param_groups[0],
            decoupled=kind is torch.optim.AdamW, factor=0.37,
        )  # fmt: skip
    state = optimizer.state[weight]
    for ours, theirs in ((parameter, weight), (mean, state["exp_avg"]), (square, state["exp_avg_sq"])):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0 if vectors else 1e-6, atol=0 if vectors else 1e-7)


@pytest.mark.parametrize("shift", [0, 1, 31])
def test_bits_depend_neither_on_threads_nor_on_where_a_number_lies(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    size = 3 * library.SHARE + 77
    begun, gradient = states(size), torch.randn(size)

    def stepped(threads: int, shift: int) -> tuple[Tensor, Tensor]:
        monkeypatch.setattr(kernel, "team", lambda _: threads)
        parameter, mean, square = (torch.cat([torch.zeros(shift), state])[shift:] for state in begun)
        target = torch.full((size + shift + 5,), 7.0, dtype=torch.bfloat16)
        kernel.adam(
            parameter, mean, square, gradient, step=2, group=GROUP, decoupled=True,
            target=target[shift : shift + size],
        )  # fmt: skip
        assert target[:shift].eq(7).all() and target[shift + size :].eq(7).all()
        return parameter, target[shift : shift + size]

    alone, moved = stepped(1, 0), stepped(2, shift)
    assert torch.equal(alone[0], moved[0]) and torch.equal(alone[1], moved[1])


def test_what_is_no_number_stays_none() -> None:
    parameter, mean, square = states(40)
    gradient, target = torch.zeros(40), torch.zeros(40, dtype=torch.bfloat16)
    gradient[3], gradient[35] = math.inf, math.nan
    kernel.adam(parameter, mean, square, gradient, step=1, group=GROUP, decoupled=True, target=target)
    assert [at for at in range(40) if not math.isfinite(target[at])] == [3, 35]


def test_what_it_serves() -> None:
    half, full = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert kernel.serves(full, half) and kernel.serves(half, half) and kernel.serves(full, None)
    assert not kernel.serves(full, full) and not kernel.serves(full.half(), half)
