"""Recorded decode steps: they say what the modules say, follow the weights, and refuse what they would get wrong."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.generation import packed
from engine.generation.sampling import Sampling
from engine.generation.slot_decoder import SlotDecoder
from tests.engine.generation.families import Asks, build, ragged_prompts

PROMPTS = ragged_prompts(3, 11, 7, 1, 14)
CPU = torch.device("cpu")


def drawn(decoder: SlotDecoder, tokens: int = 16) -> dict[int, list[tuple[int, float]]]:
    """What was said to each prompt, and how likely it was."""
    steps = decoder.run(PROMPTS, Sampling(tokens), list(range(len(PROMPTS))), 4, lambda answer, token: token == 5)
    said: dict[int, list[tuple[int, float]]] = {}
    for answer, token, logprob in itertools.chain.from_iterable(steps):
        said.setdefault(answer, []).append((token, logprob))
    return said


def check_equal(decoder: SlotDecoder, module: nn.Module, tolerance: float) -> None:
    plain = drawn(SlotDecoder(module, CPU, replay=False))
    fast = drawn(decoder)
    for answer, said in plain.items():
        assert [token for token, _ in fast[answer]] == [token for token, _ in said]
        for (_, ours), (_, theirs) in zip(fast[answer], said, strict=True):
            assert abs(ours - theirs) <= tolerance


@pytest.mark.parametrize(
    "family", ["opt", "gpt2", "gpt_neox", "phi", "llama", "qwen3", "mistral", "gemma2", "gemma3_text"]
)
def test_a_recorded_step_says_what_the_modules_say(family: str) -> None:
    module = build(family)
    decoder = SlotDecoder(module, CPU)
    check_equal(decoder, module, 1e-4)
    assert decoder.recorded is not None and decoder.recorded.refused is None
    assert 4 in decoder.recorded.trusted
    assert len(decoder.recorded.trusted) > 1, "fewer rows have a recording of their own"


@pytest.mark.skipif(not packed.available(torch.float32), reason="needs oneDNN")
def test_layers_that_read_the_same_are_packed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packed.FEWEST_NUMBERS, torch.float32, 1)
    module = build("llama")
    decoder = SlotDecoder(module, CPU)
    check_equal(decoder, module, 1e-4)
    attention: Any = module.model.layers[0].self_attn  # type: ignore[union-attr, index]
    pack = decoder.packs.of(attention.q_proj)
    assert pack.layers == (attention.q_proj, attention.k_proj, attention.v_proj)
    check_equal(decoder, module, 1e-4)  # prompts run through the modules, with the joint packs


@pytest.mark.skipif(not packed.available(torch.float32), reason="needs oneDNN")
def test_a_recording_follows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packed.FEWEST_NUMBERS, torch.float32, 1)
    module = build("opt")
    decoder = SlotDecoder(module, CPU)
    before = drawn(decoder)
    with torch.no_grad():
        for owner in module.modules():  # as a flip does: other tensors in the same places
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None:
                    owner._parameters[name] = nn.Parameter(parameter * 1.5, requires_grad=False)
    module.tie_weights()  # type: ignore[operator]
    decoder.release()
    decoder.packs.refresh()
    check_equal(decoder, module, 1e-4)
    assert drawn(decoder) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_decoded_before_changes_no_bit(dtype: torch.dtype) -> None:
    module = build("llama").to(dtype)
    used = SlotDecoder(module, CPU)
    first = drawn(used)
    assert drawn(used) == first == drawn(SlotDecoder(module, CPU))


@pytest.mark.parametrize(("hides", "reason"), [(False, "asks a tensor"), (True, "depend on the tokens")])
@pytest.mark.usefixtures("untried")
def test_what_depends_on_numbers_is_refused(hides: bool, reason: str) -> None:
    module = build("llama")
    module.model.norm = Asks(hides)  # type: ignore[union-attr]
    decoder = SlotDecoder(module, CPU)
    check_equal(decoder, module, 1e-4)
    assert decoder.recorded is not None and reason in (decoder.recorded.refused or "")


class Odd(nn.Module):
    """Does what a recording for other numbers can't repeat."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.elsewhere = what, [torch.ones(1)]

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "picks by a mask":
            return x + x[x > x.mean()].mean()
        if self.what == "takes a tensor of its own":
            return x + self.elsewhere[0]
        return x + x[..., : (x.argmax() * 0 + 1)]  # slices by a number that it found


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("picks by a mask", "numbers decide the size"),
        ("takes a tensor of its own", "neither parameter nor buffer"),
        ("slices by a number", "bounds a slice"),
    ],
)
@pytest.mark.usefixtures("untried")
def test_what_can_not_be_repeated_is_refused(what: str, reason: str) -> None:
    module = build("llama")
    module.model.norm = Odd(what)  # type: ignore[union-attr]
    decoder = SlotDecoder(module, CPU)
    drawn(decoder)
    assert decoder.recorded is not None and reason in (decoder.recorded.refused or "")
