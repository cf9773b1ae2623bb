"""decode_attention in C against the definition in float64, and what it does around it for the slot cache."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine import kernels
from engine.kernels_cpu import decode_attention as host
from tests.engine.kernels.oracle import attention_in_float64, ragged_cache

pytestmark = pytest.mark.skipif(not host.available(), reason="no C compiler")
SHORT, LONG = [1, 7, 0, 23], [300, 1, 700, 513, 256, 257, 64, 65]  # a task takes 256 tokens, a block 64
ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("sizes", [(12, None), (64, 24), (80, None)])
@pytest.mark.parametrize(
    "extras", [{}, {"window": 5}, {"window": 290}, {"alibi": True, "window": 9}, {"alibi": True}, {"softcap": 2.0}]
)
def test_matches_a_loop_in_float64(
    dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int | None], extras: dict, threads: int
) -> None:
    width, of_values = sizes
    for lengths in (SHORT, LONG):
        case = ragged_cache(
            *heads, width=width, of_values=of_values, lengths=lengths, capacity=max(lengths) + 1, dtype=dtype, **extras
        )
        ours, right = host.decode_attention(**case), attention_in_float64(**case)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), right, atol=ERROR[dtype], rtol=ERROR[dtype])


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads() -> None:
    case = ragged_cache(6, 2, width=32, lengths=LONG, capacity=701, dtype=torch.bfloat16)
    before, whole = torch.get_num_threads(), host.decode_attention(**case)
    try:
        torch.set_num_threads(1)
        for row in range(len(LONG)):
            alone = {name: case[name][row : row + 1] for name in ("query", "slots", "lengths")}
            assert torch.equal(host.decode_attention(**{**case, **alone})[0], whole[row])
    finally:
        torch.set_num_threads(before)


def test_the_public_name_takes_it_for_the_types_it_serves() -> None:
    for dtype, picked in ((torch.float32, host.decode_attention), (torch.float16, None)):
        assert kernels._for_device("decode_attention", torch.empty(1, dtype=dtype)) is picked


def test_what_points_outside_the_cache_is_refused() -> None:
    case = ragged_cache(4, 2, width=8, lengths=[3, 2], capacity=4)
    for name, numbers in (("slots", [0, 4]), ("slots", [-1, 0]), ("lengths", [3, 5]), ("lengths", [-1, 2])):
        with pytest.raises(IndexError, match=name):
            host.decode_attention(**{**case, name: torch.tensor(numbers)})
    with pytest.raises(TypeError, match="all must be bf16 or all fp32"):
        host.decode_attention(**{**case, "query": case["query"].half()})
    with pytest.raises(ValueError, match="do not fit"):
        host.decode_attention(**{**case, "query": case["query"][:, :3]})


def strided(*shape: int, dtype: torch.dtype) -> Tensor:
    """(1, heads, N, size) as a joint product of queries, keys and values leaves it."""
    heads, tokens, size = shape
    whole = torch.randn(tokens, 3 * heads * size).to(dtype)
    return whole[:, heads * size : 2 * heads * size].view(1, tokens, heads, size).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[9, 4, 30], [300, 257, 513]])
def test_tokens_are_written_before_they_are_seen(dtype: torch.dtype, lengths: list[int], threads: int) -> None:
    """Three single queries, then two tokens that are only written; the model's tensors are no whole ones."""
    torch.manual_seed(0)
    keys, values = torch.randn(5, 2, 520, 16).to(dtype), torch.randn(5, 2, 520, 8).to(dtype)
    slots, ends = torch.tensor([4, 0, 2, 1, 1]), torch.tensor([*lengths, 6, 7])
    query, key, value = (strided(h, 6, n, dtype=dtype) for h, n in ((4, 16), (2, 16), (2, 8)))
    right_keys, right_values = keys.clone(), values.clone()
    for token in range(5):
        right_keys[slots[token], :, ends[token] - 1] = key[0, :, token]
        right_values[slots[token], :, ends[token] - 1] = value[0, :, token]
    out = torch.full((1, 6, 4, 8), 7.0).to(dtype)
    host.write_and_attend(query, key, value, keys, values, slots, ends, 3, out, 0.3)
    assert torch.equal(keys, right_keys) and torch.equal(values, right_values)
    right = attention_in_float64(query[0].transpose(0, 1)[:3], keys, values, slots[:3], ends[:3], 0.3)
    torch.testing.assert_close(out[0, :3].double(), right, atol=ERROR[dtype], rtol=ERROR[dtype])
    assert bool((out[0, 3:] == 7).all())


@pytest.mark.parametrize("extras", [{}, {"softcap": 3.0}, {"window": 600}])
@pytest.mark.parametrize("prompt", [11, 300])
def test_what_rows_begin_with_alike_is_read_from_the_first(prompt: int, extras: dict, threads: int) -> None:
    """Rows 1 to 3 begin alike, row 0 and 4 are alone; the other copies of the prompt hold NaN here."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, prompt + 1, prompt + 280, prompt + 2, 20])
    keys, values = torch.randn(2, 6, 2, 600, 16)
    slots = torch.tensor([5, 3, 0, 1, 2])
    query, key, value = strided(4, 5, 16, dtype=torch.float32), *torch.randn(2, 1, 2, 5, 16)
    for slot in (0, 1):
        keys[slot, :, :prompt] = keys[3, :, :prompt]
        values[slot, :, :prompt] = values[3, :, :prompt]
    apart, together = torch.zeros(2, 1, 5, 4, 16)
    host.write_and_attend(query, key, value, keys, values, slots, lengths, 5, apart, 0.3, **extras)
    keys[:2, :, :prompt] = values[:2, :, :prompt] = torch.nan
    families = torch.tensor([[0, 0], [1, prompt], [1, prompt], [1, prompt], [4, 0]])
    host.write_and_attend(
        query, key, value, keys, values, slots, lengths, 5, together, 0.3, families=families, **extras
    )
    torch.testing.assert_close(together, apart, atol=2e-6, rtol=0)


def test_the_cache_must_lie_in_one_piece() -> None:
    query, cache, ends = torch.randn(1, 2, 1, 8), torch.randn(2, 2, 8, 4), torch.tensor([1])
    with pytest.raises(ValueError, match="contiguous"):
        host.write_and_attend(
            query, query, query, cache.transpose(2, 3), cache.transpose(2, 3), ends, ends, 1, query.transpose(1, 2), 1.0
        )
