"""Generation by vLLM: the settings and results that pass between the two, and, where vLLM is installed, its answers."""

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.generation import model_support, parity_check, vllm_backend
from engine.generation.generator import Generator
from engine.generation.sampling import Ending, Sampling
from engine.generation.vllm_backend import VllmEngine, sampling_settings, take_step
from engine.memory.tracker import storage_bytes
from pipeline.config.messages import in_keys
from tests.engine.generation.families import build


def output(name: str, *tokens: int, finished: bool = False) -> SimpleNamespace:
    """Return a step's output of one request, as vLLM gives it. The log-probability of token n is -n / 100."""
    logprobs = [{token: SimpleNamespace(logprob=-token / 100)} for token in tokens]
    return SimpleNamespace(
        request_id=name, finished=finished, outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)]
    )


class ScriptedEngine:
    """Stands for vLLM: each step gives the next token of every request that runs."""

    model_config = SimpleNamespace(max_model_len=16)

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers, self.running, self.step_count = answers, dict[str, Any](), 0
        self.calls: list[str] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        self.running[name] = (prompt["prompt_token_ids"], parameters)

    def step(self) -> list[SimpleNamespace]:
        number, self.step_count = self.step_count, self.step_count + 1
        outputs = []
        for name in sorted(self.running):
            answer = self.answers[int(name)]
            outputs.append(output(name, answer[number], finished=number + 1 == len(answer)))
        self.abort_request([each.request_id for each in outputs if each.finished])
        return outputs

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(f"{name} of {len(list(kwargs['weights_iterator']))} tensors")

    def apply_model(self, function: Any) -> None:
        self.calls.append(function.__name__)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake up {tags}")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True


def scripted(answers: Sequence[Sequence[int]], device: str = "cpu") -> tuple[Generator, ScriptedEngine]:
    """Return a generator whose vLLM gives these answers."""
    engine, generator = ScriptedEngine(answers), Generator(build("llama"), "cpu", uses_vllm=True)
    generator._backend = VllmEngine(generator.module, torch.device(device), engine, dict)
    engine.calls.clear()
    return generator, engine


def test_the_settings_of_sampling_are_those_of_vllm() -> None:
    sampling = Sampling(9, temperature=0.7, top_k=5, top_p=0.9, end_ids=(2, 3), min_new_tokens=4, min_p=0.1)
    settings = sampling_settings(sampling, 1)
    assert 0 <= settings.pop("seed") < 2**63
    assert settings == {
        "max_tokens": 9,
        "min_tokens": 4,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_each_answer_has_a_seed_of_its_own() -> None:
    seeds = {sampling_settings(Sampling(1, seed=seed), each)["seed"] for seed in range(8) for each in range(100)}
    assert len(seeds) == 800 and min(seeds) >= 0, "vLLM reads -1 as no seed"
    assert sampling_settings(Sampling(1, seed=3), 7) == sampling_settings(Sampling(1, seed=3), 7)


def test_the_tensors_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    """The correction of a router (DeepSeek-V3, GLM 4.5) is a buffer, which is part of checkpoints."""
    size = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24, "vocab_size": 97}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "first_k_dense_replace": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **size, **layers, n_routed_experts=4))
    model.save_pretrained(tmp_path)
    stored, given = load_file(tmp_path / "model.safetensors"), dict(vllm_backend.checkpoint_tensors(model))
    assert given.keys() == stored.keys() and any(name.endswith("e_score_correction_bias") for name in given)


def test_a_temperature_that_vllm_would_replace_is_refused() -> None:
    assert sampling_settings(Sampling(1, temperature=0), 0)["temperature"] == 0
    with pytest.raises(ValueError, match=r"at least 0\.01, not 0\.001: use 0 \(greedy\) or 0\.01"):
        sampling_settings(Sampling(1, temperature=0.001), 0)


def test_a_step_gives_tokens_with_their_logprobs_and_the_requests_that_ended() -> None:
    outputs = [output("0", 11), output("2", 50, 51), output("1", 12, finished=True)]
    sampled, ended = take_step(outputs, lambda request, token: token == 50)
    assert sampled == [(0, 11, -0.11, None, None), (2, 50, -0.5, "stop", None), (1, 12, -0.12, "length", None)]
    assert ended == {"1", "2"}


