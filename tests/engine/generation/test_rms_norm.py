"""RMS norms in C: the formula, the modules that they replace, and the modules that they do not."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from engine.generation.prepacked_linears import rms_norm_of
from engine.kernels_cpu.library import library

pytestmark = pytest.mark.skipif(library("norm") is None, reason="no C compiler")
BF16 = torch.bfloat16


class Ungated(nn.Module):
    """A norm with a second input, which the function in C does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64, dtype=BF16)), 1e-6

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        normal = nn.functional.rms_norm(x, (64,), self.weight, self.eps)
        return normal if gate is None else normal * gate


def norm_of(size: int, eps: float = 1e-6) -> LlamaRMSNorm:
    module = LlamaRMSNorm(size, eps=eps).to(BF16)
    nn.init.uniform_(module.weight, -2, 2)
    return module


@pytest.mark.parametrize("shape", [(1, 64), (1, 33, 384), (1, 5, 12, 32), (700, 96), (3, 7)])
@torch.no_grad()
def test_rows_have_the_norm_of_the_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(len(shape))
    module, x = norm_of(shape[-1], eps=0.1), torch.randn(shape).to(BF16)
    norm = rms_norm_of(module)
    assert norm is not None
    double = x.double()
    expected = double / (double.square().mean(-1, keepdim=True) + 0.1).sqrt() * module.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, rtol=2**-7, atol=1e-6)


@torch.no_grad()
def test_a_row_has_the_same_bits_beside_others_and_in_any_layout() -> None:
    torch.manual_seed(0)
    norm, x = rms_norm_of(norm_of(512)), torch.randn(512, 90).to(BF16).t()
    assert norm is not None
    rows = norm(x)
    assert all(torch.equal(rows[index], norm(x[index])) for index in range(90))


def test_other_modules_keep_their_forward() -> None:
    gated = Qwen3NextRMSNormGated(64).to(BF16)
    shifted = Gemma2RMSNorm(64).to(BF16)
    nn.init.ones_(shifted.weight)
    others = [gated, shifted, Ungated(), nn.LayerNorm(64, bias=False).to(BF16), norm_of(64).float(), nn.Linear(64, 1)]
    others.append(norm_of(64).to("meta"))
    assert [rms_norm_of(each) for each in others] == [None] * len(others)
