"""Load and call a user's Python function that scores answers. A configuration key names it as FILE.py:NAME.

    def NAME(answer: str, row: dict) -> float
    def NAME(first: str, second: str, row: dict) -> float | None      # evaluation.pair_judge

A reward function may return several rewards instead, as a dictionary {name: number}; `ppo.reward_weights` weighs them.
A reward function that is a generator talks with the policy for several turns (`episodes.py`).

`ppo.reward_function` is the reward that PPO is trained on. `evaluation.judge` judges held-out answers and is never used
for training. `evaluation.pair_judge` compares two held-out answers. A function is called in as many threads as
`ppo.reward_threads` or `evaluation.judge_threads` sets. `answer` is the text without control tokens. `row` is the data
row of the prompt, with every column.

The source file is compiled at each start, without __pycache__, so that the code matches the hash in the manifest.
Errors that can be detected before a run starts are raised before it starts.
"""

import copy
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import psutil

from pipeline import progress
from pipeline.data.records import FP32_MAX, BadRow, Message, Row, message_of
from pipeline.errors import UserError
from pipeline.installation import advise_on_import

REWARD, JUDGE, PAIR_JUDGE = "ppo.reward_function", "evaluation.judge", "evaluation.pair_judge"
SIGNATURE = "def NAME(answer: str, row: dict) -> float"
SIGNATURES = {
    REWARD: SIGNATURE,
    JUDGE: SIGNATURE,
    PAIR_JUDGE: "def NAME(first: str, second: str, row: dict) -> float | None",
}
SINGLE = "function"  # the name of the reward of a function that returns a number
BOUNDS = {REWARD: (-FP32_MAX, FP32_MAX), JUDGE: (0.0, 1.0), PAIR_JUDGE: (0.0, 1.0)}
RETURN_TYPES = {
    REWARD: "finite number",
    JUDGE: "number from 0 to 1",
    PAIR_JUDGE: "number from 0 (the second answer is better) to 1 (the first is better), or None for no verdict",
}
LONGEST_VALUE, LONGEST_ROW = 120, 1000  # characters of a message
TRIED = ("", "The answer is 42.")  # the answers of `try_reward`
EXIT_SECONDS = 5.0  # for the end of their process; multiprocessing waits for a ProcessPoolExecutor without end
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class UserFunction:
    """A user's function.

    where: its name in the configuration (FILE.py:NAME)
    file: its source file
    call: the function
    threads: the number of threads that call it
    key: the configuration key, which decides the valid range of its results
    """

    where: str
    file: Path
    call: Callable[..., Any]
    threads: int = 1
    key: str = REWARD

    @property
    def takes_turns(self) -> bool:
        """Whether the function is a generator, which answers with messages (`episodes.py`)."""
        return inspect.isgeneratorfunction(self.call)

    def map(self, method: Callable[..., _Result], calls: Sequence[tuple[Any, ...]]) -> list[_Result]:
        """Return the results of `score`, `rewards` or `prefer` for several calls, in order.

        With threads=1 the calling thread makes all calls. Raise the error of the first failed call. Calls that have not
        started by then are skipped. Each result is progress of this rank: a slow service is no hang.
        """
        if self.threads == 1:
            return [_noted(method(*call)) for call in calls]
        with ThreadPoolExecutor(self.threads) as pool:
            return [_noted(result) for result in pool.map(lambda call: method(*call), calls)]

    def score(self, answer: str, row: Row) -> float:
        """Return the function's score of one answer. The function gets a copy of the row, which it may change.

        Raise UserError, with the row and the answer, if the function raises or its result is not a valid number.
        """
        return self._number(self._call((answer,), row), answer, row)

    def rewards(self, answer: str, row: Row) -> dict[str, float]:
        """Return the function's rewards of one answer by name. A single number has the name "function".

        Raise UserError as `score` does.
        """
        return self.named(self._call((answer,), row), answer, row)

    def named(self, result: Any, answer: str, row: Row) -> dict[str, float]:
        """Return a result of the function as rewards by name. Raise UserError if it is not a valid one."""
        if not isinstance(result, Mapping):
            return {SINGLE: self._number(result, answer, row)}
        if not result or not all(isinstance(name, str) and name.isidentifier() for name in result):
            names = _cut(repr(list(result)))
            raise self.error(f"returned a dictionary with the keys {names}, not names", answer, row)
        return {name: self._number(value, answer, row) for name, value in result.items()}

    def prefer(self, first: str, second: str, row: Row) -> float | None:
        """Return the verdict of a pair judge: 1 if the first answer is better, 0 if the second, between them a tie.

        None means that the judge gave no usable verdict. Raise UserError as `score` does.
        """
        value = self._call((first, second), row)
        return None if value is None else self._number(value, f"{first}\n---\n{second}", row)

    def _call(self, answers: tuple[str, ...], row: Row) -> Any:
        before, answer = _changed_torch(), "\n---\n".join(answers)
        try:
            result = self.call(*answers, copy.deepcopy(dict(row)))
        except (Exception, SystemExit) as problem:
            raise self.error(f"raised {_describe(problem, self.file)}", answer, row) from problem
        if (changed := _changed_torch()) != before:
            raise self.error(changed, answer, row)
        return result

    def _number(self, value: Any, answer: str, row: Row) -> float:
        """Return the result of the function as a number. Raise UserError if it is not a valid one."""
        if not hasattr(type(value), "__float__"):
            raise self.error(f"returned {type(value).__name__}, not a number", answer, row)
        try:
            number = float(value)
        except Exception as problem:
            raise self.error(f"returned {_cut(repr(value))}, not a number", answer, row) from problem
        lowest, highest = BOUNDS[self.key]
        if not lowest <= number <= highest:
            raise self.error(f"returned {number}, not a {RETURN_TYPES[self.key]}", answer, row)
        return number

    def error(self, what: str, answer: str, row: Row) -> UserError:
        """Return the error that the function did something wrong for an answer to a row."""
        shown = ", ".join(f"{name}: {_cut(repr(value))}" for name, value in row.items())
        return UserError(
            f"{self.key}={self.where} {what} for the answer {_cut(repr(answer))} to the row "
            f"{{{_cut(shown, LONGEST_ROW)}}}. The function must return a "
            f"{RETURN_TYPES[self.key]} for any text, also for an empty one. Correct the function, or start its "
            "service, and run the same command again"
        )


