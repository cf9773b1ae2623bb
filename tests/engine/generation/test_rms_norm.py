"""The norm of a decode step against float64, and which modules it replaces."""

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from engine.generation.prepacked_linears import rms_norm_of


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize(("kind", "shift"), [(Qwen3RMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_norm_is_that_of_float64_and_a_row_does_not_depend_on_others(
    dtype: torch.dtype, error: float, kind: type[nn.Module], shift: float
) -> None:
    torch.manual_seed(0)
    module = kind(100, 1e-5).to(dtype)
    nn.init.normal_(module.weight)
    norm, x = rms_norm_of(module), torch.randn(3, 700, 100).to(dtype)
    assert norm is not None
    found, wide = norm(x), x.double()
    expected = (shift + module.weight.double()) * wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(found.double(), expected, atol=error, rtol=error)
    assert torch.equal(norm(x[1:2, 5])[0], found[1, 5])
    assert torch.equal(norm(x.transpose(0, 1)), found.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_are_found_by_their_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = 0.1 * torch.randn(5, 48).to(dtype)
    atol, rtol = (1e-6, 1e-5) if dtype == torch.float32 else (1e-2, 1e-2)
    for module in (Qwen3RMSNorm(48, 1e-5), Gemma2RMSNorm(48), nn.RMSNorm(48, eps=1e-6)):
        nn.init.normal_(module.weight)
        norm = rms_norm_of(module.to(dtype))
        assert norm is not None
        torch.testing.assert_close(norm(x), module(x), atol=atol, rtol=rtol)
        wide = torch.randn(2, 48, dtype=torch.float64)
        assert torch.equal(norm(wide), module(wide)), "another precision runs the module"
        module.forward = lambda x: 1.01 * x  # the attributes of a norm, other numbers
        assert rms_norm_of(module) is None
    assert rms_norm_of(nn.LayerNorm(48)) is None and rms_norm_of(nn.Linear(48, 1, bias=False)) is None
