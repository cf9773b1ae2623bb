"""The reward functions of examples/rewards, called in the way in which PPO calls them."""

import ast
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.files import read_table
from pipeline.data.records import Message, Prompt
from pipeline.demo import rows_of
from pipeline.errors import UserError
from pipeline.evaluation.judge import compare_pairs
from pipeline.evaluation.samples import Sample
from pipeline.evaluation.user_function import JUDGE, PAIR_JUDGE, Dialogue, load_function
from pipeline.installation import ROOT
from pipeline.report.win_rate import win_rate

REWARDS = Path(__file__).resolve().parents[2] / "examples" / "rewards"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("5 + 7 = 12\n#### 12", 1), ("#### 1,200", 0), ("It is 12.", 0), ("", 0), ("####", 0),
        ("#### 13 #### 12.00", 1), ("#### $12", 1), ("#### 12 #### 13", 0), ("#### -12", 0), ("#### 12abc", 1),
        ("#### ,", 0), ("#### twelve", 0),
    ],
)  # fmt: skip
def test_the_number_after_the_mark_must_be_correct(answer: str, score: int) -> None:
    function = load_function(f"{REWARDS}/gsm8k.py:exact_match")
    assert function.score(answer, {"question": "How much?", "answer": "5 + 7 = <<5+7=12>>12\n#### 12"}) == score


def test_every_worked_solution_passes_its_own_check() -> None:
    folder = ROOT.parent / "shared/data/gsm8k"
    if not folder.is_dir():
        pytest.skip("no shared/data/gsm8k beside this checkout")
    function = load_function(f"{REWARDS}/gsm8k.py:exact_match")
    for file in ("train.jsonl", "test.jsonl"):
        assert all(function.score(row["answer"], row) == 1.0 for row in read_table(folder / file).rows)


@pytest.mark.parametrize(
    ("reference", "answer", "score"),
    [
        ("10 * 100 = <<10*100=1000>>1000\n#### 1,000", "so 5 + 5\n#### $1000.00", 1), ("#### 1,000", "#### 1,001", 0),
        ("#### 12", "#### 12 dollars.", 1), ("#### 12", "#### $12", 1), ("#### 12", "#### 12,", 1),
        ("#### 5", "#### 5 km/h", 1), ("#### 20", "#### 20%", 1), ("#### 4", "#### -4", 0), ("#### -4", "#### -4", 1),
        ("#### 2.5", "#### 2 1/2", 1), ("#### 2.5", "$\\frac{5}{2}$", 1), ("#### 1", "#### 2 1/2", 0),
        ("\\boxed{\\frac{1}{3}}", "1/3", 1), ("#### 18", "She has 9 + 9 = 18 eggs.", 1), ("#### 5", "5 or 6", 0),
        ("#### 12", "#### 13 #### 12", 1), ("#### 12", "#### 12 #### 13", 0), ("#### 12", "#### 13\n12", 0),
        ("#### 12", "", 0), ("#### 12", "####", 0), ("#### 12", "#### twelve", 0), ("#### 12", "#### 1/0", 0),
        ("#### 12", "(" * 3000, 0), ("#### 12", "12 \x00\ud800", 1), ("Paris", " paris", 1), ("Paris", "12", 0),
    ],
)  # fmt: skip
def test_the_final_answer_must_equal_the_reference(reference: str, answer: str, score: int) -> None:
    function = load_function(f"{REWARDS}/math_answers.py:correct")
    assert function.score(answer, {"question": "How much?", "answer": reference}) == score


def test_a_formula_that_takes_too_long_scores_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    function = load_function(f"{REWARDS}/math_answers.py:correct")
    monkeypatch.setitem(function.call.__globals__, "SECONDS", 1)
    assert function.score("#### 9**387420489", {"answer": "#### 12"}) == 0
    assert function.score("#### 12", {"answer": "#### 12"}) == 1  # the limit of the call before has no effect

    def fail(*_: Any, **__: Any) -> bool:
        raise RecursionError

    monkeypatch.setitem(function.call.__globals__, "verify", fail)
    assert function.score("#### 12", {"answer": "#### 12"}) == 0


def test_math_answers_need_a_reference_and_the_main_thread() -> None:
    function = load_function(f"{REWARDS}/math_answers.py:correct")
    assert function.score("7", {"question": "How much?", "solution": "It is 7."}) == 1
    with pytest.raises(UserError, match="none of the columns answer, solution"):
        function.score("7", {"question": "How much?"})
    threads = load_function(f"{REWARDS}/math_answers.py:correct", 2)
    with pytest.raises(UserError, match=r"set ppo\.reward_threads=1"):
        threads.map(threads.score, [("7", {"answer": "7"})])


