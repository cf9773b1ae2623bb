"""The models of a server: how they share the memory, and what is printed where it is too small."""

from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from engine import Generator
from engine.generation import decode_loop
from engine.generation.sampling import SampledToken as Token
from pipeline.chat.folder import ChatModel
from pipeline.chat.participant import load
from pipeline.data.tokenizer import ChatTokenizer, load_tokenizer
from pipeline.errors import UserError
from pipeline.serve.batcher import Session
from pipeline.serve.errors import ServeError
from pipeline.serve.models import ServedModel, load_all
from pipeline.serve.requests import CompletionRequest
from tests.test_chat import save_model

OPTIONS = Namespace(slots=32, context=64, trust_remote_code=False)


@pytest.fixture
def models(tmp_path: Path) -> list[ChatModel]:
    for seed, name in enumerate(("ppo", "sft")):
        save_model(tmp_path / name, seed)
    return [ChatModel(name, tmp_path / name) for name in ("ppo", "sft")]


def test_models_divide_the_free_memory(models: list[ChatModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache is allocated when tokens arrive, so that a model cannot see the caches of the others."""
    token_bytes = load(models[0]).rollouts.backend.token_bytes  # type: ignore[attr-defined]
    room = 17 * 64 * token_bytes  # 8 prompts, 8 answers and the scratch answer
    monkeypatch.setattr(decode_loop, "default_cache_bytes", lambda device: room)
    assert [model.session.slots for model in load_all(models[:1], OPTIONS).values()] == [8]
    assert [model.session.slots for model in load_all(models, OPTIONS).values()] == [3, 3]


def test_a_model_that_does_not_fit_on_the_gpu(
    models: list[ChatModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(generator: Generator) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
        )

    monkeypatch.setattr(Generator, "refresh", refuse)
    with pytest.raises(UserError, match=r"ppo does not fit into .* \(CUDA out of memory\): .*CUDA_VISIBLE_DEVICES="):
        load_all(models, OPTIONS)


def test_a_control_token_without_an_embedding_row_is_refused_as_a_prompt(models: list[ChatModel]) -> None:
    """Gemma 3 1B has no row for the token of images. On a GPU, its id would end the server."""
    tokenizer = load_tokenizer(str(models[0].folder))
    rows = tokenizer.vocab_size
    tokenizer.hf.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save(models[0].folder)
    (served,) = load_all(models[:1], OPTIONS).values()
    for prompt in ("What is <image>?", [rows]):
        with pytest.raises(ServeError, match=f"token ids must be below {rows}"):
            served.completion_jobs(CompletionRequest.model_validate({"model": "ppo", "prompt": prompt}))


def test_tokens_of_a_completion_keep_the_space_before_a_word() -> None:
    """The decoder of Llama 2's tokenizer drops the space before the first word."""
    names = ["<unk>", "</s>", "\u2581", "a", "i", "s", "\u2581a", "\u2581i", "\u2581is", "is"]
    merges = [("\u2581", "a"), ("\u2581", "i"), ("\u2581i", "s"), ("i", "s")]
    backend = Tokenizer(BPE({name: index for index, name in enumerate(names)}, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>"))
    model = ServedModel("m", tokenizer, Mock(Session), 64)
    body = CompletionRequest(prompt="a is", stop=" a", logprobs=1)
    choice = model.choice(body)
    (job,) = model.completion_jobs(body)
    assert job.text([names.index("\u2581a")]) == " a"  # the stop string
    token = Token(0, names.index("\u2581is"), -1.0, "stop", (-1.0, [(names.index("is"), -2.0)]))
    assert choice.take(token) == " is"
    (entry,) = choice.entries
    assert (entry["token"], entry["bytes"], entry["top_logprobs"][0]["token"]) == (" is", [32, 105, 115], "is")
