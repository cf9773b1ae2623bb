"""The terminal chat: model selection, context limits, safe printing, the session's commands, and the command line."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import yaml

from engine import Sampling
from engine.generation.sampling import Ending
from pipeline.chat import command
from pipeline.chat.answer_text import Detokenizer
from pipeline.chat.folder import ChatModel, find, find_each
from pipeline.chat.participant import ChatParticipant, fit, load
from pipeline.chat.session import Session, printable, typed_lines
from pipeline.config.schema import DataConfig, EngineSettings, ModelConfig, RunConfig, SourceConfig
from pipeline.data.new_tokenizer import train_tokenizer
from pipeline.data.records import Message
from pipeline.errors import UserError
from pipeline.launch.ranks import free_port
from pipeline.models.build import EngineChoice, build_policy
from pipeline.models.source import resolve
from pipeline.models.stage_models import adopt_special_ids
from tests.ranks import Worker

TEXTS = ["hello there, how are you?", "two and three are five", "good morning", "ünïcödé 🙂 works"] * 20


def save_model(folder: Path, seed: int, kind: str = "AutoModelForCausalLM", positions: int = 256) -> None:
    import transformers

    tokenizer = train_tokenizer(TEXTS, 300)
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=positions, num_labels=1, pad_token_id=tokenizer.pad_id,
        bos_token_id=None, eos_token_id=tokenizer.end_ids[0],
    )  # fmt: skip
    torch.manual_seed(seed)
    getattr(transformers, kind).from_config(config).save_pretrained(folder)
    tokenizer.save(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three finished stages. The models of sft and ppo have different weights."""
    root = tmp_path_factory.mktemp("runs") / "x"
    for seed, stage in enumerate(("sft", "ppo")):
        save_model(root / stage / "model", seed)
    save_model(root / "reward" / "model", 2, "AutoModelForSequenceClassification")
    write_manifest(root, sft="finished", reward="finished", ppo="finished")
    return root


def write_manifest(root: Path, **status: str) -> None:
    stages = {stage: {"status": word} for stage, word in status.items()}
    (root / "manifest.json").write_text(json.dumps({"identity": {}, "asked": "", "stages": stages}))


def empty_run(root: Path, **status: str) -> Path:
    """Create a run whose stages have model folders without weights."""
    for stage in status:
        (root / stage / "model").mkdir(parents=True)
        (root / stage / "model" / "config.json").write_text("{}")
    write_manifest(root, **status)
    return root


# Selection of the model


def test_chat_uses_the_newest_finished_stage(tmp_path: Path) -> None:
    both = empty_run(tmp_path / "a", sft="finished", ppo="finished")
    assert find(both) == ChatModel("ppo", both / "ppo" / "model")
    early = empty_run(tmp_path / "b", sft="finished", ppo="running")
    assert find(early) == ChatModel("sft", early / "sft" / "model")
    assert find(both / "sft") == find(both / "sft" / "model") == ChatModel("sft", both / "sft" / "model")
    (both / "manifest.json").unlink()
    assert find(both).name == "ppo"
    last = empty_run(tmp_path / "c", sft="finished", dpo="finished", ppo="finished")
    records = json.loads((last / "manifest.json").read_text())
    for stage, when in (("dpo", "2026-11-22T10:00:00"), ("ppo", "2026-11-21T10:00:00"), ("sft", "2026-11-23T10:00:00")):
        records["stages"][stage]["finished"] = when
    (last / "manifest.json").write_text(json.dumps(records))
    assert find(last).name == "dpo"
    chosen = find_each(last, f"sft, dpo,{last / 'ppo'}")
    assert [one.name for one in chosen] == ["sft", "dpo", "ppo"]


