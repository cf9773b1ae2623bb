"""Packed sequences give the numbers and gradients that they give in separate rows."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine import Engine
from engine import attention as engine_attention
from engine.kernels_cpu.attention import ragged_attention
from engine.kernels_cpu.library import library
from engine.parallel import dist, dtensors
from pipeline.data.batch import Documents
from pipeline.models import attention
from pipeline.models.attention import NAME, document_attention
from pipeline.models.build import build_policy, build_scorer
from pipeline.models.checks import adopt, verify
from pipeline.models.internals import set_attention
from tests.pipeline.models.tiny import (
    FAMILIES,
    after_first,
    classifier,
    config_of,
    frozen,
    ids_of,
    language_model,
    source_in,
    trained,
)
from tests.simulated_gpu import flash

LENGTHS = (7, 4, 12, 1, 5)
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}
TRAINED = ["opt", "gpt2", "llama", "qwen3", "gemma2", "gemma3_text"]


def sequences() -> list[Tensor]:
    return [ids_of(1, length, seed=length) for length in LENGTHS]


def gradients(engine: Engine) -> dict[str, Tensor]:
    results = {name: dtensors.full_tensor(p.grad).cpu().clone() for name, p in engine.module.named_parameters()}
    engine.optimizer.zero_grad()
    return results


def policy_in(folder: Path, family: str, **changes: Any) -> Engine:
    language_model(config_of(family, **changes)).save_pretrained(folder)
    return build_policy(source_in(folder), trained())


def scored_of(documents: Documents, row: Tensor) -> Tensor:
    return torch.tensor([place for place in range(row.shape[1]) if place not in documents.starts])


def check_policy(engine: Engine, before: str, temperature: float = 0.8) -> None:
    """Compare separate rows with the attention `before` with one packed row."""
    weights = torch.randn(sum(LENGTHS) - len(LENGTHS), generator=torch.Generator().manual_seed(3))
    weights = weights.to(dist.world().device)
    own = engine_attention.attention_name(engine.module.lm)
    set_attention(engine.module.lm, before)
    separate = [engine(row, after_first(row), temperature=temperature) for row in sequences()]
    logprobs, entropies = (torch.cat(part) for part in zip(*separate, strict=True))
    engine.backward((weights * logprobs + 0.3 * weights.flip(0) * entropies).sum())
    expected = gradients(engine)
    set_attention(engine.module.lm, own)
    row, documents = torch.cat(sequences(), dim=1), Documents(LENGTHS)
    actual, spread = engine(row, scored_of(documents, row), temperature=temperature, documents=documents)
    torch.testing.assert_close(actual, logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(spread, entropies, atol=1e-5, rtol=1e-5)
    engine.backward((weights * actual + 0.3 * weights.flip(0) * spread).sum())
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_supports_packing_or_reports_it(family: str, tmp_path: Path) -> None:
    engine = policy_in(tmp_path, family)
    before = engine.module.lm.config._attn_implementation
    actual = verify(engine, max_length=32)
    assert actual == engine.module.packs == (family != "bloom")  # Bloom takes no positions
    assert (engine.module.lm.config._attn_implementation == NAME) == actual
    if family in TRAINED:
        check_policy(engine, before)


@pytest.mark.parametrize("family", ["opt", "gemma2", "mistral"])
@pytest.mark.parametrize("prefixes", [(), (None, None, 1, 1, None)])
def test_the_cpu_kernel_equals_the_operators(
    family: str, prefixes: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if library("ragged_attention") is None:
        pytest.skip("no C compiler, or switched off")
    windowed = {"sliding_window": 5} if family == "mistral" else {}
    model = language_model(config_of(family, **windowed)).eval()  # without dropout
    assert attention.use_documents(model)
    row, documents = torch.cat(sequences(), dim=1), Documents(LENGTHS, prefixes)
    used, actual = [], []

    def by_kernel(*inputs: Any, **rest: Any) -> Tensor | None:
        used.append(ragged_attention(*inputs, **rest))
        return used[-1]

    def by_operators(*inputs: Any, **rest: Any) -> None:
        return None

    for way in (by_kernel, by_operators):
        monkeypatch.setattr(attention.kernels, "ragged_attention", way)
        out = model.base_model(row, position_ids=documents.positions(torch.device("cpu")), documents=documents)[0]
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        actual.append([out.detach(), *(p.grad.clone() for p in model.base_model.parameters())])
        model.zero_grad()
    assert all(out is not None for out in used)
    # The kernel does not support soft caps.
    assert len(used) == (0 if family == "gemma2" else model.config.num_hidden_layers)
    for mine, theirs in zip(*actual, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", list(WINDOWED))
def test_sliding_windows_hold_in_packed_rows(family: str, tmp_path: Path) -> None:
    engine = policy_in(tmp_path, family, **WINDOWED[family])
    before = engine.module.lm.config._attn_implementation
    assert verify(engine, max_length=32)
    check_policy(engine, before)


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "gemma2"])
def test_two_answers_share_one_pass_over_their_prompt(family: str, tmp_path: Path) -> None:
    classifier(config_of(family)).save_pretrained(tmp_path)
    engine = build_scorer(source_in(tmp_path), trained(), pad_id=0)
    prompt, first, second, other = (ids_of(1, n, seed=n) for n in (6, 4, 9, 5))
    before = engine.module.model.config._attn_implementation
    assert verify(engine, max_length=32)
    set_attention(engine.module.model, before)
    separate = [engine(row)[0] for row in (torch.cat([prompt, first], 1), torch.cat([prompt, second], 1), other)]
    (separate[0][-1] - 2 * separate[1][-1] + 3 * separate[2][1]).backward()
    expected = gradients(engine)
    set_attention(engine.module.model, NAME)
    documents = Documents((6, 4, 9, 5), (None, 0, 0, None))
    values = engine(torch.cat([prompt, first, second, other], 1), documents=documents)[0]
    torch.testing.assert_close(values[:10], separate[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values[10:19], separate[1][6:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values[19:], separate[2], atol=1e-5, rtol=1e-5)
    (values[9] - 2 * values[18] + 3 * values[20]).backward()
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_padded_rows_do_not_use_packing(tmp_path: Path) -> None:
    engine, ids = policy_in(tmp_path, "gemma2", sliding_window=5), ids_of(3, 11)
    before = engine(ids, after_first(ids))[0]
    assert verify(engine, max_length=32)
    torch.testing.assert_close(engine(ids, after_first(ids))[0], before, atol=1e-5, rtol=1e-5)


def test_reference_and_actor_give_the_same_bits(tmp_path: Path) -> None:
    actor = policy_in(tmp_path, "llama")
    reference = build_policy(source_in(tmp_path), frozen())
    verify(actor, max_length=32)
    adopt(reference, actor)
    row, documents = torch.cat(sequences(), dim=1), Documents(LENGTHS)
    both = [engine(row, scored_of(documents, row), documents=documents)[0] for engine in (actor, reference)]
    assert reference.module.packs and torch.equal(*both)


def test_documents_by_hand() -> None:
    documents = Documents((3, 2, 4), (None, 0, None))
    assert documents.starts == (0, 3, 5) and documents.ends() == [2, 4, 8]
    assert documents.positions(torch.device("cpu")).tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    ragged = documents.ragged(torch.device("cpu"))
    assert ragged.query_starts.tolist() == [0, 3, 5, 9] and ragged.key_starts.tolist() == [0, 3, 8, 12]
    assert ragged.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert (ragged.longest_query, ragged.longest_key) == (4, 5)
    assert Documents((3, 2)).ragged(torch.device("cpu")).keys is None


@pytest.fixture
def flash_attention() -> Iterator[None]:
    """Register the operators of PyTorch's `varlen_attn` by definition, because only CUDA builds have them."""
    with torch.library._scoped_library("aten", "IMPL") as operators:
        operators.impl("_flash_attention_forward", flash.forward, "CPU")
        operators.impl("_flash_attention_backward", flash.backward, "CPU")
        yield


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    ("window", "prefixes", "again"),
    [
        (None, (), None),
        (7, (), "recomputed"),
        (None, (None, 0, None, None), "recomputed"),
        (7, (None, 0, None, None), None),
        (7, (None, 0, None, None), "compiled"),
    ],
)
def test_the_gpu_kernel_equals_the_operators(
    window: int | None, prefixes: tuple[int | None, ...], again: str | None
) -> None:
    """Test PyTorch's `varlen_attn` forward and backward: called, with activation checkpointing, and compiled."""
    documents = Documents((30, 20, 45, 1), prefixes)
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(h, 96, 8, generator=generator).bfloat16().requires_grad_() for h in (4, 2, 2)]
    how = attention._Options(0.3, window, None, 0.0)
    documents.ragged(torch.device("cpu"))  # before compiled code reads it, as in `packed_inputs`

    def fast(*inputs: Tensor) -> Tensor:
        return attention._by_kernel(*inputs, documents.ragged(torch.device("cpu")), how)

    def slow(*inputs: Tensor) -> Tensor:
        return attention._one_by_one(*(t[None].float() for t in inputs), documents, how)[0]

    ways = {"recomputed": partial(checkpoint, fast, use_reentrant=False),
            "compiled": torch.compile(fast, backend="aot_eager", fullgraph=True)}  # fmt: skip
    actual, expected = ways.get(again, fast)(*inputs), slow(*inputs)
    upstream = torch.randn(expected.shape, generator=generator)
    gradients = (
        torch.autograd.grad(actual, inputs, upstream.bfloat16()),
        torch.autograd.grad(expected, inputs, upstream),
    )
    torch.testing.assert_close(actual.float(), expected, atol=2e-2, rtol=2e-2)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_documents_by_hand(window: int | None) -> None:
    documents = Documents((3, 2, 4), (None, 0, None))
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, heads, 9, 4, generator=generator) for heads in (4, 2, 2))
    actual, _ = document_attention(
        torch.nn.Identity(), query, key, value, documents=documents, scaling=0.3, sliding_window=window
    )
    order = [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (2, 0), (2, 1), (2, 2), (2, 3)]  # document, position
    for place, (owner, position) in enumerate(order):
        seen = [
            other
            for other, (theirs, before) in enumerate(order)
            if theirs in ((owner, 0) if owner == 1 else (owner,))
            and before <= position
            and (window is None or position - before < window)
        ]
        for head in range(4):
            scores = (key[0, head // 2, seen] @ query[0, head, place]) * 0.3
            expected = scores.softmax(0) @ value[0, head // 2, seen]
            torch.testing.assert_close(actual[0, place, head], expected, atol=1e-6, rtol=1e-5)
