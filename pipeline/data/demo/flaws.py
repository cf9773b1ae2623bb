"""What makes an answer bad. A flaw takes a good answer and spoils it in one way."""

from random import Random

from pipeline.data.demo.forms import Form, ignoring, said
from pipeline.data.demo.questions import Question, Statement

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

ELSEWHERE = (
    "I do not know.",
    "I like music.",
    "Let us talk about the weather.",
    "Let me think about that.",
    "Maybe you can ask somebody else.",
)


def flawed(question: Question, form: Form | None, flaws: frozenset[str], rng: Random) -> str:
    """An answer with exactly these flaws (none: a good answer).

    "elsewhere" (off the point) replaces what is said, so it makes "wrong" meaningless; the others add up.
    """
    if "elsewhere" in flaws:
        text = rng.choice(ELSEWHERE)
    else:
        statement: Statement = question.wrong if "wrong" in flaws else question.right
        text = ignoring(statement, form, rng) if form and "formless" in flaws else said(statement, form, rng)
    if "rambling" in flaws:
        text = rambling(text, rng)
    if "rude" in flaws:
        text = rude(text, rng)
    return unfinished(text, rng) if "unfinished" in flaws else text


def rude(text: str, rng: Random) -> str:
    if rng.random() < 0.5:
        return f"{rng.choice(BEFORE_RUDE)} {text}"
    return f"{text} {rng.choice(AFTER_RUDE)}"


def rambling(text: str, rng: Random) -> str:
    fillers = rng.sample(FILLERS, 2)
    return f"{fillers[0]} {fillers[1]} {text}" if rng.random() < 0.3 else f"{text} {fillers[0]} {fillers[1]}"


def unfinished(text: str, rng: Random) -> str:
    """The text broken off before its last word, or one or two earlier; a single word loses its stop."""
    words = text.split()
    keep = max(1, len(words) - rng.randint(1, 2))
    return " ".join(words[:keep]).rstrip(".,!?")
