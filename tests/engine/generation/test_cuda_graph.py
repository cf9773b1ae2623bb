"""On a GPU, CUDA graphs give the tokens of the same steps without graphs, and those of transformers' forward."""

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
SAMPLED = Sampling(5, temperature=0.8, end_ids=ENDS, seed=6)
# The simulated GPU runs llama. Triton's interpreter runs a program for each layer and head.
SMALL = {"llama": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}}
CAPTURED = ["opt", "gpt2", "gpt_neox", "phi", "llama", "qwen3", "mistral", "gemma2", "gemma3_text"]


def on_device(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Return the inference model on the device after a weight sync, with fused linear layers."""
    changes = {**SMALL.get(family, {}), **changes}
    copy = InferenceModel(build(family, **changes), build(family, **changes), dtype)
    copy.sync()
    return copy.module


def loop_of(generator: Generator, *, graphs: bool = True) -> DecodeLoop:
    loop = generator.backend
    assert isinstance(loop, DecodeLoop)
    loop.use_graphs = graphs
    return loop


def graphed_steps(generator: Generator) -> list[cuda_graph.GraphedStep]:
    return [graphs for _, graphs in loop_of(generator)._samplers.values() if graphs is not None]


def assert_equal(actual: list[Generation], expected: list[Generation]) -> None:
    for answer, wanted in zip(actual, expected, strict=True):
        assert answer.token_ids == wanted.token_ids and answer.finished == wanted.finished
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)


@pytest.mark.parametrize("family", CAPTURED)
def test_graphs_equal_steps_without_graphs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_device(family)
    captured = Generator(model, DEVICE)
    loop_of(captured)
    actual = [captured.generate(PROMPTS, SAMPLED, STREAMS, 2) for _ in range(2)]
    assert all(step.captures and step._graphs for step in graphed_steps(captured)) == ON_GPU, "no graph was captured"
    assert_equal(*actual)
    called = Generator(model, DEVICE)
    loop_of(called)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graph.GraphedStep, "_replay", lambda self, size, chosen: lambda: self.step(chosen))
        assert_equal(actual[0], called.generate(PROMPTS, SAMPLED, STREAMS, 2))
    by_steps = Generator(model, DEVICE)
    loop_of(by_steps, graphs=False)
    assert_equal(actual[0], by_steps.generate(PROMPTS, SAMPLED, STREAMS, 2))


def test_steps_of_experts_in_bf16_are_captured() -> None:
    """transformers multiplies the experts of all tokens in one call, which reads no number on the host in bf16."""
    if not ON_GPU:
        pytest.skip("the products of a GPU")
    captured = Generator(on_device("mixtral", torch.bfloat16), DEVICE)
    loop_of(captured)
    assert check_generator(captured)
    assert all(step.captures and step._graphs for step in graphed_steps(captured)), "decodes without graphs"


def test_samples_read_their_prompt_once() -> None:
    """Five samples of one prompt in four slots: the fifth starts when another sample has ended."""
    model = on_device("llama", max_position_embeddings=160)
    captured, by_steps = Generator(model, DEVICE), Generator(model, DEVICE)
    loop_of(captured)
    loop_of(by_steps, graphs=False)
    arguments: Any = (ragged_prompts(140), Sampling(3, temperature=0.8, seed=6), list(range(5)), 4, 5)
    assert_equal(captured.generate(*arguments), by_steps.generate(*arguments))
    (step,) = graphed_steps(captured)
    cache = loop_of(captured).cache
    assert step.captures == ON_GPU and cache is not None and cache.size.prompt_slots == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "llama", "gemma2"])
def test_generation_passes_the_parity_check(family: str, dtype: torch.dtype) -> None:
    rollouts = Generator(on_device(family, dtype), DEVICE)
    loop_of(rollouts)
    assert check_generator(rollouts)


def test_a_model_that_cannot_be_captured_warns_and_runs_without_graphs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A forward that reads a number from the device cannot be captured. It runs without graphs, and leaves no state."""
    monkeypatch.setattr(cuda_graph, "_warned", set())
    model = on_device("opt", num_hidden_layers=1, num_attention_heads=2)
    arguments = PROMPTS[:2], replace(SAMPLED, max_new_tokens=3), STREAMS[:2]
    expected = Generator(model, DEVICE).generate(*arguments)
    handle = model.model.decoder.layers[0].register_forward_pre_hook(
        lambda *_: float(model.lm_head.weight.sum()) and None
    )
    reading = Generator(model, DEVICE)
    loop_of(reading)
    with caplog.at_level(logging.WARNING):
        assert_equal(reading.generate(*arguments), expected)
    handle.remove()
    if ON_GPU:
        assert not any(step.captures for step in graphed_steps(reading))
        assert sum("without CUDA graphs" in record.getMessage() for record in caplog.records) == 1
    assert_equal(Generator(model, DEVICE).generate(*arguments), expected)


def test_without_a_compiler_it_warns_and_samples_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton searches for a compiler at the first launch of a kernel."""

    def find() -> None:
        raise RuntimeError("Failed to find\nC compiler")

    monkeypatch.setattr(cuda_graph, "_warned", set())
    model = on_device("llama")
    expected = Generator(model, DEVICE).generate(PROMPTS, SAMPLED, STREAMS, 2)
    monkeypatch.setattr(device_module, "_try", find)
    device_module.has_triton.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert_equal(Generator(model, DEVICE).generate(PROMPTS, SAMPLED, STREAMS, 2), expected)
    finally:
        device_module.has_triton.cache_clear()
    warnings = [record.getMessage() for record in caplog.records if "Triton" in record.getMessage()]
    assert len(warnings) == ON_GPU and all("not used (Failed to find C compiler; it wants" in w for w in warnings)


def test_new_weights_are_used_in_place_and_at_new_addresses() -> None:
    model = on_device("opt")
    generator = Generator(model, DEVICE)
    loop_of(generator)
    generator.generate(PROMPTS, SAMPLED, STREAMS)
    before, used = loop_of(generator)._step, {step._stream for step in graphed_steps(generator) if step.captures}
    for moved in (False, True):
        with torch.no_grad():
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None and moved:
                        module._parameters[name] = nn.Parameter(parameter * 1.1)
                    elif parameter is not None:
                        parameter.mul_(1.1)
        assert_equal(
            generator.generate(PROMPTS, SAMPLED, STREAMS), Generator(model, DEVICE).generate(PROMPTS, SAMPLED, STREAMS)
        )
        assert (loop_of(generator)._step is before) != moved
        used |= {step._stream for step in graphed_steps(generator) if step.captures}
    assert len(used) == ON_GPU, "the allocator caches memory for each further stream"


def test_release_frees_the_memory() -> None:
    if not ON_GPU:
        pytest.skip("the memory of a GPU")
    model = on_device("llama")
    rollouts = Generator(model, DEVICE, cache_bytes=2**28)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        rollouts.generate(PROMPTS, replace(SAMPLED, max_new_tokens=20), STREAMS)
        rollouts.release()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 64 * 2**20, (
        "graphs and cache must be freed; only cuBLAS workspaces remain"
    )
