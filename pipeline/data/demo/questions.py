"""Questions, each with a right and a wrong statement to answer it with.

A kind is a function of a random generator. Wording, names and numbers are drawn separately, so that
there are many thousand different questions about a few hundred facts: a question that was held out
asks about something that other questions taught.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from pipeline.data.demo.facts import (
    BAD_MOODS,
    COUNTS,
    GOOD_MOODS,
    GROUPS,
    NAMES,
    OPPOSITES,
    SIZES,
    THINGS,
    listed,
    with_article,
)


@dataclass(frozen=True)
class Statement:
    """What an answer says: whole sentences that say it, and the one word that does (None: one word can't)."""

    sentences: tuple[str, ...]
    word: str | None = None


@dataclass(frozen=True)
class Question:
    text: str
    right: Statement
    wrong: Statement
    takes_forms: bool = True  # an instruction about form may be added to it

    def asking(self, instruction: str) -> "Question":
        return replace(self, text=f"{self.text} {instruction}")


def about(value: str, *sentences: str) -> Statement:
    """The statement whose sentences have `value` at the place of "@"."""
    return Statement(tuple(sentence.replace("@", value) for sentence in sentences), value)


def sums(rng: Random) -> Question:
    left, right = rng.randint(1, 9), rng.randint(1, 9)
    if rng.random() < 0.4:
        left, right = left + right, left
        texts: tuple[str, ...] = (
            f"What is {left} minus {right}?",
            f"How much is {left} minus {right}?",
            f"Take {right} away from {left}.",
        )
        result, echo = left - right, f"{left} minus {right} is @."
    else:
        texts = (
            f"What is {left} plus {right}?",
            f"How much is {left} plus {right}?",
            f"Add {left} and {right}.",
            f"What is the sum of {left} and {right}?",
        )
        result, echo = left + right, f"{left} plus {right} is @."
    return Question(
        rng.choice(texts),
        about(str(result), echo, "The answer is @.", "It is @."),
        about(str(near(result, rng)), echo, "The answer is @.", "It is @."),
    )


def stories(rng: Random) -> Question:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    left, right = rng.randint(2, 9), rng.randint(2, 9)
    if rng.random() < 0.4:
        left, right = left + right, left
        change, result = f"gives away {right}", left - right
    else:
        change, result = f"gets {right} more", left + right
    text = f"{name} has {left} {things} and {change}. How many {things} does {name} have now?"
    says = (f"{name} has @ {things} now.", f"{name} has @ {things}.", "The answer is @.")
    return Question(text, about(str(result), *says), about(str(near(result, rng)), *says))


def near(number: int, rng: Random) -> int:
    """A wrong result that a careless person might give."""
    step = rng.choice((-3, -2, -1, 1, 2, 3))
    return number + step if number + step > 0 else number + abs(step)


def numbers(rng: Random) -> Question:
    small, large = sorted(rng.sample(range(1, 31), 2))
    sign, value, other = rng.choice((("larger", large, small), ("smaller", small, large)))
    first, second = rng.sample((small, large), 2)
    text = rng.choice((f"Which is {sign}, {first} or {second}?", f"Which number is {sign}: {first} or {second}?"))
    says = f"The {sign} number is @.", "It is @."
    return Question(
        text,
        about(str(value), f"{value} is {sign} than {other}.", *says),
        about(str(other), f"{other} is {sign} than {value}.", *says),
    )


def sizes(rng: Random) -> Question:
    low, high = sorted(rng.sample(range(len(SIZES)), 2))
    small, large = with_article(SIZES[low]), with_article(SIZES[high])
    first, second = rng.sample((small, large), 2)
    sign = rng.choice(("bigger", "smaller"))
    if rng.random() < 0.5:
        value, other = (large, small) if sign == "bigger" else (small, large)
        text = f"Which animal is {sign}, {first} or {second}?"
        right = Statement((f"{value} is {sign} than {other}.", f"{value} is {sign}."), value.split()[1])
        wrong = Statement((f"{other} is {sign} than {value}.", f"{other} is {sign}."), other.split()[1])
        return Question(text, right, wrong)
    text = f"Is {first} {sign} than {second}?"
    yes = Statement((f"Yes, {first} is {sign} than {second}.",), "yes")
    no = Statement((f"No, {first} is not {sign} than {second}.",), "no")
    true = (first == large) == (sign == "bigger")
    return Question(text, yes if true else no, no if true else yes)


def opposites(rng: Random) -> Question:
    word = rng.choice(tuple(OPPOSITES))
    value = OPPOSITES[word]
    other = rng.choice([entry for entry in OPPOSITES if entry not in (word, value)])
    texts = (
        f"What is the opposite of {word}?",
        f"Tell me the opposite of {word}.",
        f"Which word is the opposite of {word}?",
        f"Do you know the opposite of {word}?",
    )
    says = (f"The opposite of {word} is @.", "The opposite is @.", "It is @.")
    return Question(rng.choice(texts), about(value, *says), about(other, *says))


def letters(rng: Random) -> Question:
    word = rng.choice(GROUPS[rng.choice(tuple(GROUPS))])
    value = word[0].upper()
    other = rng.choice([letter for letter in "BCDGHLMPRSW" if letter != value])
    texts = (
        f"What is the first letter of {word}?",
        f"Which letter does {word} start with?",
        f"With which letter does the word {word} begin?",
    )
    says = ("The first letter is @.", f"The word {word} starts with @.")
    return Question(rng.choice(texts), about(value, *says), about(other, *says))


def odd_ones(rng: Random) -> Question:
    group, other = rng.sample(tuple(GROUPS), 2)
    words = rng.sample(GROUPS[group], 2)
    odd = rng.choice(GROUPS[other])
    shown = rng.sample((*words, odd), 3)
    texts = (f"Which word does not belong: {', '.join(shown)}?", f"Find the odd one out: {', '.join(shown)}.")
    says = ("The odd one out is @.", "The word @ does not belong.")
    return Question(rng.choice(texts), about(odd, *says), about(rng.choice(words), *says))


def lists(rng: Random) -> Question:
    group, (count, said) = rng.choice(tuple(GROUPS)), rng.choice(tuple(COUNTS.items()))
    texts = (
        f"Name {said} {group}.",
        f"Give me a list of {said} {group}.",
        f"Can you tell me {said} {group}?",
        f"List {said} {group}, please.",
        f"I need {said} {group}.",
    )
    says = (f"{said.capitalize()} {group} are @.", "@.")
    return Question(
        rng.choice(texts),
        about_list(right_list(group, count, rng), *says),
        about_list(wrong_list(group, count, rng), *says),
    )


def about_list(words: list[str], *sentences: str) -> Statement:
    return Statement(about(listed(words), *sentences).sentences)


def right_list(group: str, count: int, rng: Random) -> list[str]:
    return rng.sample(GROUPS[group], count)


def wrong_list(group: str, count: int, rng: Random) -> list[str]:
    """Too many words, too few, or one of another group."""
    if rng.random() < 0.5:
        return right_list(group, rng.choice([other for other in (2, 3, 4, 5) if other != count]), rng)
    words = right_list(group, count, rng)
    foreign = rng.choice([other for other in GROUPS if other != group])
    words[rng.randrange(count)] = rng.choice(GROUPS[foreign])
    return words


REPLIES = {
    "wellbeing": ("I am fine, thank you.", "I am well, thanks for asking."),
    "thanks": ("You are welcome.", "It was a pleasure."),
    "goodbye": ("Goodbye, see you soon.", "Goodbye, take care."),
    "comfort": ("I am sorry to hear that.", "I am sorry, I hope you feel better soon."),
    "joy": ("I am glad to hear that.", "That is good to hear."),
}

HELLOS = ("Hello", "Hi", "Good morning", "Good evening")


def small_talk(rng: Random) -> Question:
    name = rng.choice(NAMES)
    topic = rng.choice(("name", "wellbeing", "thanks", "goodbye", "comfort", "joy"))
    if topic == "name":
        return introductions(name, rng)
    mood = rng.choice(BAD_MOODS if topic == "comfort" else GOOD_MOODS)
    texts = {
        "wellbeing": (
            f"{rng.choice(HELLOS)}! How are you?",
            "How are you today?",
            "Are you well?",
            f"How are you? I am {name}.",
        ),
        "thanks": (
            "Thank you!",
            "Thanks for your help.",
            "Thank you very much.",
            f"Thank you, that helped {name} a lot.",
        ),
        "goodbye": ("Goodbye!", "I have to go now.", "See you tomorrow.", f"I have to go now, {name} is waiting."),
    }
    moods = (
        f"I feel {mood} today.",
        f"I am {mood}.",
        f"I am so {mood} today.",
        f"My friend {name} is {mood}.",
        f"{name} feels {mood} today.",
    )
    other = rng.choice([reply for reply in REPLIES if reply != topic])
    return Question(
        rng.choice(texts.get(topic, moods)), Statement(REPLIES[topic]), Statement(REPLIES[other]), takes_forms=False
    )


def introductions(name: str, rng: Random) -> Question:
    hello = rng.choice(HELLOS)
    texts = (f"{hello}, I am {name}.", f"{hello}! My name is {name}.", f"{hello}, {name} here.")
    says = ("Hello @, how can I help you?", "Hello @, nice to meet you.")
    other = rng.choice([entry for entry in NAMES if entry != name])
    right, wrong = about(name, *says), about(other, *says)
    return Question(rng.choice(texts), Statement(right.sentences), Statement(wrong.sentences), takes_forms=False)


KINDS: tuple[tuple[Callable[[Random], Question], float], ...] = (
    (sums, 0.20),
    (stories, 0.10),
    (numbers, 0.12),
    (sizes, 0.10),
    (opposites, 0.12),
    (letters, 0.08),
    (odd_ones, 0.06),
    (lists, 0.12),
    (small_talk, 0.10),
)

OPENINGS = ("Hi! ", "I have a question. ", "Please help me. ", "One question. ")


def draw(rng: Random) -> Question:
    """A question of a random kind, at times with a friendly opening."""
    (kind,) = rng.choices([kind for kind, _ in KINDS], [weight for _, weight in KINDS])
    question = kind(rng)
    if not question.takes_forms or rng.random() < 0.6:
        return question
    return replace(question, text=rng.choice(OPENINGS) + question.text)