def test_folders_and_names_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        find(tmp_path / "nowhere")
    (tmp_path / "b").mkdir()
    for folder in (empty_run(tmp_path / "a", sft="running"), tmp_path / "b", tmp_path):
        with pytest.raises(UserError, match=f"^{folder} has neither a model .* nor a finished stage .*: give a run"):
            find(folder)
    (tmp_path / "b" / "adapter_config.json").touch()
    with pytest.raises(UserError, match=r"has only adapters; give the run, or a folder of `.* export RUN --to folder`"):
        find(tmp_path / "b")
    (tmp_path / "m.gguf").touch()
    with pytest.raises(UserError, match=r"m\.gguf is a file; give a run .* or a model folder in Hugging Face format"):
        find(tmp_path / "m.gguf")
    with pytest.raises(UserError, match="no finished ppo stage"):
        find_each(empty_run(tmp_path / "c", sft="finished"), "sft,ppo")
    with pytest.raises(UserError, match="--compare nose: neither a stage that answers"):
        find_each(tmp_path / "c", "nose,sft")
    with pytest.raises(UserError, match="--models nose: neither a stage that answers"):
        find_each(tmp_path / "c", "nose,sft", "--models")
    with pytest.raises(UserError, match="--models needs names"):
        find_each(tmp_path / "c", ",", "--models")


