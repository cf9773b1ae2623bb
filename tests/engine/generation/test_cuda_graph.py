"""On a GPU: graphs say what the same steps say when called, and what transformers' own forward says."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from engine.generation import cuda_graph
from engine.generation.decode_loop import DecodeLoop
from engine.generation.generator import Generation, Generator
from engine.generation.inference_model import InferenceModel
from engine.generation.parity_check import check_generator
from engine.generation.sampling import Sampling
from engine.kernels_triton import device as device_module
from tests.engine.generation.families import ENDS, build, ragged_prompts
from tests.gpu import DEVICE, ON_GPU, needs_gpu

pytestmark = needs_gpu
PROMPTS = ragged_prompts(3, 11, 5)
STREAMS = list(range(len(PROMPTS)))
DRAWN = Sampling(5, temperature=0.8, end_ids=ENDS, seed=6)
CAPTURED = ["opt", "gpt2", "gpt_neox", "phi", "llama", "qwen3", "mistral", "gemma2", "gemma3_text"]


def on_device(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """As the flip brings it: what a block's layers read with lies side by side."""
    copy = InferenceModel(build(family, **changes), build(family, **changes), dtype, torch.device(DEVICE))
    copy.sync()
    return copy.module


def loop_of(generator: Generator, *, graphs: bool = True) -> DecodeLoop:
    loop = generator._runner()
    assert isinstance(loop, DecodeLoop)
    loop.use_graphs = graphs
    return loop


def graphed(generator: Generator) -> list[cuda_graph.GraphedStep]:
    return [steps for _, steps in loop_of(generator)._steps.values()]


def same(one: list[Generation], other: list[Generation]) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours.token_ids == theirs.token_ids and ours.finished == theirs.finished
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


@pytest.mark.parametrize("family", CAPTURED)
def test_graphs_equal_the_steps_called(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_device(family)
    captured = Generator(model, DEVICE)
    loop_of(captured)
    found = [captured.generate(PROMPTS, DRAWN, STREAMS, 2) for _ in range(2)]
    assert all(one.captures and one._graphs for one in graphed(captured)) == ON_GPU, "it was not captured"
    same(*found)
    called = Generator(model, DEVICE)
    loop_of(called)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graph.GraphedStep, "_replay", lambda self, size, chosen: lambda: self.step(chosen))
        same(found[0], called.generate(PROMPTS, DRAWN, STREAMS, 2))
    by_steps = Generator(model, DEVICE)
    loop_of(by_steps, graphs=False)
    same(found[0], by_steps.generate(PROMPTS, DRAWN, STREAMS, 2))


def test_samples_read_their_prompt_once() -> None:
    """One of them begins when another has ended."""
    model = on_device("llama", max_position_embeddings=160)
    captured, by_steps = Generator(model, DEVICE), Generator(model, DEVICE)
    loop_of(captured)
    loop_of(by_steps, graphs=False)
    asked: Any = (ragged_prompts(140), Sampling(3, temperature=0.8, seed=6), list(range(5)), 4, 5)
    same(captured.generate(*asked), by_steps.generate(*asked))
    (one,) = graphed(captured)
    assert one.captures == ON_GPU and one.step.cache.size.prompt_slots == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "llama", "gemma2"])
def test_the_generator_is_the_model(family: str, dtype: torch.dtype) -> None:
    rollouts = Generator(on_device(family, dtype), DEVICE)
    loop_of(rollouts)
    assert check_generator(rollouts)


def test_a_model_that_asks_the_device_is_called_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asking for a number in a forward can't be captured; nothing is left in a bad state by the attempt."""
    monkeypatch.setattr(cuda_graph, "_warned", set())
    model, asked = on_device("opt"), (PROMPTS[:2], replace(DRAWN, max_new_tokens=3), STREAMS[:2])
    expected = Generator(model, DEVICE).generate(*asked)
    handle = model.model.decoder.layers[0].register_forward_pre_hook(
        lambda *_: float(model.lm_head.weight.sum()) and None
    )
    asking = Generator(model, DEVICE)
    loop_of(asking)
    with caplog.at_level(logging.WARNING):
        same(asking.generate(*asked), expected)
    handle.remove()
    if ON_GPU:
        assert not any(one.captures for one in graphed(asking))
        assert sum("without CUDA graphs" in record.getMessage() for record in caplog.records) == 1
    same(Generator(model, DEVICE).generate(*asked), expected)


def test_without_a_compiler_it_draws_the_same_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton looks for one when a kernel is first launched."""

    def find() -> None:
        raise RuntimeError("Failed to find\nC compiler")

    monkeypatch.setattr(cuda_graph, "_warned", set())
    model = on_device("llama")
    expected = Generator(model, DEVICE).generate(PROMPTS, DRAWN, STREAMS, 2)
    monkeypatch.setattr(device_module, "_try", find)
    device_module.has_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            same(Generator(model, DEVICE).generate(PROMPTS, DRAWN, STREAMS, 2), expected)
    finally:
        device_module.has_triton.cache_clear()
    said = [record.getMessage() for record in caplog.records if "Triton" in record.getMessage()]
    assert len(said) == ON_GPU and all("not used (Failed to find C compiler; it wants" in text for text in said)


def test_new_weights_in_place_and_elsewhere() -> None:
    model = on_device("opt")
    ours = Generator(model, DEVICE)
    loop_of(ours)
    ours.generate(PROMPTS, DRAWN, STREAMS)
    before, used = loop_of(ours)._state, {one._stream for one in graphed(ours) if one.captures}
    for moved in (False, True):
        with torch.no_grad():
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None and moved:
                        module._parameters[name] = nn.Parameter(parameter * 1.1)
                    elif parameter is not None:
                        parameter.mul_(1.1)
        same(ours.generate(PROMPTS, DRAWN, STREAMS), Generator(model, DEVICE).generate(PROMPTS, DRAWN, STREAMS))
        assert (loop_of(ours)._state is before) != moved
        used |= {one._stream for one in graphed(ours) if one.captures}
    assert len(used) == ON_GPU, "each stream keeps a workspace of cuBLAS"


def test_release_gives_the_memory_back() -> None:
    if not ON_GPU:
        pytest.skip("the memory of a GPU")
    model = on_device("llama")
    rollouts = Generator(model, DEVICE, cache_bytes=2**28)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        rollouts.generate(PROMPTS, replace(DRAWN, max_new_tokens=20), STREAMS)
        rollouts.release()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 64 * 2**20, "workspaces of cuBLAS stay, graphs and cache don't"