class Dialogue:
    """One call of a reward function that is a generator (`takes_turns`). `rewards` are its results after the end."""

    def __init__(self, function: UserFunction, row: Row) -> None:
        self.rewards: dict[str, float] = {}
        self._function, self._row = function, row
        self._turns: Generator[Any, str | None, Any] | None = None
        self._answer = ""

    def reply(self, answer: str | None) -> tuple[Message, ...] | None:
        """Give the next answer to the function, and return its messages; None if it has returned its rewards.

        The answer None means that no tokens are left for another one. Raise UserError if the function raises, yields
        something else than a text or messages of the user or of tools, yields after the answer None, or returns no
        valid number.
        """
        function, row = self._function, self._row
        self._answer = self._answer if answer is None else answer
        try:
            if self._turns is None:
                self._turns = function.call(answer, copy.deepcopy(dict(row)))
                message = next(self._turns)
            else:
                message = self._turns.send(answer)
        except StopIteration as end:
            self.rewards = function.named(end.value, self._answer, row)
            return None
        except (Exception, SystemExit) as problem:
            raise function.error(f"raised {_describe(problem, function.file)}", self._answer, row) from problem
        messages = _messages(message)
        if messages is None:
            what = f"yielded {message!r:.100}, not a text or messages of the roles user and tool,"
            raise function.error(what, self._answer, row)
        if answer is None:
            what = "yielded a message after it got None (no tokens are left for another answer) instead of a return"
            raise function.error(what, self._answer, row)
        return messages


def _messages(value: Any) -> tuple[Message, ...] | None:
    """Return what a function yielded, a text or messages, as messages; None for anything else."""
    if isinstance(value, str):
        return (Message("user", value),)
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, Mapping) and item.get("role") in ("user", "tool") for item in items):
        return None
    try:
        return tuple(message_of(item) for item in items)
    except BadRow:
        return None


def _noted(result: _Result) -> _Result:
    progress.own().advance()
    return result


