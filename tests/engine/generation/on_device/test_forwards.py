"""Forwards of static steps by recordings: they say what the module says, and follow its weights."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.generation.on_device.forwards import Forwards
from engine.generation.recorded import making
from engine.generation.recorded.graph import VIEWS
from engine.generation.recorded.recording import Recording
from engine.generation.rollouts import Rollouts
from engine.generation.sampling import Sampling
from engine.kernels.host.library import library
from tests.engine.generation.families import Asks, build, ragged_prompts

CPU = torch.device("cpu")
PROMPTS = ragged_prompts(3, 11, 7, 2)
# Of two layers: calls that compute something, before and after.
FAMILIES = {"opt": (38, 27), "gpt2": (45, 20), "llama": (96, 30), "qwen3": (128, 30), "gemma3_text": (198, 36)}


def decoded(model: nn.Module) -> tuple[Rollouts, Forwards]:
    """A generator that decodes as it would on a GPU, after it has."""
    rollouts = Rollouts(model, "cpu")
    assert rollouts.fallback is None and rollouts._slots is not None
    rollouts._slots.on_device = True
    rollouts.generate(PROMPTS, Sampling(6), [0, 1, 2, 3])
    return rollouts, rollouts._slots._forwards


def computing(recording: Recording) -> int:
    return sum(call.name not in VIEWS | {"getattr"} for call in recording.calls)


@pytest.mark.skipif(library("norms") is None, reason="no C compiler, or switched off")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_of_the_calls(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Recording] = []
    lower = making.lower

    def lowered(recording: Recording, *others: Any) -> Recording:
        seen.extend((recording, lower(recording, *others)))
        return seen[-1]

    monkeypatch.setattr(making, "lower", lowered)
    _, ours = decoded(build(family).bfloat16())
    assert ours.ready == {4} and not ours.refused
    if any(call.name == "matmul" for call in seen[0].calls):  # as older releases make angles
        assert computing(seen[-1]) == FAMILIES[family][1]
    else:
        assert (computing(seen[0]), computing(seen[-1])) == FAMILIES[family]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "gpt_neox", "qwen3"])
@torch.inference_mode()
def test_a_recording_says_what_the_module_says(family: str, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    rollouts, ours = decoded(model)
    assert rollouts._slots is not None and rollouts._slots._rounds is not None
    ids, queries = ours._trial(4, rollouts._slots._rounds.caches)
    for rows in (ids + 5, ids * 3 % 7):
        replayed = ours(rows, queries.places[None], queries)
        plain = Forwards(model, CPU)(rows, queries.places[None], queries)
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(replayed, plain, rtol=tolerance, atol=tolerance)
        assert not plain.equal(plain.roll(1, 1)), "rows that are all the same show nothing"


def test_new_weights_are_followed() -> None:
    model = build("llama")
    rollouts, _ = decoded(model)
    with torch.no_grad():
        for owner in model.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is not None:
                    owner._parameters[name] = nn.Parameter(parameter * 1.3, requires_grad=False)
    for released in (False, True):
        if released:
            rollouts.release()
        ours = rollouts.generate(PROMPTS, Sampling(6), [0, 1, 2, 3])
        right = decoded(model)[0].generate(PROMPTS, Sampling(6), [0, 1, 2, 3])
        assert [one.token_ids for one in ours] == [one.token_ids for one in right]


@pytest.mark.parametrize(("hides", "reason"), [(False, "asks a tensor"), (True, "depend on the tokens")])
@pytest.mark.usefixtures("untried")
def test_what_depends_on_numbers_is_called(hides: bool, reason: str) -> None:
    model = build("llama")
    model.model.norm = Asks(hides)  # type: ignore[union-attr]
    rollouts, ours = decoded(model)
    assert not ours.ready and reason in ours.refused[4]
    ours_said = rollouts.generate(PROMPTS[:1], Sampling(6), [0])
    by_slots = Rollouts(model, "cpu").generate(PROMPTS[:1], Sampling(6), [0])
    assert ours_said[0].token_ids == by_slots[0].token_ids


def test_a_kernel_that_fails_leaves_the_modules_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    model = build("llama")
    right = Rollouts(model, "cpu").generate(PROMPTS, Sampling(6), [0, 1, 2, 3])
    monkeypatch.setattr(making, "Program", fail)
    rollouts, ours = decoded(model)
    assert ours.refused == {4: "no such instruction"}
    again = rollouts.generate(PROMPTS, Sampling(6), [0, 1, 2, 3])
    assert [one.token_ids for one in again] == [one.token_ids for one in right]
