"""Requests with their own settings that start and are aborted while others decode change no other answer."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.generation import decode_loop
from engine.generation.decode_loop import DecodeLoop
from engine.generation.decode_session import DecodeSession
from engine.generation.generator import Generator
from engine.generation.sampling import SampledToken, Sampling
from tests.engine.generation.families import ENDS, build, ragged_prompts

PROMPTS = ragged_prompts(3, 11, 7, 20, 11, 5)
BASE = Sampling(12, temperature=0.8, end_ids=ENDS, seed=6)
SETTINGS = [
    BASE,
    replace(BASE, temperature=0, max_new_tokens=5),
    replace(BASE, top_p=0.8, seed=9),
    replace(BASE, repetition_penalty=1.6),
    replace(BASE, min_new_tokens=4),
    BASE,
]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build("llama")


def open_session(model: nn.Module, *, windows: bool = False, slots: int = 3) -> DecodeSession:
    """With `windows`, the session launches several steps at a time, as it does with CUDA graphs."""
    generator = Generator(model, "cpu")
    loop = generator.backend
    assert isinstance(loop, DecodeLoop)
    loop.use_graphs = windows
    return generator.session(slots, 24, 16)


def drain(session: DecodeSession, answers: dict[int, list[SampledToken]]) -> None:
    while session.busy:
        for token in session.step():
            answers[token.request].append(token)


@pytest.mark.parametrize("windows", [False, True])
def test_late_requests_with_other_settings_change_no_answer(llama: nn.Module, windows: bool) -> None:
    session, answers = open_session(llama, windows=windows), defaultdict(list)
    for request in (0, 1):
        session.add(request, PROMPTS[request], SETTINGS[request], request)
    for _ in range(2):
        for token in session.step():
            answers[token.request].append(token)
    for request in range(2, 6):
        session.add(request, PROMPTS[request], SETTINGS[request], request)
    drain(session, answers)
    for request, (prompt, sampling) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        single = Generator(llama, "cpu").generate([prompt], sampling, [request])[0]
        tokens = answers[request]
        assert [token.token for token in tokens] == single.token_ids
        assert [token.logprob for token in tokens] == pytest.approx(single.logprobs, abs=1e-5)
        assert [token.finish for token in tokens[:-1]] == [None] * (len(tokens) - 1)
        assert tokens[-1].finish == ("stop" if single.finished else "length")
    assert {tokens[-1].finish for tokens in answers.values()} == {"stop", "length"}


@pytest.mark.parametrize("windows", [False, True])
def test_an_aborted_request_frees_its_slot_and_changes_no_answer(llama: nn.Module, windows: bool) -> None:
    session, answers = open_session(llama, windows=windows, slots=2), defaultdict(list)
    endless = replace(BASE, end_ids=(), max_new_tokens=16)
    for request in range(4):
        session.add(request, PROMPTS[request], endless, request)
    session.step()
    for request in (0, 3):  # request 0 decodes, request 3 is in the queue
        session.abort(request)
    session.abort(0)
    drain(session, answers)
    assert set(answers) == {1, 2} and not session.busy
    for request in (1, 2):
        single = Generator(llama, "cpu").generate([PROMPTS[request]], endless, [request])[0]
        assert [token.token for token in answers[request]][-9:] == single.token_ids[-9:]


def test_an_abort_while_the_prompt_runs_leaves_other_readers_alone(
    llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decode_loop.PREFILL_TOKENS, "cpu", 5)
    session, answers = open_session(llama), defaultdict(list)
    long = ragged_prompts(20)[0]
    for request in range(2):
        session.add(request, long, BASE, request)
    session.step()
    session.abort(0)
    drain(session, answers)
    assert [token.token for token in answers[1]] == Generator(llama, "cpu").generate([long], BASE, [1])[0].token_ids
    session.add(2, [*long[:-1], 50], BASE, 2)
    session.step()
    session.abort(2)  # no request reads the incomplete prompt after this
    session.add(3, [*long[:-1], 50], BASE, 2)
    drain(session, answers)
    single = Generator(llama, "cpu").generate([[*long[:-1], 50]], BASE, [2])[0]
    assert [token.token for token in answers[3]] == single.token_ids and 2 not in answers


def test_raw_log_probabilities_are_those_of_the_plain_forward(llama: nn.Module) -> None:
    """Raw log-probabilities ignore temperature, filters and penalty. The reference is a float64 forward."""
    session, answers = open_session(llama), defaultdict(list)
    shaped = replace(BASE, temperature=0.5, top_p=0.7, repetition_penalty=1.3, end_ids=(), top_logprobs=3)
    session.add(0, PROMPTS[0], shaped, 0)
    session.add(1, PROMPTS[1], BASE, 1)
    drain(session, answers)
    ids = [token.token for token in answers[0]]
    with torch.no_grad():
        logits = llama(torch.tensor([PROMPTS[0] + ids]), use_cache=False).logits[0].double()
    plain = logits[len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    assert len(ids) == 12 and all(token.raw is None for token in answers[1])
    for token, row in zip(answers[0], plain, strict=True):
        assert token.raw is not None
        logprob, likeliest = token.raw
        assert logprob == pytest.approx(float(row[token.token]), abs=1e-4)
        values, indices = row.topk(3)
        assert [index for index, _ in likeliest] == indices.tolist()
        assert [value for _, value in likeliest] == pytest.approx(values.tolist(), abs=1e-4)


def test_requests_longer_than_a_slot_are_refused(llama: nn.Module) -> None:
    session = open_session(llama)
    for prompt, sampling in (([], BASE), ([1] * 100, BASE), ([1], replace(BASE, max_new_tokens=100))):
        with pytest.raises(ValueError, match="do not fit into slots of 64 and 64 tokens"):
            session.add(0, prompt, sampling, 0)
    assert not session.busy


def test_logits_that_are_nan_raise(llama: nn.Module) -> None:
    model = build("llama")
    session = open_session(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))  # type: ignore[operator, union-attr]
    session.add(0, PROMPTS[0], BASE, 0)
    with pytest.raises(FloatingPointError, match="NaN"):
        session.step()


def test_a_prompt_whose_forward_failed_runs_again() -> None:
    """The server continues after an error, for example if memory is full, and the client sends the request again."""
    model = build("llama")
    (expected,) = Generator(model, "cpu").generate([PROMPTS[3]], BASE, [0])
    session, answers = open_session(model), defaultdict(list)
    session.add(0, PROMPTS[1], BASE, 0)
    drain(session, answers)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = model.get_submodule("model.layers.1").register_forward_pre_hook(fail)
    session.add(1, PROMPTS[3], BASE, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.step()
    session.abort(1)
    hook.remove()
    session.add(2, PROMPTS[3], BASE, 0)
    drain(session, answers)
    assert [token.token for token in answers[2]] == expected.token_ids
