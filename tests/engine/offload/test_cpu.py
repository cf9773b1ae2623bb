"""Chunked Adam steps on the CPU against the classes of torch."""

import pytest
import torch

from engine.offload import cpu
from engine.offload.cpu import MOMENTS, AdamStep

SIZE = 5 * 64 + 7


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_equals_torch(kind: type[torch.optim.Adam], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CHUNK", 64 // torch.get_num_threads())
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(SIZE))
    states = {"parameter": plain.detach().clone(), "step": torch.zeros(())}
    states |= {name: torch.zeros(SIZE) for name in MOMENTS}
    optimizer = kind([plain], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, eps=1e-6, fused=True)
    assert AdamStep.supports(optimizer, torch.device("cpu"))
    ours, target = AdamStep(), torch.zeros(SIZE, dtype=torch.bfloat16)
    for _ in range(3):
        gradient = torch.randn(SIZE).to(dtype)
        ours.step(optimizer, optimizer.param_groups[0], states, gradient, 0.5, target)
        plain.grad = gradient.float() * 0.5
        optimizer.step()
        torch.testing.assert_close(states["parameter"], plain.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(target, states["parameter"].bfloat16())
    assert states["step"].item() == 3


def test_unsupported_optimizers() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    device = torch.device("cpu")
    assert not AdamStep.supports(torch.optim.AdamW([weight], fused=True, amsgrad=True), device)
    assert not AdamStep.supports(torch.optim.AdamW([weight]), device)
    assert not AdamStep.supports(torch.optim.NAdam([weight]), device)
    assert not AdamStep.supports(torch.optim.AdamW([weight], fused=True), torch.device("cuda"))
