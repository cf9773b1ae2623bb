"""Layers whose weights lie side by side are one product; those that don't stay apart."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.generation.inference_model import InferenceModel
from engine.generation.side_by_side import WhereTheyLie, in_order, lay_out, side_by_side
from tests.engine.generation.families import build


def cut(memory: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    made, at = [], 0
    for shape in shapes:
        size = int(torch.Size(shape).numel())
        made.append(memory[at : at + size].view(shape))
        at += size
    return made


def test_neighbours_are_one_product_in_the_order_in_which_they_lie() -> None:
    one, two, three = cut(torch.randn(60), (2, 6), (3, 6), (5, 6))
    assert in_order([three, one, two], [None] * 3) == [1, 2, 0]
    biases = cut(torch.randn(10), (2,), (3,), (5,))
    assert in_order([two, one], [biases[1], biases[0]]) == [1, 0]
    x = torch.randn(4, 1, 6)
    product = WhereTheyLie([one, two, three], biases)
    right = torch.cat([functional.linear(x, w, b) for w, b in zip((one, two, three), biases, strict=True)], -1)
    torch.testing.assert_close(product(x), right)
    torch.testing.assert_close(product(x, relu=True), right.relu())
    torch.testing.assert_close(WhereTheyLie([one], [None])(x, relu=True), functional.linear(x, one).relu())
    one.mul_(2)  # nothing was copied
    torch.testing.assert_close(product(x)[..., :2], functional.linear(x, one, biases[0]))


def test_what_is_no_neighbour_is_not_joined() -> None:
    torch.manual_seed(0)
    one, gap, two = cut(torch.randn(60), (2, 6), (1, 6), (3, 6))
    assert side_by_side([one, two]) is None and side_by_side([gap, one]) is None
    assert side_by_side([one, gap.clone()]) is None
    assert side_by_side([one.view(3, 4), gap]) is None
    turned = torch.randn(2, 6, 6)
    assert side_by_side([*turned]) is not None and side_by_side([matrix.t() for matrix in turned]) is None
    biases = cut(torch.randn(10), (2,), (1,))
    assert in_order([one, gap], biases) == [0, 1]
    assert in_order([one, gap], [biases[0], None]) is None
    assert in_order([one, gap], [biases[0], biases[1].clone()]) is None
    x = torch.randn(3, 6)
    both = torch.cat([functional.linear(x, one, biases[0]), functional.linear(x, gap, None)], -1)
    for second in (gap, gap.clone()):
        torch.testing.assert_close(WhereTheyLie([one, second], [biases[0], None])(x), both)
        assert (both < 0).any()
        turned_round = WhereTheyLie([second, one], [biases[1], biases[0]])(x)
        torch.testing.assert_close(turned_round[:, 1:], both[:, :2])
        torch.testing.assert_close(WhereTheyLie([one, second], [biases[0], None])(x, relu=True), both.relu())


@torch.inference_mode()
def test_any_model_is_laid_out_so_and_stays_the_same() -> None:
    model: Any = build("opt")
    ids = torch.arange(6)[None]
    before, parameters = model(ids).logits, list(model.parameters())
    lay_out(model)
    assert torch.equal(model(ids).logits, before)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    attention = model.model.decoder.layers[1].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert in_order([layer.weight for layer in layers], [layer.bias for layer in layers]) == [1, 2, 0]
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight


def test_the_inference_model_lays_a_blocks_layers_side_by_side() -> None:
    for family in ("opt", "llama"):
        live = build(family)
        model = InferenceModel(build(family), live, torch.bfloat16, torch.device("cpu"))
        model.sync()
        module: Any = model.module
        for name, parameter in live.named_parameters():
            assert torch.equal(module.get_parameter(name), parameter.bfloat16()), name
        block = module.model.layers[0] if family == "llama" else module.model.decoder.layers[0]
        attention = block.self_attn
        layers = [attention.q_proj, attention.k_proj, attention.v_proj]
        order = in_order([layer.weight for layer in layers], [layer.bias for layer in layers])
        assert order == ([0, 1, 2] if family == "llama" else [1, 2, 0])
