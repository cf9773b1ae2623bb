"""Blockwise int8: the error of a block is bounded by its own largest number, and what is not finite stays so."""

import pytest
import torch

from engine.parallel import int8


def round_trip(values: torch.Tensor) -> torch.Tensor:
    row = torch.full((int8.row_bytes(len(values)),), 255, dtype=torch.uint8)
    int8.encode(values, row)
    out = torch.empty_like(values)
    int8.decode(row, out)
    return out


@pytest.mark.parametrize("numbers", [1, 255, 256, 1000, 600 * 256 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_half_a_step_of_its_block(numbers: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numbers)
    sizes = 10.0 ** torch.randint(-6, 6, (-(-numbers // int8.BLOCK),), generator=generator)
    values = torch.randn(numbers, generator=generator) * sizes.repeat_interleave(int8.BLOCK)[:numbers]
    values = values.to(dtype)
    error = (round_trip(values).double() - values.double()).abs()
    for block, wrong in zip(values.double().split(int8.BLOCK), error.split(int8.BLOCK), strict=True):
        half_step = block.abs().max() / 127 / 2
        rounding = block.abs().max() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22)  # of the result's own type
        assert wrong.max() <= half_step + rounding


def test_zeros_and_the_largest_number_are_exact() -> None:
    values = torch.zeros(512)
    values[300] = -3.0
    assert torch.equal(round_trip(values), values)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so_and_spoils_its_block_alone(bad: float) -> None:
    values = torch.ones(3 * int8.BLOCK)
    values[int8.BLOCK + 7] = bad
    found = round_trip(values).split(int8.BLOCK)
    assert not torch.isfinite(found[1]).all()
    assert torch.equal(found[0], torch.ones(int8.BLOCK)) and torch.equal(found[2], torch.ones(int8.BLOCK))


def test_decoding_adds_where_asked() -> None:
    values = torch.linspace(-1, 1, 300)
    row = torch.empty(int8.row_bytes(300), dtype=torch.uint8)
    int8.encode(values, row)
    out = torch.full((300,), 5.0)
    int8.decode(row, out, add=True)
    torch.testing.assert_close(out, values + 5.0, atol=1 / 127, rtol=0)


def test_a_row_takes_little_more_than_a_byte_a_number() -> None:
    assert int8.row_bytes(256 * 100) == 256 * 100 + 4 * 100
    assert int8.row_bytes(1) == 8
