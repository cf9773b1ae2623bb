"""Instructions about form, given by the user or by a system message, and answers that follow them."""

from dataclasses import dataclass
from random import Random

from pipeline.data.demo.facts import NAMES
from pipeline.data.demo.questions import Statement


@dataclass(frozen=True)
class Form:
    """`asked` is how a user says it, `ruled` how a system message does."""

    name: str
    asked: str
    ruled: str


FORMS = (
    Form("word", "Answer in one word.", "Answer every question in one word."),
    Form("sentence", "Answer in a full sentence.", "Always answer in a full sentence."),
    Form("small", "Use small letters only.", "Write in small letters only."),
    Form("sure", "Begin with the word Sure.", "Begin every answer with the word Sure."),
    Form("exclaim", "End with an exclamation mark.", "End every answer with an exclamation mark."),
)


def fits(form: Form, statement: Statement) -> bool:
    """Whether the statement can be made in this form, and in another one too."""
    return form.name not in ("word", "sentence") or statement.word is not None


def said(statement: Statement, form: Form | None, rng: Random) -> str:
    """The statement in words, in the form that was asked for (None: any)."""
    if form is not None and form.name == "word":
        assert statement.word is not None
        return f"{capital(statement.word)}."
    sentence = capital(rng.choice(statement.sentences))
    if form is None:
        brief = statement.word is not None and rng.random() < 0.2
        return f"{capital(statement.word or '')}." if brief else sentence
    if form.name == "small":
        return sentence.lower()
    if form.name == "sure":
        return f"Sure, {sentence if sentence.startswith(NAMES) else sentence[0].lower() + sentence[1:]}"
    if form.name == "exclaim":
        return f"{sentence[:-1]}!"
    return sentence


def ignoring(statement: Statement, form: Form, rng: Random) -> str:
    """The statement in a form that breaks the instruction."""
    if form.name == "sentence" and statement.word is not None:
        return f"{capital(statement.word)}."
    sentences = [capital(sentence) for sentence in statement.sentences]
    return rng.choice([sentence for sentence in sentences if form.name != "small" or sentence != sentence.lower()])


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
