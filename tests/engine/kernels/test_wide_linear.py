"""fp32 products where MKL holds back: the numbers and gradients of nn.Linear, to float64's."""

import pytest
import torch
from torch import nn

from engine.kernels import wide_linear
from engine.kernels.products import product_of
from engine.kernels.wide_linear import Linear, serves, widen_linears
from engine.kernels_cpu import products

WAYS = {
    "c": pytest.mark.skipif(not products.takes(torch.float32), reason="no C compiler, or no AVX-512"),
    "onednn": pytest.mark.skipif(
        not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch was built without oneDNN"
    ),
}


@pytest.fixture(autouse=True, params=[pytest.param(way, marks=mark) for way, mark in WAYS.items()])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way, whatever the processor; products from a thousand operations on."""
    monkeypatch.setattr(wide_linear, "holds_back", lambda: True)
    monkeypatch.setattr(wide_linear, "LEAST", dict.fromkeys(WAYS, 1000))
    if request.param == "onednn":
        monkeypatch.setattr(products, "takes", lambda _: False)


@pytest.mark.parametrize("shape", [(37, 48), (2, 19, 48), (48,)])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(48, 33, bias=bias)
    wide = nn.Linear(48, 33, bias=bias).double()
    wide.load_state_dict(layer.state_dict())
    x = torch.randn(shape, requires_grad=True)
    calls = []
    wanted = wide(x.double())
    upstream = torch.randn(wanted.shape)
    inner = wide_linear.wide_product
    monkeypatch.setattr(wide_linear, "wide_product", lambda *given: calls.append(1) or inner(*given))
    widen_linears(layer)
    found = layer(x)
    gradients = torch.autograd.grad(found, [x, *layer.parameters()], upstream)
    theirs = torch.autograd.grad(wanted, [x, *wide.parameters()], upstream.double())
    assert len(calls) == 3  # forward, and both of backward
    for mine, exact in zip([found, *gradients], [wanted, *theirs], strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), atol=1e-5, rtol=1e-5)


def test_what_needs_no_gradient_gets_none() -> None:
    layer = nn.Linear(48, 33)
    layer.weight.requires_grad_(False)
    widen_linears(layer)
    x = torch.randn(20, 48, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(20, 48))
    torch.testing.assert_close(layer.bias.grad, torch.full((33,), 20.0))


def test_small_products_and_other_precisions_stay() -> None:
    x, weight = torch.randn(20, 48), torch.randn(48, 33)
    assert serves(x, weight)
    assert not serves(x[:0], weight)
    assert not serves(x[:, :1], weight[:1, :1])
    assert not serves(x.bfloat16(), weight.bfloat16())
    assert not serves(x.to("meta"), weight.to("meta"))


def test_only_plain_linear_layers_change() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Embedding(4, 4))
    widen_linears(model)
    assert [type(part) for part in model] == [Linear, Own, nn.Embedding]


def test_products_into_room() -> None:
    a, b = torch.randn(40, 30), torch.randn(30, 20)
    room = torch.empty(40, 20)
    assert product_of(a, b, room) is room
    torch.testing.assert_close(room.double(), a.double() @ b.double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(product_of(b.T, a.T).double(), b.double().T @ a.double().T, atol=1e-5, rtol=1e-5)
