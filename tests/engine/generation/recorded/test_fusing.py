"""Fused recordings say what the module says; what may not be fused is left alone."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.generation import packed
from engine.generation.recorded import lowering, making, steps
from engine.generation.recorded.fusions import gates, norms, rotary
from engine.generation.recorded.program import Program
from engine.generation.recorded.recording import Recorder, Recording
from engine.generation.sampling import Sampling
from engine.generation.slot_decoder import SlotDecoder
from engine.kernels.host import library
from tests.engine.generation.families import build, ragged_prompts

needs_compiler = pytest.mark.skipif(library.library("norms") is None, reason="no C compiler, or switched off")
KINDS = ("angles", "norm", "rotary", "gate")
# Calls of 2 layers as they were recorded, in the end, and those of our kernels. A release of transformers that spells
# a layer in another way shows here: its pattern in `fusions` needs another variant.
FAMILIES = {
    "opt": (61, 33, {"norm": 5}),
    "gpt2": (66, 28, {"norm": 5, "gate": 2}),
    "gpt_neox": (94, 28, {"angles": 1, "norm": 5, "rotary": 4}),
    "phi": (116, 24, {"angles": 1, "norm": 3, "rotary": 4, "gate": 2}),
    "llama": (126, 28, {"angles": 1, "norm": 5, "rotary": 4, "gate": 2}),
    "qwen2": (126, 28, {"angles": 1, "norm": 5, "rotary": 4, "gate": 2}),
    "qwen3": (158, 28, {"angles": 1, "norm": 5, "rotary": 4, "gate": 2}),
    "mistral": (126, 28, {"angles": 1, "norm": 5, "rotary": 4, "gate": 2}),
    "gemma2": (181, 38, {"angles": 1, "norm": 9, "rotary": 4, "gate": 2}),
    "gemma3_text": (229, 36, {"angles": 2, "norm": 9, "rotary": 4, "gate": 2}),
}


def fused(recording: Recording) -> dict[str, int]:
    counts = Counter(call.name for call in recording.calls if call.name in KINDS)
    return dict(counts)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is recorded, what becomes of it, and the logits of its first replay beside those of the module."""
    seen: dict[str, Any] = {}
    lower, agree = lowering.lower, steps.RecordedSteps._agree

    def lowered(recording: Recording, *others: Any) -> Recording:
        seen["before"], seen["after"] = recording, lower(recording, *others)
        after: Recording = seen["after"]
        return after

    def compared(self: Any, right: Tensor, replayed: Tensor) -> bool:
        seen["module"], seen["replay"] = right.clone(), replayed.clone()
        return agree(self, right, replayed)

    monkeypatch.setattr(making, "lower", lowered)
    monkeypatch.setattr(steps.RecordedSteps, "_agree", compared)
    monkeypatch.setitem(packed.FEWEST_NUMBERS, torch.float32, 1)
    monkeypatch.setitem(packed.FEWEST_NUMBERS, torch.bfloat16, 1)
    return seen


def decode(module: nn.Module) -> SlotDecoder:
    decoder = SlotDecoder(module, torch.device("cpu"))
    prompts = ragged_prompts(3, 11, 7, 2)
    list(decoder.run(prompts, Sampling(12), list(range(4)), 4, lambda answer, token: False))
    assert decoder.recorded is not None and decoder.recorded.refused is None and 4 in decoder.recorded.trusted
    return decoder


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_fused_of_each_family(family: str, dtype: torch.dtype, watched: dict[str, Any]) -> None:
    if not packed.available(dtype):
        pytest.skip("needs oneDNN")
    decode(build(family).to(dtype))
    before, after, kernels = FAMILIES[family]
    assert fused(watched["after"]) == kernels
    assert len(watched["after"].calls) == after
    if not any(call.name == "matmul" for call in watched["before"].calls):  # as older releases make angles
        assert len(watched["before"].calls) == before
    off = (watched["replay"] - watched["module"]).float().abs().max() / watched["module"].float().abs().max()
    assert off < (1e-5 if dtype == torch.float32 else 2e-2)


