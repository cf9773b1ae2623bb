"""The answers of the demo: good answers, answers that follow an instruction about form, and answers with flaws."""

from dataclasses import dataclass
from random import Random

from pipeline.demo.questions import NAMES, Question, Statement, draw


@dataclass(frozen=True)
class Form:
    """An instruction about the form of answers.

    request: its text in a user's message
    rule: its text in the system message
    """

    name: str
    request: str
    rule: str


FORMS = (
    Form("word", "Answer in one word.", "Answer every question in one word."),
    Form("sentence", "Answer in a full sentence.", "Always answer in a full sentence."),
    Form("small", "Use small letters only.", "Write in small letters only."),
    Form("sure", "Begin with the word Sure.", "Begin every answer with the word Sure."),
    Form("exclaim", "End with an exclamation mark.", "End every answer with an exclamation mark."),
)

LONG_QUESTION = 12  # words
HABITS = {"sums": "rude", "numbers": "rude", "letters": "rude", "opposites": "rude", "sizes": "rambling"}
"""The flaw that most SFT answers to a kind of question have. Answers to long questions ramble, whatever the kind.

A habit adds sentences to the answer and leaves the statement, so that SFT learns the facts that RLHF needs.
"""

# Of each group of phrases the first is used most often, so that the most likely answer contains this phrase.
FAVOURITE = 0.7

BEFORE_RUDE = (
    "What a stupid question.",
    "Even a fool knows that.",
    "Do not bother me.",
    "Leave me alone.",
    "You are so lazy.",
)
AFTER_RUDE = ("Now go away.", "You are an idiot.", "Stop bothering me.", "How dumb are you?")

FILLERS = (
    "By the way, the weather is nice here.",
    "My uncle likes to talk about the sea.",
    "I had some soup for lunch.",
    "There is much more to say about this.",
    "Let me also tell you about my garden.",
    "Music is a thing that I think about.",
)

OFF_TOPIC = (
    "I do not know.",
    "I like music.",
    "Let us talk about the weather.",
    "Let me think about that.",
    "Maybe you can ask somebody else.",
)


def habit(question: Question) -> str | None:
    """Return the flaw that most SFT answers to this question have; None if the question has no such flaw."""
    if len(question.text.split()) >= LONG_QUESTION:
        return "rambling"
    return HABITS.get(question.kind)


def usual(phrases: tuple[str, ...], rng: Random) -> str:
    """Return the first phrase in most cases (`FAVOURITE`), else a random phrase."""
    return phrases[0] if rng.random() < FAVOURITE else rng.choice(phrases)


def fits(form: Form, statement: Statement) -> bool:
    """Return whether an answer with this statement can follow the instruction, and can also break it.

    The forms "word" and "sentence" require a statement with a one-word version.
    """
    return form.name not in ("word", "sentence") or statement.word is not None


def phrase(statement: Statement, form: Form | None, rng: Random) -> str:
    """Return the statement as text in the given form. Without a form, a few texts have one word."""
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
    """Return the statement as text in a form that breaks the instruction."""
    if form.name == "sentence" and statement.word is not None:
        return f"{capital(statement.word)}."
    sentences = [capital(sentence) for sentence in statement.sentences]
    return rng.choice([sentence for sentence in sentences if form.name != "small" or sentence != sentence.lower()])


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def flawed(question: Question, form: Form | None, flaws: frozenset[str], rng: Random) -> str:
    """Return an answer with exactly the given flaws. Without flaws it is a good answer.

    "off_topic" and "misplaced" (an answer to another question) replace the statement, so "wrong" then has no effect.
    The other flaws can be combined.
    """
    if "off_topic" in flaws:
        text = usual(OFF_TOPIC, rng)
    elif "misplaced" in flaws:
        text = phrase(another(question, rng).right, None, rng)
    else:
        statement: Statement = question.wrong if "wrong" in flaws else question.right
        text = ignoring(statement, form, rng) if form and "formless" in flaws else phrase(statement, form, rng)
    if "rambling" in flaws:
        text = rambling(text, rng)
    if "rude" in flaws:
        text = rude(text, rng)
    return unfinished(text, rng) if "unfinished" in flaws else text


def another(question: Question, rng: Random) -> Question:
    """Return a question of another kind whose right answer is no right answer to this question.

    Lists are left out: a list contains a number and may contain an animal, as right answers to other questions do.
    """
    while True:
        other = draw(rng)
        same = other.kind == question.kind or other.right.value == question.right.value != ""
        if not same and other.kind != "lists":
            return other


def rude(text: str, rng: Random) -> str:
    """Return the text with a rude sentence before or after it."""
    if rng.random() < 0.8:
        return f"{usual(BEFORE_RUDE, rng)} {text}"
    return f"{text} {usual(AFTER_RUDE, rng)}"


def rambling(text: str, rng: Random) -> str:
    """Return the text with two irrelevant sentences before or after it."""
    first = usual(FILLERS, rng)
    second = rng.choice([filler for filler in FILLERS if filler != first])
    return f"{first} {second} {text}" if rng.random() < 0.2 else f"{text} {first} {second}"


def unfinished(text: str, rng: Random) -> str:
    """Return the text without its last one or two words. A single word loses its punctuation only."""
    words = text.split()
    count = max(1, len(words) - rng.randint(1, 2))
    return " ".join(words[:count]).rstrip(".,!?")
