"""Values and gradients of fp32 linear layers that use the C kernel, against nn.Linear in float64."""

import pytest
import torch
from torch import Tensor, nn

from engine.kernels import products as module
from engine.kernels.products import WideLinear, product_of, uses_c, widen_linears


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use the C kernel from a thousand operations on, and record its calls. Without AVX-512, torch computes instead."""
    calls: list[int] = []
    inner = module.in_c.product

    def product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        calls.append(1)
        if module.in_c.supports(torch.float32):
            return inner(a, b, bias, out)
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b)

    monkeypatch.setattr(module.in_c, "product", product)
    monkeypatch.setattr(module, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(module, "MIN_OPERATIONS", 1000)
    return calls


@pytest.mark.parametrize(("shape", "bias"), [((37, 48), True), ((2, 19, 48), False), ((48,), True)])
def test_values_and_gradients(shape: tuple[int, ...], bias: bool, calls: list[int]) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(48, 33, bias=bias)
    wide = nn.Linear(48, 33, bias=bias).double()
    wide.load_state_dict(layer.state_dict())
    x = torch.randn(shape, requires_grad=True)
    expected = wide(x.double())
    upstream = torch.randn(expected.shape)
    widen_linears(layer)
    actual = layer(x)
    gradients = torch.autograd.grad(actual, [x, *layer.parameters()], upstream)
    theirs = torch.autograd.grad(expected, [x, *wide.parameters()], upstream.double())
    assert len(calls) == 3  # one product of the forward and two of the backward
    for value, exact in zip([actual, *gradients], [expected, *theirs], strict=True):
        torch.testing.assert_close(value.double(), exact.double(), atol=1e-5, rtol=1e-5)


def test_frozen_weights_get_no_gradient() -> None:
    layer = nn.Linear(48, 33)
    layer.weight.requires_grad_(False)
    widen_linears(layer)
    x = torch.randn(20, 48, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(20, 48))
    torch.testing.assert_close(layer.bias.grad, torch.full((33,), 20.0))


def test_small_products_and_other_precisions_use_pytorch() -> None:
    x, weight = torch.randn(20, 48), torch.randn(48, 33)
    assert uses_c(x, weight)
    assert not uses_c(x[:0], weight)
    assert not uses_c(x[:, :1], weight[:1, :1])
    assert not uses_c(x.bfloat16(), weight.bfloat16())
    assert not uses_c(x.to("meta"), weight.to("meta"))


def test_only_plain_linear_layers_change() -> None:
    class Subclass(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Subclass(4, 4), nn.Embedding(4, 4))
    widen_linears(model)
    assert [type(part) for part in model] == [WideLinear, Subclass, nn.Embedding]


def test_products_are_written_to_out() -> None:
    a, b, out = torch.randn(40, 30), torch.randn(30, 20), torch.empty(40, 20)
    assert product_of(a, b, out) is out
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=1e-5, rtol=1e-5)