def test_answers_come_in_the_order_of_the_prompts_and_end_where_the_settings_say() -> None:
    generator, engine = scripted([[10, 11, 12], [20, 2, 22], [30, 31, 32]])
    sampling = Sampling(3, end_ids=(2,), stop=("31",))
    prompts = [[5], [6, 7], [8]]
    answers = generator.generate(prompts, sampling, [1, 2, 3], text=lambda ids: " ".join(map(str, ids)))
    assert [answer.token_ids for answer in answers] == [[10, 11, 12], [20, 2], [30, 31]]
    assert [answer.finished for answer in answers] == [False, True, True]
    assert answers[1].logprobs == [-0.2, -0.02] and not engine.running


def test_an_abandoned_stream_leaves_no_request() -> None:
    generator, engine = scripted([[10, 11, 12]])
    tokens = generator.stream([5], Sampling(3))
    assert next(tokens) == 10 and list(engine.running) == ["0"]
    tokens.close()
    assert not engine.running


def test_a_sequence_longer_than_the_cache_is_refused() -> None:
    generator, _ = scripted([[10]])
    with pytest.raises(ValueError, match="need 17 tokens, and vLLM's cache has room for 16 per sequence"):
        generator.generate([[5] * 12], Sampling(5), [0])


def test_new_weights_empty_the_prefix_cache_and_wake_a_sleeping_engine() -> None:
    generator, engine = scripted([[10]], "cuda")
    tensors = len(list(generator.module.parameters()))
    generator.refresh()
    assert engine.calls == [f"reload_weights of {tensors} tensors", "pack_tied_heads", "reset"]
    engine.calls.clear()
    generator.release()
    generator.release()
    generator.refresh()
    load = [f"reload_weights of {tensors} tensors", "pack_tied_heads"]
    assert engine.calls == ["sleep 2", "wake up ['weights']", *load, "wake up ['kv_cache']", "reset"]


def test_the_weights_and_the_pages_of_vllm_are_counted_unless_it_sleeps() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Module(), nn.Module())
    model[1].kv_cache, model[2].kv_cache = torch.zeros(5), []  # the last layer shares the pages of another one
    generator, engine = scripted([[10]], "cuda")
    engine.apply_model = lambda function: [function(model)]  # type: ignore[assignment]
    weights, pages, packed = generator.backend.memory()
    assert ([each.shape for each in weights], [each.shape for each in pages], packed) == ([(2, 3), (2,)], [(5,)], 0)
    generator.release()
    assert generator.backend.memory() == ([], [], 0)


def test_sessions_are_refused() -> None:
    generator, _ = scripted([[10]])
    with pytest.raises(ValueError, match="cannot decode requests that arrive one by one: vLLM answers complete"):
        generator.session(1, 1, 1)


def test_without_vllm_the_first_flip_names_the_other_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"vLLM cannot run LlamaForCausalLM: .*vllm.*; use generator=engine") as caught:
        Generator(build("llama"), "cpu", uses_vllm=True).refresh()
    assert in_keys(str(caught.value)).endswith("use rollout.generator=engine")


# The tests below run vLLM. The normal environment of the tests does not have it.

PROMPT = [(7 * n) % 97 for n in range(200)]  # longer than a page of vLLM's cache, so that the prefix cache has it


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def vllm_generator(request: pytest.FixtureRequest) -> Generator:
    """Return a generator of a model whose output layer has a matrix of its own, or that of the embedding."""
    pytest.importorskip("vllm")
    shape = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    module = build("qwen3", **shape, tie_word_embeddings=request.param)
    return Generator(module, "cpu", 2**26, uses_vllm=True)


@pytest.fixture
def generator(vllm_generator: Generator) -> Iterator[Generator]:
    """Return a generator with the weights of a new model."""
    original = copy.deepcopy(vllm_generator.module)
    vllm_generator.refresh()
    yield vllm_generator
    vllm_generator.module = original


def change_weights(module: nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * parameter.abs().mean() * torch.randn_like(parameter))


def plain_logits(generator: Generator, token_ids: list[int], answer: list[int]) -> torch.Tensor:
    return model_support.plain_logits(generator.module, generator.device, token_ids + answer)[len(token_ids) - 1 : -1]


def test_vllm_computes_the_module(generator: Generator) -> None:
    assert generator.mode == "vllm" and len(parity_check.check_generator(generator)) == 3
    prompts, greedy = [PROMPT[start : start + 20] for start in range(0, 100, 5)], Sampling(8, temperature=0)
    expected = Generator(generator.module, "cpu").generate(prompts, greedy, range(20))
    answers = generator.generate(prompts, greedy, range(20))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


