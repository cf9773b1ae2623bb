"""Linear layers laid out for few rows: both ways give the product, and each is chosen where it should be."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.generation import packed
from engine.kernels_cpu import linear

BF16 = torch.bfloat16


@pytest.fixture(params=["in place", "oneDNN"])
def in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether our kernel reads the weights."""
    if request.param == "oneDNN":
        monkeypatch.setattr(linear, "way", lambda: linear.Way.LEAVE)
        if not packed.available(BF16):
            pytest.skip("this PyTorch packs no weights in bf16 here")
    elif linear.way() == linear.Way.LEAVE:
        pytest.skip("no C compiler, or a processor that is left to PyTorch")
    return request.param == "in place"


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    made = [nn.Linear(256, 128), nn.Linear(256, 96, bias=False), Conv1D(80, 256), nn.Linear(256, 64)]
    nn.init.normal_(made[2].bias)
    return nn.ModuleList(made).to(BF16)


@torch.no_grad()
def test_single_and_joint_products(in_place: bool) -> None:
    module, x = layers(), torch.randn(2, 3, 256).to(BF16)
    packs = packed.PackedLinears(module)
    packs.refresh()
    expected = [layer.double()(x.double()) for layer in layers()]
    assert len(packs) == 4 and all(packs.of(layer).in_place == in_place for layer in module)
    joint = packs.join([module[0], module[1], module[2]])
    assert joint.outs == [128, 96, 80] and joint.in_place == in_place
    for relu in (False, True):
        found = [*joint.product(x, relu).split(joint.outs, -1), packs.of(module[3]).product(x, relu)]
        for ours, right in zip(found, expected, strict=True):
            right = right.relu() if relu else right
            torch.testing.assert_close(ours.double(), right, atol=1e-5, rtol=2**-8)
    with packs.applied():
        for layer, right in zip(module, expected, strict=True):
            torch.testing.assert_close(layer(x).double(), right, atol=1e-5, rtol=2**-8)


@torch.no_grad()
def test_weights_are_copied_only_where_they_must_be(in_place: bool) -> None:
    module, x = layers(), torch.randn(4, 256).to(BF16)
    packs = packed.PackedLinears(module)
    packs.refresh()
    before = [packs.of(layer).product(x) for layer in module]
    for layer in module:
        layer.weight.mul_(2)
    follows = [not torch.equal(packs.of(layer).product(x), y) for layer, y in zip(module, before, strict=True)]
    assert follows == ([True, True, False, True] if in_place else [False] * 4)
    assert packed.copies(BF16) is not in_place and packed.copies(torch.float32)
    packs.refresh()
    assert all(not torch.equal(packs.of(layer).product(x), y) for layer, y in zip(module, before, strict=True))
    packs.release()
    assert len(packs) == 0


@torch.no_grad()
def test_many_rows_in_fp32_are_left_to_pytorch() -> None:
    layer, x = layers()[0].float(), torch.randn(257, 256)
    pack = packed.Pack([layer])
    assert pack.pays(1) and pack.pays(256) and not pack.pays(257)
    assert torch.equal(pack.forward(layer, x), layer(x)), "without being filled"


def test_matrices_of_few_outputs_are_not_ours(in_place: bool) -> None:
    narrow, wide = nn.Linear(1 << 14, 15).to(BF16), nn.Linear(1 << 10, 16).to(BF16)
    packs = packed.PackedLinears(nn.ModuleList([wide, narrow]))
    packs.refresh()
    assert packs.of(wide).in_place == in_place
    assert len(packs) == 1 or not packs.of(narrow).in_place
