"""The Triton source of write_tokens against plain loops: nothing but the new tokens' places changes."""

import pytest
import torch

from engine.kernels import write_tokens as picked
from engine.kernels.decode_rows import write_tokens as plain
from engine.kernels_triton import decode_rows as kernel
from tests.engine.kernels.oracle import DEVICE


@pytest.mark.parametrize("write", [kernel.write_tokens, plain, picked])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16, 16), (20, 24)])
def test_new_tokens_go_where_they_belong(write: object, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    torch.manual_seed(1)
    keys, values = (torch.randn(5, 3, 7, size).to(DEVICE, dtype) for size in sizes)
    slots, positions = torch.tensor([[4, 6], [0, 0], [2, 3]]).unbind(1)  # columns of a table, as a step has them
    # As projections give them: parts of one row, heads side by side.
    row = torch.randn(3, 3 * sum(sizes)).to(DEVICE, dtype)
    key, value = (part.unflatten(1, (3, -1)) for part in row.split([3 * size for size in sizes], dim=1))
    wanted = keys.clone(), values.clone()
    for cache, new in zip(wanted, (key, value), strict=True):
        for b in range(3):
            for head in range(3):
                cache[slots[b], head, positions[b]] = new[b, head]
    write(key, value, keys, values, slots.to(DEVICE), positions.to(DEVICE))  # type: ignore[operator]
    assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])


def test_no_sequences() -> None:
    cache = torch.ones(2, 1, 4, 16, device=DEVICE)
    none, nowhere = cache.new_empty(0, 1, 16), torch.empty(0, dtype=torch.int64, device=DEVICE)
    kernel.write_tokens(none, none, cache, cache, nowhere, nowhere)
    assert (cache == 1).all()


def test_heads_a_billion_numbers_apart() -> None:
    """2^31 and more: beyond what 32 bits tell. Pages that nobody writes take no memory."""
    keys = torch.empty(2**31 + 16, dtype=torch.int8, device=DEVICE).as_strided((1, 3, 1, 16), (2**31, 2**30, 16, 1))
    values = torch.zeros(1, 3, 1, 16, dtype=torch.int8, device=DEVICE)
    new = torch.full((1, 3, 16), 7, dtype=torch.int8, device=DEVICE)
    nowhere = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    kernel.write_tokens(new, new, keys, values, nowhere, nowhere)
    assert (keys == 7).all() and (values == 7).all()
