"""On a GPU: graphs say what the same steps say when called, and what transformers' own forward says."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.generation.inference_model import InferenceModel
from engine.generation.on_device import graphs
from engine.generation.on_device.forwards import Forwards
from engine.generation.parity_check import check_generator
from engine.generation.rollouts import Generation, Rollouts
from engine.generation.sampling import Sampling
from engine.kernels_triton import device as device_module
from tests.engine.generation.families import ENDS, build, ragged_prompts
from tests.gpu import DEVICE, ON_GPU, needs_gpu

pytestmark = needs_gpu
PROMPTS = ragged_prompts(3, 11, 7, 1, 11, 5, 2, 14)
STREAMS = list(range(len(PROMPTS)))
DRAWN = Sampling(12, temperature=0.8, end_ids=ENDS, seed=6)
CAPTURED = ["opt", "gpt2", "gpt_neox", "phi", "llama", "qwen3", "mistral", "gemma2", "gemma3_text"]


def on_device(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """As the flip brings it: what a block's layers read with lies side by side."""
    copy = InferenceModel(build(family, **changes), build(family, **changes), dtype, torch.device(DEVICE))
    copy.sync()
    return copy.module


def decoder(rollouts: Rollouts) -> Any:
    assert rollouts.fallback is None and rollouts._slots is not None
    rollouts._slots.on_device = True
    return rollouts._slots


def replays(rollouts: Rollouts) -> list[graphs.Replays]:
    return list(decoder(rollouts)._rounds._replays.values())


def same(one: list[Generation], other: list[Generation]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.finished == theirs.finished
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


@pytest.mark.parametrize("family", CAPTURED)
def test_graphs_equal_the_steps_called(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_device(family)
    captured = Rollouts(model, DEVICE)
    decoder(captured)
    found = [captured.generate(PROMPTS, DRAWN, STREAMS, 5) for _ in range(2)]
    assert all(one.captures and one._graphs for one in replays(captured)) == ON_GPU, "it was not captured"
    same(*found)
    called = Rollouts(model, DEVICE)
    decoder(called)
    with monkeypatch.context() as patch:
        patch.setattr(graphs.Replays, "_replay", lambda self, size, slots: lambda: self.step(slots))
        same(found[0], called.generate(PROMPTS, DRAWN, STREAMS, 5))
    by_slots = Rollouts(model, DEVICE)
    decoder(by_slots).on_device = False
    same(found[0], by_slots.generate(PROMPTS, DRAWN, STREAMS, 5))


def test_samples_read_their_prompt_once() -> None:
    """One of them begins when another has ended."""
    model = on_device("llama", max_position_embeddings=160)
    captured, by_slots = Rollouts(model, DEVICE), Rollouts(model, DEVICE)
    decoder(captured)
    decoder(by_slots).on_device = False
    asked: Any = (ragged_prompts(140), Sampling(3, temperature=0.8, seed=6), STREAMS[:5], 4, 5)
    same(captured.generate(*asked), by_slots.generate(*asked))
    (one,) = replays(captured)
    assert one.step.joined and one.captures == ON_GPU and one.step.caches.prompts.slots == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "llama", "gemma2"])
def test_the_generator_is_the_model(family: str, dtype: torch.dtype) -> None:
    rollouts = Rollouts(on_device(family, dtype), DEVICE)
    decoder(rollouts)
    assert check_generator(rollouts)


def test_a_model_that_asks_the_device_is_called_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asking for a number in a forward can't be captured; nothing is left in a bad state by the attempt."""
    monkeypatch.setattr(graphs, "_told", set())
    model = on_device("llama")
    expected = Rollouts(model, DEVICE).generate(PROMPTS, DRAWN, STREAMS, 5)
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: float(model.lm_head.weight.sum()) and None)
    asking = Rollouts(model, DEVICE)
    decoder(asking)
    with caplog.at_level(logging.WARNING):
        same(asking.generate(PROMPTS, DRAWN, STREAMS, 5), expected)
    handle.remove()
    if ON_GPU:
        assert not any(one.captures for one in replays(asking))
        assert sum("without CUDA graphs" in record.getMessage() for record in caplog.records) == 1
    same(Rollouts(model, DEVICE).generate(PROMPTS, DRAWN, STREAMS, 5), expected)


def asks_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that asks the device when it is captured, and no sooner."""
    right = Forwards.__call__

    def asking(self: Forwards, *told: Any) -> torch.Tensor:
        logits = right(self, *told)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            float(logits.sum())
        return logits

    monkeypatch.setattr(Forwards, "__call__", asking)


def test_a_capture_that_is_given_up_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What no trial finds, as it comes in the capture alone: the steps are called, and random numbers come."""
    monkeypatch.setattr(graphs, "_told", set())
    model, asked = on_device("opt"), (PROMPTS[:2], replace(DRAWN, max_new_tokens=3), STREAMS[:2])
    expected = Rollouts(model, DEVICE).generate(*asked)
    asking = Rollouts(model, DEVICE)
    decoder(asking)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        asks_in_a_capture(patch)
        same(asking.generate(*asked), expected)
    if not ON_GPU:
        return
    assert not any(one.captures for one in replays(asking))
    (said,) = [record.getMessage() for record in caplog.records if "without CUDA graphs" in record.getMessage()]
    assert "operation" in said and "during capture" not in said, "the reason, not what came of it"
    torch.rand(4, device=DEVICE)


def test_without_a_compiler_it_draws_the_same_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton looks for one when a kernel is first launched."""

    def find() -> None:
        raise RuntimeError("Failed to find\nC compiler")

    monkeypatch.setattr(graphs, "_told", set())
    model = on_device("llama")
    expected = Rollouts(model, DEVICE).generate(PROMPTS, DRAWN, STREAMS, 5)
    monkeypatch.setattr(device_module, "_try", find)
    device_module.has_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            same(Rollouts(model, DEVICE).generate(PROMPTS, DRAWN, STREAMS, 5), expected)
    finally:
        device_module.has_triton.cache_clear()
    said = [record.getMessage() for record in caplog.records if "Triton" in record.getMessage()]
    assert len(said) == ON_GPU and all("not used (Failed to find C compiler; it wants" in text for text in said)


def test_new_weights_in_place_and_elsewhere() -> None:
    model = on_device("opt")
    ours = Rollouts(model, DEVICE)
    decoder(ours)
    ours.generate(PROMPTS, DRAWN, STREAMS)
    before, used = decoder(ours)._rounds, {one._stream for one in replays(ours) if one.captures}
    for moved in (False, True):
        with torch.no_grad():
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None and moved:
                        module._parameters[name] = nn.Parameter(parameter * 1.1)
                    elif parameter is not None:
                        parameter.mul_(1.1)
        same(ours.generate(PROMPTS, DRAWN, STREAMS), Rollouts(model, DEVICE).generate(PROMPTS, DRAWN, STREAMS))
        assert (decoder(ours)._rounds is before) != moved
        used |= {one._stream for one in replays(ours) if one.captures}
    assert len(used) == ON_GPU, "each stream keeps a workspace of cuBLAS"


def test_release_gives_the_memory_back() -> None:
    if not ON_GPU:
        pytest.skip("the memory of a GPU")
    model = on_device("llama")
    rollouts = Rollouts(model, DEVICE, cache_bytes=2**28)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        rollouts.generate(PROMPTS, replace(DRAWN, max_new_tokens=20), STREAMS)
        rollouts.release()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 64 * 2**20, "workspaces of cuBLAS stay, graphs and cache don't"
