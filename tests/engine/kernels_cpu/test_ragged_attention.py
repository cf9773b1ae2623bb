"""Attention over packed sequences in C, forward and backward, against an explicit softmax in float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.kernels_cpu.attention import Families, ragged_attention
from engine.kernels_cpu.library import library

pytestmark = pytest.mark.skipif(library("ragged_attention") is None, reason="no C compiler, or switched off")

Members = Sequence[Sequence[tuple[int, int]]]
# Lengths around a block of queries (48), a panel of keys (64) and a section of a product (128); families of three.
MEMBERS: Members = [[(0, 5)], [(5, 130), (135, 1), (136, 77)], [(213, 300)], [(513, 1)], [(514, 49), (563, 3)]]
TOKENS = 566
SHAPES = [(4, 4, 64, None), (6, 2, 80, None), (4, 1, 24, 37), (2, 2, 128, 100), (3, 3, 7, 5), (2, 1, 16, 1)]


@pytest.mark.parametrize(("heads", "key_heads", "size", "window"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(
    heads: int, key_heads: int, size: int, window: int | None, threads: int, dtype: torch.dtype
) -> None:
    tensors = random_tensors((heads, key_heads, key_heads), size, dtype)
    upstream = torch.randn(TOKENS, heads, size, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = ragged_attention(*tensors, Families.of(MEMBERS), scale=0.2, window=window)
        assert out is not None
        results = [out, *torch.autograd.grad(out, tensors, upstream)]
    finally:
        torch.set_num_threads(before)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    plain = reference(*wide, MEMBERS, scale=0.2, window=window)
    expected = [plain, *torch.autograd.grad(plain, wide, upstream.double())]
    for mine, theirs in zip(results, expected, strict=True):
        within = (1e-6 if dtype == torch.float32 else 2**-8) * theirs.abs() + 2e-6 * theirs.abs().max()
        assert ((mine.double() - theirs).abs() <= within + 1e-6).all()


def test_a_sequence_gives_the_same_bits_at_any_position() -> None:
    query, key, value = random_tensors((4, 2, 2), 32, torch.bfloat16)
    full = ragged_attention(query, key, value, Families.of(MEMBERS), scale=0.2)
    single = ragged_attention(*(t[:, 213:513] for t in (query, key, value)), Families.of([[(0, 300)]]), scale=0.2)
    assert full is not None and single is not None
    assert torch.equal(full[213:513], single)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_give_the_numbers_of_the_full_sequence(dtype: torch.dtype, window: int | None) -> None:
    """Chunks of two sequences are cut at several positions. Keys and queries are in different rows."""
    query, key, value = (tensor.detach() for tensor in random_tensors((4, 2, 2), 24, dtype))
    full = ragged_attention(query, key, value, Families.of([[(5, 130)], [(213, 300)]]), scale=0.2, window=window)
    assert full is not None
    for first, second in ((1, 299), (77, 48), (129, 64)):
        positions = [*range(5 + first, 135), *range(213 + second, 513)]
        on = Families.continuing([(5, first, 130 - first, 0), (213, second, 300 - second, 130 - first)])
        actual = ragged_attention(query[:, positions], key, value, on, scale=0.2, window=window)
        assert actual is not None and torch.equal(actual, full[positions])


def test_nan_stays_in_its_family() -> None:
    tensors = random_tensors((2, 2, 2), 16, torch.float32)
    with torch.no_grad():
        tensors[1][:, 250] = torch.nan
    out = ragged_attention(*tensors, Families.of(MEMBERS), scale=0.2)
    assert out is not None
    assert out[250:513].isnan().all()
    assert not out[:250].isnan().any() and not out[513:].isnan().any()
    for gradient in torch.autograd.grad(out.sum(), tensors):
        assert gradient[:, 213:513].isnan().any()
        assert not gradient[:, :213].isnan().any() and not gradient[:, 513:].isnan().any()


def test_unsupported_cases_return_none() -> None:
    query, key, value = (tensor.detach() for tensor in random_tensors((2, 2, 2), 16, torch.float32))
    families = Families.of(MEMBERS)
    assert ragged_attention(query.half(), key.half(), value.half(), families, scale=1.0) is None
    assert ragged_attention(query, key, value.bfloat16(), families, scale=1.0) is None
    assert ragged_attention(query, key, value[..., :8], families, scale=1.0) is None


def random_tensors(heads: Sequence[int], size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return random (heads, N, size) tensors with the token-major strides of slices of one wide projection."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(TOKENS, sum(heads) * size, generator=generator).to(dtype)
    parts = row.split([count * size for count in heads], dim=1)
    return [part.unflatten(1, (-1, size)).transpose(0, 1).requires_grad_() for part in parts]


def reference(
    query: Tensor, key: Tensor, value: Tensor, members: Members, *, scale: float, window: int | None
) -> Tensor:
    """Return (N, heads, size), computed by one softmax for each sequence."""
    key, value = (t.repeat_interleave(len(query) // len(t), 0) for t in (key, value))
    parts = []
    for (first, shared), *others in members:
        for position, (start, length) in enumerate([(first, shared), *others]):
            seen = torch.arange(start, start + length)
            if position:
                seen = torch.cat([torch.arange(first, first + shared), seen])
            distance = torch.arange(len(seen) - length, len(seen))[:, None] - torch.arange(len(seen))
            hidden = (distance < 0) | (distance >= (window or len(seen)))
            scores = (scale * query[:, start : start + length] @ key[:, seen].mT).masked_fill(hidden, -torch.inf)
            parts.append((scores.softmax(-1) @ value[:, seen]).transpose(0, 1))
    return torch.cat(parts)
