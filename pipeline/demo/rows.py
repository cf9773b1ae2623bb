"""The rows of the demo data: conversations, preferences and prompts, made from a seed.

Quality is mixed on purpose. Most answers that SFT imitates have a flaw that depends on the prompt (`answers.habit`).
The most likely answer of the SFT model is therefore flawed too, and greedy decoding cannot replace RLHF. The other
answers have random flaws (`QUALITY`).

A preference pairs an answer with an answer that has one more flaw. Its label comes from this construction, never from
the gold scorer. About one training pair in twenty has the wrong label, as in data labelled by people. Held-out pairs
have no such noise, so that accuracy on them can reach 1.

A hash of its content decides whether a question is held out (`Question.content`). The last question of a held-out
prompt therefore never occurs in the training rows, for any seed and in any wording.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Any

from pipeline.demo.answers import FORMS, Form, fits, flawed, habit
from pipeline.demo.questions import Question, draw

Row = dict[str, Any]

HABIT = 0.85  # share of the answers with the habitual flaw, among the answers that SFT imitates
# Share of each flaw among the answers that SFT imitates to questions without a habitual flaw; the rest is good.
QUALITY = {"wrong": 0.06, "rude": 0.08, "rambling": 0.08, "unfinished": 0.22, "off_topic": 0.06}
REJECTED_HABIT = 0.4  # share of the rejected answers whose flaw is the habitual one
# Weight of each further flaw of the rejected answers ("formless" only if a form was requested).
REJECTED = {
    "wrong": 0.24,
    "rude": 0.22,
    "rambling": 0.22,
    "unfinished": 0.19,
    "off_topic": 0.07,
    "misplaced": 0.15,
    "formless": 0.30,
}
NO_FLAW: frozenset[str] = frozenset()

FORM_SHARE = 0.12  # of the questions that allow it: share with an instruction about form by the user
SYSTEM_SHARE = 0.08  # of the conversations: share with such an instruction in the system message
TURNS = {1: 0.86, 2: 0.11, 3: 0.03}
ALREADY_FLAWED = 0.25  # of the pairs: share whose chosen answer has a flaw
NOISE = 0.05
HELD_OUT = 16  # one question in this many is held out
MOST_HELD_OUT = 1000
HELD_OUT_KIND = "held_out_"


@dataclass(frozen=True)
class Chat:
    """A prompt and its origin: its messages, the last question, the requested form, and whether it is held out."""

    messages: list[dict[str, str]]
    question: Question
    form: Form | None
    held_out: bool


def rows_of(kind: str, examples: int, seed: int = 0) -> list[Row]:
    """Return the rows of one kind. They do not depend on the rows of other kinds.

    "conversations": rows {"messages"}
    "preferences": rows {"prompt", "chosen", "rejected"}
    "prompts": rows {"prompt"}

    The prefix "held_out_" selects held-out rows: a twentieth as many (16 to 1,000), each with a different last
    question. A message is {"role", "content"}.
    """
    made = kind.removeprefix(HELD_OUT_KIND)
    make = MAKERS[made]
    count = examples if made != "prompts" else max(1, examples // 2)
    if kind != made:
        return held_out_rows(make, min(max(16, count // 20), MOST_HELD_OUT), Random(f"{seed} held out {made}"))
    rng = Random(f"{seed} {made}")
    return [make(make_chat(rng, held_out=False), rng) for _ in range(count)]


def held_out_rows(make: Callable[[Chat, Random], Row], count: int, rng: Random) -> list[Row]:
    """Return held-out rows with different last questions."""
    seen: set[str] = set()
    rows: list[Row] = []
    while len(rows) < count:
        chat = make_chat(rng, held_out=True)
        if chat.question.text not in seen:
            seen.add(chat.question.text)
            rows.append(make(chat, rng))
    return rows


def conversation(chat: Chat, rng: Random) -> Row:
    """Return a conversation whose last answer has no flaw or one flaw."""
    answer = flawed(chat.question, chat.form, mixed_quality(chat.question, rng), rng)
    return {"messages": [*chat.messages, message("assistant", answer)]}


def mixed_quality(question: Question, rng: Random) -> frozenset[str]:
    """Return no flaw or one flaw: the habitual one, or one sampled with the shares of `QUALITY`."""
    usual = habit(question)
    if usual is not None:
        return frozenset((usual,)) if rng.random() < HABIT else NO_FLAW
    flaw = pick({**QUALITY, "": 1 - sum(QUALITY.values())}, rng)
    return frozenset((flaw,)) if flaw else NO_FLAW


def preference(chat: Chat, rng: Random) -> Row:
    """Return a preference whose rejected answer has one more flaw than the chosen answer.

    Most chosen answers have no flaw. Some training pairs are swapped (`NOISE`).
    """
    shared = frozenset((rng.choice(("wrong", "rude", "rambling")),)) if rng.random() < ALREADY_FLAWED else NO_FLAW
    usual = habit(chat.question)
    if usual is not None and usual not in shared and not shared & {"wrong"} and rng.random() < REJECTED_HABIT:
        flaws = shared | {usual}
    else:
        flaws = shared | {further_flaw(shared, chat.form, rng)}
    chosen = rejected = flawed(chat.question, chat.form, shared, rng)
    while rejected == chosen:
        rejected = flawed(chat.question, chat.form, flaws, rng)
    if not chat.held_out and rng.random() < NOISE:
        chosen, rejected = rejected, chosen
    return {"prompt": chat.messages, "chosen": chosen, "rejected": rejected}


def further_flaw(flaws: frozenset[str], form: Form | None, rng: Random) -> str:
    """Return a random flaw that `flaws` lacks.

    "off_topic" and "misplaced" (an answer to another question) are no worse than "wrong", so "wrong" excludes them.
    "formless" requires a form.
    """
    excluded = (
        flaws
        | ({"off_topic", "misplaced"} if "wrong" in flaws else NO_FLAW)
        | ({"formless"} if form is None else NO_FLAW)
    )
    return pick({flaw: share for flaw, share in REJECTED.items() if flaw not in excluded}, rng)


def prompt(chat: Chat, rng: Random) -> Row:
    """Return a row with the prompt only."""
    return {"prompt": chat.messages}


def make_chat(rng: Random, *, held_out: bool) -> Chat:
    """Return a prompt of one to three turns. Only its last question may be held out."""
    ruled = rng.choice(FORMS) if rng.random() < SYSTEM_SHARE else None
    messages = [message("system", ruled.rule)] if ruled else []
    for _ in range(pick(TURNS, rng) - 1):
        question, form = draw_on_side(ruled, False, rng)
        answer = flawed(question, form, NO_FLAW, rng)
        messages += [message("user", question.text), message("assistant", answer)]
    question, form = draw_on_side(ruled, held_out, rng)
    return Chat([*messages, message("user", question.text)], question, form, held_out)


def draw_on_side(ruled: Form | None, held_out: bool, rng: Random) -> tuple[Question, Form | None]:
    """Return a question on one side of the split, and the form that the system message or the question requests."""
    while True:
        question, form = draw(rng), ruled
        if form is None and question.takes_forms and rng.random() < FORM_SHARE:
            form = rng.choice(FORMS)
            question = question.beginning(f"{form.request} ")
        if is_held_out(question) == held_out and (form is None or fits(form, question.right)):
            return question.typed(rng), form


def is_held_out(question: Question) -> bool:
    """Return whether a question is held out, which depends on its kind and content only."""
    if question.content is None:
        return False
    return sha256(" ".join((question.kind, *question.content)).encode()).digest()[0] % HELD_OUT == 0


def pick(shares: dict[Any, float], rng: Random) -> Any:
    """Return a random key with its share as the weight."""
    return rng.choices(list(shares), list(shares.values()))[0]


def message(role: str, content: str) -> dict[str, str]:
    """Return a message of a conversation."""
    return {"role": role, "content": content}


MAKERS: dict[str, Callable[[Chat, Random], Row]] = {
    "conversations": conversation,
    "preferences": preference,
    "prompts": prompt,
}
