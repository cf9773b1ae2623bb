"""Packed rows on a GPU: the variable-length kernel by itself and in complete models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine import EngineConfig, OptimizerConfig
from engine.config import LossScale
from engine.engine import Engine
from pipeline.data.batch import Documents, true_indices
from pipeline.models import attention
from pipeline.models.checks import verify
from pipeline.models.modules import Policy, packed_inputs
from tests.engine.generation.families import VOCABULARY, build
from tests.gpu import DEVICE, ON_GPU, needs_gpu, single_rank  # noqa: F401  a fixture

pytestmark = [*needs_gpu, pytest.mark.usefixtures("single_rank")]
DTYPES = [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_the_kernel_equals_the_operators(window: int | None, dtype: torch.dtype) -> None:
    if not ON_GPU:
        pytest.skip("the kernel of a GPU")
    documents = Documents((30, 20, 45, 1), (None, 0, None, None))
    inputs = [torch.randn(1, heads, 96, 64, device=DEVICE, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]
    how = attention._Options(0.125, window, None, 0.0)
    assert how.fits_kernel(inputs[0], inputs[2])
    actual = attention._by_kernel(*(t[0] for t in inputs), documents.ragged(DEVICE), how)
    expected = attention._one_by_one(*inputs, documents, how)[0]
    torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)
    upstream = torch.randn_like(actual)
    ours, theirs = (torch.autograd.grad(out, inputs, upstream) for out in (actual, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)


def test_packed_layout_is_computed_before_compiled_code() -> None:
    if not ON_GPU:
        pytest.skip("the kernel of a GPU")
    documents = Documents((3, 2))
    packed_inputs(torch.zeros(1, 5, dtype=torch.long, device=DEVICE), documents, None)
    assert len(documents._on_device) == 1


def mean_loss(module: nn.Module, batch: tuple[Tensor, Tensor, Documents | None]) -> tuple[Tensor, dict[str, Any]]:
    ids, scored, documents = batch
    return -module(ids, scored, documents=documents)[0].sum(), {}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "qwen3", "mistral", "gemma2"])
def test_a_step_over_packed_rows_equals_one_over_padded_rows(family: str, dtype: Any) -> None:
    """Compare loss and gradient norm. Heads of size 8 use the kernel. Soft caps and fp32 do not."""
    lengths = (12, 5, 9)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (len(lengths), max(lengths)), generator=generator).to(DEVICE)
    counts = torch.arange(max(lengths), device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    marks = counts.clone()
    marks[:, 0] = False
    documents = Documents(lengths)
    batches = [(ids, true_indices(marks), None), (ids[counts][None], true_indices(marks[counts]), documents)]
    updates = []
    for batch in batches:
        config = EngineConfig(dtype=dtype, loss_scale=LossScale(initial_power=2))
        engine = Engine(Policy(build(family)), config, optimizer=OptimizerConfig(lr=1e-4))  # type: ignore[arg-type]
        assert verify(engine, max_length=max(lengths))
        engine.module.eval()  # no dropout
        updates.append(engine.update([batch], mean_loss, float(marks.sum())))
    rough = 2e-4 if dtype == "fp32" else 5e-2
    padded, packed = updates
    assert packed.loss == pytest.approx(padded.loss, rel=rough)
    assert packed.grad_norm == pytest.approx(padded.grad_norm, rel=4 * rough)