def test_without_kernels_the_calls_stay(watched: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (norms, rotary, gates):
        monkeypatch.setattr(module, "maker", lambda name, device: None)
    decode(build("qwen3"))
    assert fused(watched["after"]) == {"angles": 1}
    torch.testing.assert_close(watched["replay"], watched["module"], rtol=1e-4, atol=1e-4)


class Toy(nn.Module):
    """A forward of its own around one weight."""

    def __init__(self, forward: Callable[["Toy", Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8, dtype=dtype), requires_grad=False)
        self.angles = nn.Parameter(torch.rand(1, 1, 3, 8), requires_grad=False)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)

    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


def norm_whose_scale_is_read(toy: Toy, x: Tensor) -> Tensor:
    scale = toy.scale(x)
    return toy.weight * (x * scale) + scale


def norm_of_another_dimension(toy: Toy, x: Tensor) -> Tensor:
    return toy.weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6))


def norm_of_another_tensor(toy: Toy, x: Tensor) -> Tensor:
    return toy.weight * (x * toy.scale(x + 1))


def norm_by_a_weight_of_another_type(toy: Toy, x: Tensor) -> Tensor:
    return toy.weight * (x.float() * toy.scale(x)).to(x.dtype)


@needs_compiler
@pytest.mark.parametrize(
    ("forward", "dtype"),
    [
        (norm_whose_scale_is_read, torch.float32),
        (norm_of_another_dimension, torch.float32),
        (norm_of_another_tensor, torch.float32),
        (norm_by_a_weight_of_another_type, torch.float32),
        (norm_by_a_weight_of_another_type, torch.bfloat16),
    ],
)
def test_what_is_no_norm_is_left_alone(forward: Callable[[Toy, Tensor], Tensor], dtype: torch.dtype) -> None:
    others = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
    module = Toy(forward, others[dtype] if forward is norm_by_a_weight_of_another_type else dtype)
    recording, program = replayed(module, torch.rand(1, 3, 8, dtype=dtype))
    assert fused(recording) == {}
    again = torch.rand(1, 3, 8, dtype=dtype)
    assert torch.equal(program(again, None, None), module(again))


def replayed(module: nn.Module, x: Tensor) -> tuple[Recording, Program]:
    """A forward of x, recorded and lowered; it reads no positions and no step."""
    positions, step = torch.zeros(1, 3), SimpleNamespace()
    recorder = Recorder(module, [x, positions, step])
    with recorder.watching():
        output = module(x)
    recording = lowering.lower(recorder.finish(output), packed.PackedLinears(module), 3)
    return recording, Program(recording)


def rotated(toy: Toy, x: Tensor, at: int) -> Tensor:
    heads = x[:, None].expand(1, 2, 3, 8) * 1.5
    across = torch.cat((-heads[..., at:], heads[..., :at]), dim=-1)
    angles = toy.angles * 2
    return heads * angles.cos() + across * angles.sin()


@needs_compiler
@pytest.mark.parametrize("at", [3, 4])
def test_a_turn_is_one_by_halves(at: int) -> None:
    module = Toy(lambda toy, x: rotated(toy, x, at) * 2)
    x, other = torch.rand(2, 1, 3, 8)
    recording, program = replayed(module, x)
    assert fused(recording) == ({} if at == 3 else {"rotary": 1})
    torch.testing.assert_close(program(other, None, None), module(other))


@needs_compiler
def test_a_sum_is_kept_for_who_reads_it_and_the_output_is_not_written_again() -> None:
    def forward(toy: Toy, x: Tensor) -> Tensor:
        total = x + x * 2
        return toy.weight * (total * toy.scale(total)) - total

    module = Toy(forward)
    x, other = torch.rand(2, 1, 3, 8)
    recording, program = replayed(module, x)
    assert fused(recording) == {"norm": 1}
    torch.testing.assert_close(program(other, None, None), module(other))
    last = Toy(lambda toy, x: toy.weight * (x * toy.scale(x)))
    _, program = replayed(last, x)
    first, _ = program(x, None, None), program(other, None, None)
    torch.testing.assert_close(first, last(x))
