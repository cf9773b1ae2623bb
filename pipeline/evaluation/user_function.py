"""A person's own Python function that scores answers, FILE.py:NAME:

    def NAME(answer: str, row: dict) -> float

As a reward (`ppo.reward_function`) it trains, as a judge of held-out answers (`evaluation.judge`) it never does. It is
called once for each answer, several at a time where `ppo.reward_threads` or `evaluation.judge_threads` says so.
`answer` is its text without control tokens, `row` the row of the data that the prompt comes from, with every column.
The file is run as it stands, never from a compiled copy beside it, so that what runs is what the manifest has the hash
of. What can be found wrong before a run starts is found then.
"""

import copy
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.data.records import Row
from pipeline.errors import UserError

REWARD, JUDGE = "ppo.reward_function", "evaluation.judge"
SIGNATURE = "def NAME(answer: str, row: dict) -> float"
FP32_MAX = 3.4028234663852886e38
BOUNDS = {REWARD: (-FP32_MAX, FP32_MAX), JUDGE: (0.0, 1.0)}
WANTED = {REWARD: "finite number", JUDGE: "number from 0 to 1"}
LONGEST_VALUE, LONGEST_ROW = 120, 1000  # characters of a message


@dataclass(frozen=True)
class UserFunction:
    """The function, the file it stands in, how it was named (FILE.py:NAME), how many threads may call it, and the key
    that named it, which says what it may return.
    """

    where: str
    file: Path
    call: Callable[[str, dict[str, Any]], Any]
    threads: int = 1
    key: str = REWARD

    def scores(self, calls: Sequence[tuple[str, Row]]) -> list[float]:
        """What the function gives for each answer and row, in their order; one thread is the one that asks.

        Raises what the first of the calls that fail raises; those that have not begun by then are not made.
        """
        if self.threads == 1:
            return [self.score(*call) for call in calls]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(lambda call: self.score(*call), calls))

    def score(self, answer: str, row: Row) -> float:
        """What the function gives for an answer. It gets a copy of the row, so that it can't change the next call's.

        Raises UserError, with the row and the answer, where it raises or gives no number that it may.
        """
        try:
            value = self.call(answer, copy.deepcopy(dict(row)))
        except (Exception, SystemExit) as problem:
            raise UserError(self._told(f"raised {_what(problem, self.file)}", answer, row)) from problem
        if not hasattr(type(value), "__float__"):
            raise UserError(self._told(f"returned {type(value).__name__}, no number", answer, row))
        try:
            number = float(value)
        except Exception as problem:
            raise UserError(self._told(f"returned {_cut(repr(value))}, no number", answer, row)) from problem
        lowest, highest = BOUNDS[self.key]
        if not lowest <= number <= highest:
            raise UserError(self._told(f"returned {number}, no {WANTED[self.key]}", answer, row))
        return number

    def _told(self, what: str, answer: str, row: Row) -> str:
        shown = ", ".join(f"{name}: {_cut(repr(value))}" for name, value in row.items())
        return (
            f"{self.key}={self.where} {what} for the answer {_cut(repr(answer))} to the row "
            f"{{{_cut(shown, LONGEST_ROW)}}}. It has to return a {WANTED[self.key]} for any text, an empty one too. "
            "Correct the function and run the same command again to resume from the last checkpoint"
        )


def load_function(where: str, threads: int = 1, *, key: str = REWARD) -> UserFunction:
    """Run the file and find the function. Raises UserError where either is missing or can't be called as it has to."""
    file, name = function_file(where, key), where.rpartition(":")[2]
    module = ModuleType(f"zerochat_{key.rpartition('.')[2]}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and others look it up there
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    except (Exception, SystemExit) as problem:
        raise UserError(f"{key}={where}: {file} can't be run: {_what(problem, file)}") from problem
    call = getattr(module, name, None)
    if not callable(call):
        functions = {at: value for at, value in vars(module).items() if inspect.isfunction(value)}
        there = [at for at, value in functions.items() if value.__module__ == module.__name__]
        found = f"it has {', '.join(there)}" if there else "it has no function"
        raise UserError(f"{key}={where}: there is no function {name} in {file}; {found}")
    if inspect.iscoroutinefunction(call) or not _takes_two(call):
        wanted = SIGNATURE.replace("NAME", name)
        raise UserError(f"{key}={where}: {name} can't be called with an answer and a row; write {wanted}")
    return UserFunction(where, file, call, threads, key)


def function_file(where: str, key: str = REWARD) -> Path:
    """The file that FILE.py:NAME names. Raises UserError where it is not there."""
    path, _, name = where.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UserError(f"{key}={where}: write FILE.py:NAME, a Python file and a function in it, {SIGNATURE}")
    if not Path(path).is_file():
        raise UserError(f"{key}={where}: there is no file {path} (looked from {Path.cwd()})")
    return Path(path)


def _takes_two(call: Callable[..., Any]) -> bool:
    try:
        inspect.signature(call).bind("", {})
    except TypeError:
        return False
    except ValueError:  # a function in C that does not tell
        return True
    return True


def _what(problem: BaseException, file: Path) -> str:
    """The error in a line, with the line of the file where it came up."""
    lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(file)]
    if isinstance(problem, SyntaxError):
        return f"{type(problem).__name__} in line {problem.lineno}: {problem.msg}"
    text = " ".join(str(problem).split())
    said = f"{type(problem).__name__}: {text}" if text else type(problem).__name__
    return f"{_cut(said, LONGEST_ROW)} (line {lines[-1]})" if lines else _cut(said, LONGEST_ROW)


def _cut(text: str, longest: int = LONGEST_VALUE) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