@pytest.mark.parametrize(
    ("question", "answer", "score"),
    [
        ("What is 3 plus 4?", "The answer is 7.", 1), ("What is 3 plus 4?", "3 plus 4 is 7.", 1),
        ("What is 3 plus 4?", "The answer is 8.", 0.5), ("Tell me 9 minus 4.", "It is 5!", 1),
        ("Tom has 5 apples and gives away 2. How many are there now?", "There are 3 now.", 1),
        ("Tom has 5 apples and gets 2 more. How many are there now?", "There are 3 now.", 0.5),
        ("What is the opposite of hot?", "It is warm.", 1), ("What is the opposite of hot?", "It is cold", 0),
        ("What is the opposite of hot?", "", 0), ("What is the opposite of hot?", "a b c d e f g h i j k.", 0),
    ],
)  # fmt: skip
def test_brief_and_right(question: str, answer: str, score: float) -> None:
    function = load_function(f"{REWARDS}/demo.py:brief_and_right")
    messages = [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "It is 2."}]
    row = {"prompt": [*messages, {"role": "user", "content": question}]}
    assert function.score(answer, row) == score


def test_the_demo_reward_does_not_import_the_gold_scorer() -> None:
    function = load_function(f"{REWARDS}/demo.py:brief_and_right")
    scores = [function.score("The answer is 7.", row) for row in rows_of("prompts", 1000)]
    assert 0.15 < scores.count(0.5) / len(scores) < 0.35  # the rows about sums, without the sums that equal seven
    tree = ast.parse((REWARDS / "demo.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert names == {"re", "typing"}


class Service(ThreadingHTTPServer):
    """A service that sends its `replies` (status, object) in order, and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.replies: list[tuple[int, Any]] = []
        self.location, self.raw = "", False
        self.asked: list[tuple[str | None, Any]] = []


class Asked(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.headers["Authorization"], content))
        status, reply = self.server.replies.pop(0)
        self.send_response(status)
        if self.server.location:
            self.send_header("Location", self.server.location)
        self.end_headers()
        self.wfile.write((reply if self.server.raw else json.dumps(reply)).encode())

    do_GET = do_POST  # clients use GET after a redirect

    def log_message(self, *_: Any) -> None:
        """Write no log lines into the output of the tests."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with Service() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("ZEROCHAT_SERVICE", f"http://127.0.0.1:{server.server_port}/v1")
        yield server
        server.shutdown()


def served(name: str, key: str) -> Any:
    function = load_function(f"{REWARDS}/service.py:{name}", key=key)
    function.call.__globals__["PAUSES"] = (0, 0, 0)
    return function


def test_requests_to_a_busy_service_are_repeated(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROCHAT_SERVICE_KEY", "secret")
    service.replies = [(503, {}), (429, {}), (200, {"score": -2.5})]
    row = {"prompt": "hi", "level": 3}
    assert served("score", "ppo.reward_function").score("hello", row) == -2.5
    assert service.asked == [("Bearer secret", {"answer": "hello", "row": row})] * 3


def test_a_refusal_is_raised_with_the_address_of_the_service(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    function = served("score", "ppo.reward_function")
    service.replies = [(400, {"error": "too long"})]
    with pytest.raises(UserError, match=r'127\.0\.0\.1:\d+/v1 refused: 400 Bad Request \{"error": "too long"\}'):
        function.score("hello", {})
    assert len(service.asked) == 1  # a refused request is not repeated
    service.replies = [(503, {})] * 3
    with pytest.raises(UserError, match="refused: 503"):
        function.score("hello", {})
    monkeypatch.setenv("ZEROCHAT_SERVICE", "http://127.0.0.1:1/score")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:1/score does not answer"):
        served("score", "ppo.reward_function").score("hello", {})
    monkeypatch.delenv("ZEROCHAT_SERVICE")  # the missing variable is reported when the file is loaded, before a run
    with pytest.raises(UserError, match=r"can't be run: ValueError: ZEROCHAT_SERVICE has to be the address"):
        served("score", "ppo.reward_function")


def test_redirects_are_not_followed(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A followed redirect would send the key to another host, whose scores would train the policy."""
    monkeypatch.setenv("ZEROCHAT_SERVICE_KEY", "secret")
    for status in (301, 302, 303, 307, 308):
        service.replies, service.location, service.asked = [(status, {}), (200, {"score": 1})], "/other", []
        with pytest.raises(UserError, match=r"/v1 redirects to /other, and the key would go there, too: set ZEROCHAT"):
            served("score", "ppo.reward_function").score("hello", {})
        assert len(service.asked) == 1


def test_control_characters_of_a_refusal_are_escaped(service: Service) -> None:
    service.replies = [(400, "\x1b]0;title\x07")]
    service.raw = True
    with pytest.raises(UserError, match="refused: 400") as error:
        served("score", "ppo.reward_function").score("hello\x1b[31m", {})
    assert "\\x1b]0;title\\x07" in str(error.value) and str(error.value).isprintable()


def test_a_judge_model_gets_the_question_without_the_reference_answer(service: Service) -> None:
    function = served("grade", JUDGE)
    asked = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "its own"}]
    for output, mark in (("8/10", 0.8), ("Mark: 10.", 1.0), ("0", 0.0)):
        service.replies = [(200, {"choices": [{"message": {"content": output}}]})]
        assert function.score("four", {"messages": asked} if mark else {"input": {"messages": asked[:1]}}) == mark
    assert service.asked[0][1] == service.asked[-1][1]  # the same question
    task, shown = service.asked[0][1]["messages"]
    assert "0 to 10" in task["content"] and shown["content"] == "user: 2 + 2?\n\n<answer>\nfour\n</answer>"
    service.replies = [(200, {"choices": [{"message": {"content": "Sorry."}}]})]
    with pytest.raises(UserError, match=r"gave no mark from 0 to 10, but 'Sorry\.'"):
        function.score("four", {"question": "2 + 2?"})
    with pytest.raises(UserError, match="the row has no prompt, question, instruction, input or messages"):
        function.score("four", {"chosen": "a"})


def test_a_judge_model_compares_two_answers_and_refuses_unclear_replies(service: Service) -> None:
    function = served("prefer", PAIR_JUDGE)
    replies = {
        "A": 1.0,
        " b.\n": 0.0,
        "**TIE**": 0.5,
        "Answer: A": 1.0,
        "Sorry.": None,
        "A is better than B": None,
        "": None,
    }
    for output, verdict in replies.items():
        service.replies = [(200, {"choices": [{"message": {"content": output}}]})]
        assert function.prefer("four", "five", {"question": "2 + 2?"}) == verdict, output
    for garbage in ({"choices": []}, {"error": "overloaded"}, {"choices": [{"message": None}]}):
        service.replies = [(200, garbage)]
        assert function.prefer("four", "five", {"question": "2 + 2?"}) is None
    task, shown = service.asked[0][1]["messages"]
    assert "A, B or TIE" in task["content"]
    assert shown["content"] == "2 + 2?\n\n<answer A>\nfour\n</answer A>\n\n<answer B>\nfive\n</answer B>"


def test_a_judge_that_always_prefers_the_first_position_gives_ties(service: Service) -> None:
    service.replies = [(200, {"choices": [{"message": {"content": output}}]}) for output in ("A",) * 15 + ("hm",)]
    prompts = [Prompt((Message("user", str(n)),), "mine", {"question": str(n)}) for n in range(8)]
    verdicts = compare_pairs(prompts, ["new"] * 8, ["old"] * 8, served("prefer", PAIR_JUDGE))
    assert verdicts is not None
    answers = {"sft": "old", "ppo": "new"}
    samples = [Sample(p.messages, answers, preferences={"ppo": v}) for p, v in zip(prompts, verdicts, strict=True)]
    actual = win_rate(samples, "ppo")
    assert actual is not None
    assert (actual.plain.mean, actual.ties, actual.inconsistent, actual.unusable) == (0.5, 7, 7, 1)


def test_the_calculator_answers_calls_and_the_right_number_is_rewarded() -> None:
    function = load_function(f"{REWARDS}/calculator.py:calculate")
    call = '<tool_call>{{"name": "{}", "arguments": {{"a": 12, "b": {}}}}}</tool_call>'

    def played(*answers: str | None) -> tuple[list[str], float]:
        dialogue, results = Dialogue(function, {"answer": 408}), list[str]()
        for answer in answers:
            messages = dialogue.reply(answer)
            results += [message.content for message in messages or () if message.role == "tool"]
        return results, dialogue.rewards["function"]

    right, other = call.format("multiply", 34), call.format("add", 34)
    assert played(right, "It is 408.") == (["408"], 1.0)
    assert played(f"{other} and\n{right}", "It is 46.") == (["46", "408"], 0.0)
    assert played("408") == ([], 1.0) and played("4080") == ([], 0.0)
    assert played(right, None) == (["408"], 0.0)  # no tokens are left for an answer
    assert played(*[right] * 5) == (["408"] * 4, 0.0)
    for wrong in (call.format("divide", 34), call.format("add", '"x"'), "<tool_call>{</tool_call>"):
        (result,), reward = played(wrong, "It is 408.")
        assert result.startswith("error: ") and reward == 1.0


def test_the_guessed_number_is_found_by_its_hints() -> None:
    function = load_function(f"{REWARDS}/guess_number.py:guess")
    scores = []
    for number in range(20):
        dialogue, low, high, answers = Dialogue(function, {"prompt": number}), 0, 9, 0
        while not dialogue.rewards:
            guess, answers = (low + high) // 2, answers + 1
            hint = dialogue.reply(f"It is {guess}.")
            low, high = (guess + 1, high) if hint == (Message("user", "Higher."),) else (low, guess - 1)
        assert dialogue.rewards == {"function": 1.0 - (answers - 1) / 4}
        scores.append(answers)
    assert {*scores} == {1, 2, 3, 4}  # binary search finds one of ten numbers in four guesses
    for answers in (["none"], ["no 12", None], [""]):
        dialogue = Dialogue(function, {"prompt": 1})
        assert [dialogue.reply(answer) for answer in answers][-1] is None and dialogue.rewards == {"function": 0.0}