def test_keys_of_earlier_weights_are_not_used(generator: Generator) -> None:
    greedy = Sampling(4, temperature=0)
    before = generator.generate([PROMPT], greedy, [0])[0]
    change_weights(generator.module)
    generator.refresh()
    after = generator.generate([PROMPT], greedy, [0])[0]
    expected = plain_logits(generator, PROMPT, after.token_ids).log_softmax(-1).amax(-1)
    assert after.token_ids != before.token_ids
    assert torch.allclose(torch.tensor(after.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["embed_tokens", "q_proj", "down_proj", "input_layernorm", "model.norm", "lm_head"])
def test_a_tensor_that_is_not_handed_over_is_detected(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    tensors = vllm_backend.checkpoint_tensors
    skipped = [full for full, _ in tensors(generator.module) if name in full][-1:]
    if not skipped:
        pytest.skip("the output layer is tied")
    monkeypatch.setattr(
        vllm_backend, "checkpoint_tensors", lambda module: (each for each in tensors(module) if each[0] not in skipped)
    )
    change_weights(generator.module)
    generator.refresh()
    with pytest.raises(ValueError, match=r"does not compute Qwen3ForCausalLM: .*vLLM"):
        parity_check.check_generator(generator)


def test_logprobs_are_those_of_the_sampled_distribution(generator: Generator) -> None:
    answer = generator.generate([PROMPT[:9]], Sampling(12, temperature=0.7, top_k=5), [3])[0]
    logits = plain_logits(generator, PROMPT[:9], answer.token_ids) / 0.7
    filtered = logits.masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf)
    expected = filtered.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


def test_an_answer_does_not_depend_on_its_batch(generator: Generator) -> None:
    prompts, sampling = [PROMPT[start : start + 12] for start in range(6)], Sampling(10, seed=5)
    together = generator.generate(prompts, sampling, range(10, 16))
    alone = [generator.generate([prompt], sampling, [10 + n])[0] for n, prompt in enumerate(prompts)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    samples = generator.generate(prompts[:1], sampling, range(8), samples=8)
    assert len({tuple(answer.token_ids) for answer in samples}) > 4


def test_more_prompt_tokens_than_one_forward_takes(generator: Generator) -> None:
    """vLLM's forwards take 2,048 to 8,192 tokens on a CPU; the prompts have 10,000."""
    prompts = [[n % 97, n // 97, *PROMPT[:98]] for n in range(100)]
    answers = generator.generate(prompts, Sampling(2, seed=5), range(100))
    last = generator.generate(prompts[-1:], Sampling(2, seed=5), [99])[0]
    assert {len(answer.token_ids) for answer in answers} == {2} and answers[-1].token_ids == last.token_ids


def test_its_memory_is_that_of_the_plan(generator: Generator) -> None:
    """The plan counts the configured bytes of the cache, which has whole pages, and all weights.

    On a CPU, vLLM's packed matrices are not tensors. The others are norms, and embeddings of 128 rows instead of 97.
    """
    weights, pages, _ = generator.backend.memory()
    assert 0.9 * 2**26 < storage_bytes(pages) <= 2**26
    named = dict(generator.module.named_parameters())
    norms = sum(parameter.nbytes for name, parameter in named.items() if "norm" in name)
    embeddings = sum(name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in named)
    assert storage_bytes(weights) == norms + embeddings * 128 * 64 * 4


def test_answers_end_with_end_tokens_and_stop_strings(generator: Generator) -> None:
    ends = tuple(range(0, 97, 4))
    sampling = Sampling(12, temperature=2.0, end_ids=ends, min_new_tokens=3, stop=(" 1 ", " 2 ", " 3 "))
    prompts = [[n, 50, n] for n in range(40)]
    answers = generator.generate(prompts, sampling, range(40), text=lambda ids: "".join(f" {each} " for each in ids))
    assert {answer.finished for answer in answers} == {True, False} or all(answer.finished for answer in answers)
    for answer in answers:
        ending = Ending(sampling, lambda ids: "".join(f" {each} " for each in ids))
        stopped = [ending(0, token) for token in answer.token_ids]
        assert not any(stopped[:-1]) and stopped[-1] == answer.finished
        assert not set(answer.token_ids[:2]) & set(ends)
        assert answer.finished or len(answer.token_ids) == 12
