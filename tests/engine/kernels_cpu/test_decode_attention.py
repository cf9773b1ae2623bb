"""decode_attention in C against the definition in float64, and its writes to the slot cache."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.decode_attention import Prompts
from engine.kernels_cpu import attention as host
from tests.engine.kernels.oracle import attention_in_float64, no_prompts, ragged_cache, with_prompts

pytestmark = pytest.mark.skipif(not host.supports(torch.float32), reason="no C compiler")
SHORT, LONG = [1, 7, 0, 23], [300, 1, 700, 513, 256, 257, 64, 65]  # a task takes 256 tokens, a block 64
ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, prompts: Prompts, slots: Tensor, lengths: Tensor, scale: float,
    **extras: Any,
) -> Tensor:  # fmt: skip
    """Call the kernel and return (B, H, Dv). The last token of each row, which the kernel writes, is in the cache."""
    attention = host.SlotAttention(prompts.keys, prompts.values, keys, values, scale=scale, **extras)
    last = (lengths - 1 - prompts.lengths).clamp(min=0)
    new = [cache[slots, :, last].transpose(0, 1)[None] for cache in (keys, values)]
    return attention(query.transpose(0, 1)[None], *new, host.addresses(slots, lengths, *prompts[2:]))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "sizes", "extras"),
    [
        ((4, 4), (12, None), {}),
        ((6, 2), (64, 24), {"window": 5}),
        ((8, 1), (80, None), {"softcap": 2.0, "window": 290}),
        ((6, 2), (80, None), {"softcap": 2.0}),
    ],
)
def test_matches_a_loop_in_float64(
    dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int | None], extras: dict, threads: int
) -> None:
    width, of_values = sizes
    for lengths in (SHORT, LONG):
        case = ragged_cache(
            *heads, width=width, of_values=of_values, lengths=lengths, capacity=max(lengths) + 1, dtype=dtype, **extras
        )
        ours, right = attend(**case), attention_in_float64(**case)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), right, atol=ERROR[dtype], rtol=ERROR[dtype])


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads() -> None:
    case = ragged_cache(6, 2, width=32, lengths=LONG, capacity=701, dtype=torch.bfloat16)
    before, full = torch.get_num_threads(), attend(**case)
    try:
        torch.set_num_threads(1)
        for row in range(len(LONG)):
            single = {name: case[name][row : row + 1] for name in ("query", "slots", "lengths")}
            prompts = no_prompts(case["keys"], case["values"], 1)
            assert torch.equal(attend(**{**case, **single, "prompts": prompts})[0], full[row])
    finally:
        torch.set_num_threads(before)


def test_mixed_precisions_are_refused() -> None:
    case = ragged_cache(4, 2, width=8, lengths=[3, 2], capacity=4)
    with pytest.raises(TypeError, match="all must be bf16 or all fp32"):
        attend(**{**case, "query": case["query"].half()})


def strided(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return (1, heads, N, size) with the strides that a fused qkv product gives."""
    heads, tokens, size = shape
    full = torch.randn(tokens, 3 * heads * size).to(dtype)
    return full[:, heads * size : 2 * heads * size].view(1, tokens, heads, size).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[9, 4, 30], [300, 257, 513]])
def test_tokens_are_written_before_they_are_attended_to(dtype: torch.dtype, lengths: list[int], threads: int) -> None:
    """The tensors are views of a fused qkv product. The first two tokens of the first row are in a prompt slot."""
    torch.manual_seed(0)
    keys, values = torch.randn(5, 2, 520, 16).to(dtype), torch.randn(5, 2, 520, 8).to(dtype)
    prompts = Prompts(
        torch.randn(2, 2, 6, 16).to(dtype),
        torch.randn(2, 2, 6, 8).to(dtype),
        torch.tensor([1, 0, 0]),
        torch.tensor([2, 0, 0]),
        torch.tensor([0, 1, 1]),
    )
    slots, ends, positions = (
        torch.tensor([4, 0, 2]),
        torch.tensor(lengths),
        [lengths[0] - 3, *(n - 1 for n in lengths[1:])],
    )
    query, key, value = (strided(h, 3, n, dtype=dtype) for h, n in ((4, 16), (2, 16), (2, 8)))
    right_keys, right_values = keys.clone(), values.clone()
    for row in range(3):
        right_keys[slots[row], :, positions[row]] = key[0, :, row]
        right_values[slots[row], :, positions[row]] = value[0, :, row]
    attention = host.SlotAttention(prompts.keys, prompts.values, keys, values, scale=0.3)
    out = attention(query, key, value, host.addresses(slots, ends, *prompts[2:]))
    assert torch.equal(keys, right_keys) and torch.equal(values, right_values)
    rows = query[0].transpose(0, 1)
    assert torch.equal(out[0], attend(rows, keys, values, prompts, slots, ends, 0.3))


LENGTHS, KEPT, FIRSTS = (
    [9, 300, 280, 297, 0, 290, 40, 33],
    [9, 270, 270, 270, 270, 12, 20, 20],
    [0, 1, 1, 1, 1, 5, 6, 6],
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "extras"), [((4, 4), {}), ((6, 2), {"window": 284}), ((6, 2), {"softcap": 2.0})])
def test_a_shared_prompt_gives_the_same_bits(
    dtype: torch.dtype, heads: tuple[int, int], extras: dict, threads: int
) -> None:
    case = ragged_cache(*heads, width=20, of_values=24, lengths=LENGTHS, capacity=301, dtype=dtype, **extras)
    split = with_prompts(case, FIRSTS, KEPT, room=272)
    right, ours = attention_in_float64(**split["alike"]), attend(**split["joined"])
    torch.testing.assert_close(ours.double(), right, atol=ERROR[dtype], rtol=ERROR[dtype])
    assert torch.equal(ours, attend(**split["apart"]))


def test_the_cache_must_be_contiguous() -> None:
    cache = torch.randn(2, 2, 8, 4).transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        host.SlotAttention(cache, cache, cache, cache, scale=1.0)