def test_the_base_model_of_a_run_answers(run: Path, tmp_path: Path) -> None:
    """The base model is in a folder, or has the random weights that the engine draws from the run's seed."""
    with pytest.raises(UserError, match=r"has no stage with a config\.yaml"):
        find_each(run, "base")
    root = tmp_path / "x"
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save(root / "tokenizer")
    fields = json.loads((run / "sft" / "model" / "config.json").read_text())
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    random = ModelConfig(name="m", weights="random", architecture={name: fields[name] for name in names})
    stored = ModelConfig(name="m", path=str(run / "sft" / "model"))
    answers = {}
    for model in (stored, random):
        config = RunConfig(model=model, data=DataConfig(name="d", sources=[SourceConfig(builtin="demo")]), seed=3)
        (root / "sft").mkdir(exist_ok=True)
        (root / "sft" / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        (base,) = find_each(root, "base")
        loaded = load(base)
        assert loaded.name == "base"
        answers[model.weights] = "".join(loaded.answer("", "hello", Sampling(20, seed=3), 1))
        if model is random:
            source = resolve(config.model, config.seed)
            adopt_special_ids(source, loaded.tokenizer)  # as the SFT stage does
            built = build_policy(source, EngineChoice(EngineSettings()))
            weights = {name.removeprefix("lm."): value for name, value in built.full_parameters()}
            for name, value in loaded.rollouts.module.named_parameters():
                assert torch.equal(value, weights[name]), name
    sft = load(ChatModel("sft", run / "sft" / "model"))
    assert answers["pretrained"] == "".join(sft.answer("", "hello", Sampling(20, seed=3), 1)) != answers["random"]


def test_a_config_of_another_version_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.yaml").write_text("a_key_of_another_version: 1\n")
    (base,) = find_each(tmp_path, "base")
    with pytest.raises(UserError, match=r"written by another version of zerochat.*give the folder of the base model"):
        load(base)


def test_a_reward_model_and_a_pickle_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a language model .*for example RUN/sft"):
        load(ChatModel("reward", run / "reward" / "model"))
    config = json.loads((run / "sft" / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"not to be opened")
    with pytest.raises(UserError, match="pickle"):
        load(ChatModel("x", tmp_path))


def test_models_that_cannot_generate_are_refused(run: Path, tmp_path: Path) -> None:
    """An encoder has no head in its files, a masked language model is not causal, and a "causal" BERT without a causal
    mask attends to later tokens.
    """
    from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel, BertModel

    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    for kind, message in (
        (BertModel, "are missing from the files"),
        (BertForMaskedLM, "BertForMaskedLM, not a language model"),
        (BertLMHeadModel, "cannot generate: its logits change with the tokens that follow"),
    ):
        folder = tmp_path / kind.__name__
        kind(config).save_pretrained(folder)
        train_tokenizer(TEXTS, 300).save(folder)
        with pytest.raises(UserError, match=message):
            load(ChatModel("x", folder))


# Context limits


def count_words(messages: Sequence[Message]) -> list[int]:
    return [0] * sum(len(message.content.split()) for message in messages)


def test_the_oldest_turns_leave_and_the_system_message_stays() -> None:
    turns = [Message(role, f"{role} {n} x") for n in range(3) for role in ("user", "assistant")]
    turns.append(Message("user", "last"))
    for bound, remaining in ((None, 7), (22, 7), (21, 5), (15, 3), (9, 1), (4, 1)):
        messages, prompt = fit("be kind please", turns, count_words, bound)
        assert messages[0].role == "system" and messages[1:] == turns[7 - remaining :]
        assert bound is None or len(prompt) <= bound
    with pytest.raises(UserError, match="too long"):
        fit("be kind please", turns, count_words, 3)
    assert fit("", turns[:1], count_words, None)[0] == turns[:1]


def test_a_conversation_longer_than_the_context_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A conversation longer than the model's positions drops its first turns with a note and without an error."""
    save_model(tmp_path / "m", 0, positions=64)
    participant = load(ChatModel("m", tmp_path / "m"))
    session = Session([participant], Sampling(48, seed=1), system="be brief")
    session.run(["hello there, how are you?"] * 8)
    shown = capsys.readouterr().err
    assert len(participant.turns) + participant.dropped == 16
    assert "(m: the oldest turn is left out, because the context is full)" in shown
    assert f"(m: the oldest {participant.dropped // 2} turns are left out, because the context is full)" in shown
    assert 0 < len(participant.turns) < 8  # dropped turns are removed, not tried again at each turn
    before = list(participant.turns)
    session.run(["good morning " * 60])
    assert "too long" in capsys.readouterr().err and participant.turns == before
    session.run(["/reset"])
    assert (participant.turns, participant.dropped) == ([], 0)


# Printing


def test_control_characters_are_not_printed() -> None:
    hostile = "a\x1b[31mred\x07\x08\x9b2J\u202eevil\u2066\U000e0041\x7f\ud800 b\tc\r\nd\re"
    assert printable(hostile) == "a[31mred2Jevil b\tc\nde"
    assert printable("naïve 中文 👩\u200d👧 العربية") == "naïve 中文 👩\u200d👧 العربية"


def test_characters_of_several_tokens_are_printed_complete() -> None:
    text = "é🙂 中 end"
    pieces = Detokenizer(lambda ids: bytes(ids).decode("utf-8", errors="replace").strip())
    shown = [pieces.feed(token) for token in text.encode()] + [pieces.finish()]
    assert "".join(shown) == text
    assert all("\ufffd" not in piece for piece in shown)
    broken = Detokenizer(lambda ids: bytes(ids).decode("utf-8", errors="replace"))
    assert [broken.feed(0xF0), broken.feed(0x9F), broken.finish()] == ["", "", "\ufffd"]


def test_text_after_an_invalid_run_of_bytes_is_not_lost() -> None:
    """As tokenizers of Llama 2 do: each byte of a run becomes a replacement character if the run is no UTF-8."""

    def is_text(run: bytes) -> bool:
        return run.decode(errors="ignore").encode() == run

    def decode(ids: Sequence[int]) -> str:
        runs = re.split(rb"([\x80-\xff]+)", bytes(ids))
        return "".join(run.decode() if is_text(run) else "\ufffd" * len(run) for run in runs)

    pieces = Detokenizer(decode)
    shown = [pieces.feed(token) for token in "x你".encode() + b"\xe5" + " and é.".encode()] + [pieces.finish()]
    assert "".join(shown) == "x你\ufffd\ufffd\ufffd and é."  # all but the first character of the rewritten run


@pytest.mark.parametrize("first", [b"", b"x\xf0"])
def test_a_long_answer_is_decoded_in_short_pieces(first: bytes) -> None:
    """The pieces join to the text of one call, also with white space and multi-token characters at every offset.

    A broken character, as in `first`, stays broken and does not change this.
    """
    answer = first + "ab é🙂  中, end\n\nof ".encode() * 20
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return bytes(ids).decode("utf-8", errors="replace").strip()

    pieces = Detokenizer(decode)
    shown = [pieces.feed(token) for token in answer] + [pieces.finish()]
    assert "".join(shown) == answer.decode(errors="replace").strip()
    assert longest < 40 < len(answer)


def test_streamed_text_is_the_decoded_answer(run: Path) -> None:
    participant = load(ChatModel("sft", run / "sft" / "model"))
    sampling = Sampling(40, seed=3)
    streamed = "".join(participant.answer("", "hello", sampling, 1))
    prompt = participant.tokenizer.encode_prompt([Message("user", "hello")])
    ends = participant.tokenizer.end_ids
    complete = participant.rollouts.generate([prompt], Sampling(40, seed=3, end_ids=ends), [1])[0]
    assert streamed == participant.tokenizer.decode(complete.token_ids) != ""
    assert participant.turns == [Message("user", "hello"), Message("assistant", streamed)]


# The session


class ScriptedGenerator:
    """A generator that returns fixed bytes. Byte 3 raises KeyboardInterrupt, the user's Ctrl-C."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.calls = answer, []  # type: ignore[var-annotated]

    def stream(
        self, prompt: Sequence[int], sampling: Sampling, stream: int = 0, text: Callable[[list[int]], str] | None = None
    ) -> Iterator[int]:
        self.calls.append((bytes(prompt).decode(), sampling, stream))
        ends = Ending(sampling, text)
        for token in self.answer:
            if token == 3:
                raise KeyboardInterrupt
            yield token
            if ends(0, token):
                return


class ByteTokenizer:
    """A tokenizer whose tokens are bytes."""

    end_ids, pad_id = (0,), 0

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        return list("|".join(f"{m.role[0]}:{m.content}" for m in messages).encode())

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_unstripped(ids).strip()

    def decode_unstripped(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def scripted_session(*answers: bytes, labels: bool = False) -> tuple[Session, list[ScriptedGenerator]]:
    generators = [ScriptedGenerator(answer) for answer in answers]
    participants = [
        ChatParticipant(f"m{i}", each, ByteTokenizer(), None)  # type: ignore[arg-type]
        for i, each in enumerate(generators)
    ]
    session = Session(participants, Sampling(9, seed=1), labels=labels)
    return session, generators


def test_turns_system_message_and_reset_form_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    session, (participant,) = scripted_session(b"yes\x1b")
    session.run(["one", "", "/system be kind", "two", "/reset", "three", "/system", "four", "/quit", "five"])
    assert [prompt for prompt, _, _ in participant.calls] == [
        "u:one",
        "s:be kind|u:one|a:yes\x1b|u:two",
        "s:be kind|u:three",
        "u:three|a:yes\x1b|u:four",
    ]
    assert [stream for _, _, stream in participant.calls] == [1, 2, 1, 2]
    assert capsys.readouterr().out == "yes\n" * 4


def test_options_change_in_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    session, (participant,) = scripted_session(b"ok")
    session.run(["/set temperature 0.25", "/set max-new-tokens 5", "/set top_k 3", "/set top-p 2", "/set nose 1",
                 "/set seed x", "/what", "/set min-p", "hello"])  # fmt: skip
    _, sampling, _ = participant.calls[0]
    assert (sampling.temperature, sampling.max_new_tokens, sampling.top_k, sampling.top_p) == (0.25, 5, 3, 1.0)
    assert sampling.end_ids == (0,)
    notes = capsys.readouterr().err
    for note in ("top-p: top_p must be", "nose: there is no such option", "seed: x is not an integer",
                 "/what: there is no such command; /help lists them",
                 "/set min-p: to what?"):  # fmt: skip
        assert note in notes
    session.run(["/set max_new_tokens=7", "/set stop = a=b", "/set", "again"])
    changed = participant.calls[1][1]
    assert (changed.max_new_tokens, changed.stop, changed.temperature) == (7, ("a=b",), 0.25)


def test_stop_strings_and_sampling_settings_are_set(capsys: pytest.CaptureFixture[str]) -> None:
    session, (participant,) = scripted_session(b"ok")
    session.run(["/set min-p 0.1", "/set repetition-penalty 1.5", "/set min-new-tokens 2", r"/set stop a b\n", "one",
                 '/set stop ""', "/set min-new-tokens 10", "two"])  # fmt: skip
    first, second = (sampling for _, sampling, _ in participant.calls)
    assert (first.min_p, first.repetition_penalty, first.min_new_tokens, first.stop) == (0.1, 1.5, 2, ("a b\n",))
    notes = capsys.readouterr().err
    # Notes show stop strings in the form in which a user types them.
    assert r'stop "a b\n"' in notes and 'stop ""' in notes
    assert (second.stop, second.min_new_tokens) == ((), 2)  # an answer has 9 tokens at most


def test_ctrl_c_stops_only_the_current_answer(capsys: pytest.CaptureFixture[str]) -> None:
    session, (participant, other) = scripted_session(b"half\x03rest", b"other", labels=True)
    session.run(["one", "two"])
    assert capsys.readouterr().out == "m0> half\nm0> half\n" and other.calls == []
    assert participant.calls[1][0] == "u:one|a:half|u:two"


def test_an_empty_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    session, _ = scripted_session(b"", b" ", b"word")
    session.run(["one"])
    notes = capsys.readouterr().err
    assert notes == "(m0 ended its answer without a word)\n(m1 ended its answer without a word)\n"


def test_each_model_has_its_own_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    session, (first, second) = scripted_session(b"A", b"B", labels=True)
    session.run(["one", "two"])
    assert capsys.readouterr().out == "m0> A\nm1> B\n" * 2
    assert first.calls[1][0] == "u:one|a:A|u:two" and second.calls[1][0] == "u:one|a:B|u:two"


def test_ctrl_c_begins_a_new_line_and_ctrl_d_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str | BaseException] = ["one", KeyboardInterrupt(), "two", EOFError()]

    def typed(_: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr("builtins.input", typed)
    assert list(typed_lines("you> ")) == ["one", "two"]


# The command


def test_prompt_option_prints_one_answer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run), "--prompt", "hello", "--max-new-tokens", "12", "--seed", "5"]
    assert command.main(arguments) == 0
    first = capsys.readouterr().out
    assert command.main(arguments) == 0
    assert capsys.readouterr().out == first and first.endswith("\n") and first.strip()
    assert command.main([*arguments, "--compare", "sft,ppo"]) == 0
    compared = capsys.readouterr().out
    assert compared.startswith("sft> ") and f"ppo> {first}" in compared


def chat(run: Path) -> None:
    sys.exit(command.main([str(run), "--prompt", "hello", "--max-new-tokens", "4"]))


def test_a_chat_in_a_job_of_several_ranks_is_one_process(run: Path) -> None:
    """A shell in the container of a job has the variables of its rank. The engine would wait for the other rank."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = Worker(chat, run, environment={"RANK": "1", "WORLD_SIZE": "2", **address})
    output, _ = process.communicate(100)
    assert process.returncode == 0, output


def test_arguments_with_invalid_bytes_are_accepted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell passes invalid bytes as lone surrogates in the arguments."""
    assert command.main([str(run), "--prompt", "hello \udcff", "--system", "\udcfe", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_lines_from_a_pipe_are_turns(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/set temperature 0\ngood morning\n"))
    assert command.main([str(run / "sft"), "--max-new-tokens", "6", "--seed", "1"]) == 0
    shown = capsys.readouterr()
    assert "you>" not in shown.out and shown.out.strip() and "temperature 0.0" in shown.err


@pytest.mark.parametrize("debug", [False, True])
def test_a_folder_of_another_user_is_one_message(
    debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)  # root may read every folder
    assert command.main(["runs/x", *(["--debug"] if debug else [])]) == 2
    shown = capsys.readouterr().err
    if debug:
        assert shown.startswith("Traceback") and "PermissionError" in shown
        return
    assert shown.startswith("error: no permission ([Errno 13] Permission denied: 'runs/x'): change the permissions")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no such folder"),
        (["nowhere", "--compare", "sft,ppo"], "nowhere: there is no such folder"),
        (["{run}/reward"], "not a language model"),
        (["{run}", "--compare", "sft,nose"], "--compare nose: neither a stage that answers"),
        (["{run}", "--temperature", "-1"], "temperature must be"),
        (["{run}", "--prompt", "good morning " * 400], "too long"),
        (["{run}", "--prompt", ""], '--prompt has no text: write a question, such as --prompt "What is 2 + 3?"'),
        (["{run}", "--prompt", " \t\n"], "--prompt has no text: write a question"),
    ],
)
def test_user_errors_are_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command.main([part.replace("{run}", str(run)) for part in arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and not shown.out


def test_a_setting_in_the_form_of_train_py_names_the_form_of_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["runs/x", "temperature=0"])
    message = "unrecognized arguments: temperature=0; write options as --NAME VALUE (--help lists them)"
    assert message in capsys.readouterr().err
