"""Adam chunk by chunk on the host against torch's own classes."""

import pytest
import torch

from engine.offload import adam
from engine.offload.adam import HostAdam

SIZE = 5 * 64 + 7


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["compiled", "chunks"])
def test_a_step_is_as_torchs_own(
    kind: type[torch.optim.Adam], dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "chunks":
        monkeypatch.setattr(adam.compiled, "serves", lambda *_: False)
    elif not adam.compiled.available():
        pytest.skip("no C compiler")
    monkeypatch.setattr(adam, "CHUNK", 64 // torch.get_num_threads())
    torch.manual_seed(0)
    plain = torch.nn.Parameter(torch.randn(SIZE))
    states = {"parameter": plain.detach().clone(), "step": torch.zeros(())}
    states |= {name: torch.zeros(SIZE) for name in adam.MOMENTS}
    optimizer = kind([plain], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, eps=1e-6, fused=True)
    assert HostAdam.serves(optimizer, torch.device("cpu"))
    ours, target = HostAdam(), torch.zeros(SIZE, dtype=torch.bfloat16)
    for _ in range(3):
        gradient = torch.randn(SIZE).to(dtype)
        ours.step(optimizer, optimizer.param_groups[0], states, gradient, 0.5, target)
        plain.grad = gradient.float() * 0.5
        optimizer.step()
        torch.testing.assert_close(states["parameter"], plain.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(target, states["parameter"].bfloat16())
    assert states["step"].item() == 3


def test_what_it_does_not_serve() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    host = torch.device("cpu")
    assert not HostAdam.serves(torch.optim.AdamW([weight], fused=True, amsgrad=True), host)
    assert not HostAdam.serves(torch.optim.AdamW([weight]), host)
    assert not HostAdam.serves(torch.optim.NAdam([weight]), host)
    assert not HostAdam.serves(torch.optim.AdamW([weight], fused=True), torch.device("cuda"))