def load_function(where: str, threads: int = 1, *, key: str = REWARD) -> UserFunction:
    """Run the file and return its function. Raise UserError if one is missing or the signature does not match."""
    file, name = function_file(where, key), where.rpartition(":")[2]
    module = ModuleType(f"zerochat_{key.rpartition('.')[2]}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and other libraries look the module up by name
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as problem:
        cause = f"{_describe(problem, file)}{advise_on_import(problem)}"
        raise UserError(f"{key}={where}: {file} can't be run: {cause}") from problem
    if changed := _changed_torch():
        raise UserError(f"{key}={where}: {file} {changed}")
    call = getattr(module, name, None)
    if not callable(call):
        raise UserError(f"{key}={where}: there is no function {name} in {file}")
    unfit = UserError(
        f"{key}={where}: {name} can't be called like {SIGNATURES[key].replace('NAME', name)}. For a function of TRL, "
        "which scores a batch of completions, use the wrapper in docs/guides/from_trl.md"
    )
    try:
        arguments = inspect.signature(call)
        arguments.bind(*[""] * (3 if key == PAIR_JUDGE else 2))
    except (TypeError, ValueError) as problem:
        raise unfit from problem
    if "completions" in arguments.parameters:
        raise unfit
    return UserFunction(where, file, call, threads, key)


def try_reward(where: str, rows: Sequence[Row]) -> None:
    """Call a reward function for two answers to each row. Raise UserError if a call fails.

    The calls are made in another process, which ends then: a model that the function loads would stay in memory.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_try_reward, args=(where, rows, sender))
    child.start()
    sender.close()
    problem: str | None = (
        f"{REWARD}={where} ended its process (os._exit, a crash in a library, out of memory) when it was called for a "
        "data row. Correct the function and run the same command again"
    )
    try:
        while child.is_alive() and not receiver.poll(1.0):
            pass  # the pipe has no end while a pool of the function runs
        with suppress(EOFError):
            problem = receiver.recv() if receiver.poll() else problem
        child.join(EXIT_SECONDS)
    finally:
        # After Ctrl-C, the process may still be in a call. Its pools wait for it, and have the output of the command.
        started = psutil.Process(child.pid).children(recursive=True) if child.is_alive() else []
        for process in (child, *started):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        child.join()
    if problem is not None:
        raise UserError(problem)


def _try_reward(where: str, rows: Sequence[Row], sender: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    problem: str | None = None
    try:
        function = load_function(where)
        for row, answer in product(rows, TRIED):
            if function.takes_turns:
                Dialogue(function, row).reply(answer)
            else:
                function.rewards(answer, row)
    except UserError as error:
        problem = str(error)
    sender.send(problem)


def _end_with_parent() -> None:
    """End this process when the rank that started it has been killed: a call may never return."""
    if (rank := parent_process()) is not None:
        rank.join()
    os._exit(1)


def function_file(where: str, key: str = REWARD) -> Path:
    """Return the file of FILE.py:NAME. Raise UserError if the form is wrong or the file is missing."""
    path, _, name = where.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UserError(f"{key}={where}: write FILE.py:NAME, a Python file and a function in it, {SIGNATURES[key]}")
    if not Path(path).is_file():
        raise UserError(f"{key}={where}: there is no file {path} (relative paths start at {Path.cwd()})")
    return Path(path)


def _changed_torch() -> str:
    """Return which setting of torch for the whole process has another value than torch's default; "" if none has."""
    torch: Any = sys.modules.get("torch")  # the launcher does not import torch
    if torch is None:
        return ""
    if not torch.is_grad_enabled():
        return "disables gradients for training too: write `with torch.no_grad():` inside the function"
    if torch.get_default_dtype() != torch.float32:
        return "calls torch.set_default_dtype, which changes training too: pass dtype= to models and tensors"
    if torch.get_default_device().type != "cpu":
        return "calls torch.set_default_device, which changes training too: pass device= to models and tensors"
    return ""


def _describe(problem: BaseException, file: Path) -> str:
    """Return the error as one line of text, with the line number in the user's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(file)]
    if isinstance(problem, SyntaxError):
        return f"{type(problem).__name__} in line {problem.lineno}: {problem.msg}"
    text = " ".join(str(problem).split())
    message = f"{type(problem).__name__}: {text}" if text else type(problem).__name__
    return f"{_cut(message, LONGEST_ROW)} (line {lines[-1]})" if lines else _cut(message, LONGEST_ROW)


def _cut(text: str, longest: int = LONGEST_VALUE) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
