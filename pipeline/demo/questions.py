"""The words and facts of the demo, and its questions, each with a right and a wrong statement as the answer.

A kind of question is a function of a random generator. Wording, names and numbers are sampled separately, which gives
many thousand questions about a few hundred facts.

`Question.content` lists the words that distinguish a question from others of its kind, without its wording. The content
decides whether a question is held out, so that a held-out question is never a rewording of a training question.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

NAMES = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Hugo",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Mary",
    "Nick",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tom",
    "Vera",
)

GROUPS: dict[str, tuple[str, ...]] = {
    "animals": ("cat", "dog", "horse", "cow", "mouse", "wolf", "goat", "lion"),
    "fruits": ("apple", "pear", "plum", "banana", "cherry", "lemon", "grape", "peach"),
    "colours": ("red", "blue", "green", "yellow", "brown", "pink", "white", "black"),
    "tools": ("hammer", "saw", "drill", "wrench", "knife", "rake", "spade", "axe"),
}

PAIRS = (
    ("hot", "cold"),
    ("big", "small"),
    ("old", "young"),
    ("fast", "slow"),
    ("hard", "soft"),
    ("wet", "dry"),
    ("day", "night"),
    ("open", "closed"),
    ("happy", "sad"),
    ("rich", "poor"),
    ("high", "low"),
    ("long", "short"),
    ("light", "dark"),
    ("full", "empty"),
    ("early", "late"),
    ("strong", "weak"),
)
OPPOSITES: dict[str, str] = {**dict(PAIRS), **{right: left for left, right in PAIRS}}

ALL_WORDS = tuple(word for words in GROUPS.values() for word in words)

# From the smallest to the largest, with clear differences.
SIZES = ("ant", "bee", "mouse", "cat", "wolf", "horse", "elephant", "whale")

THINGS = ("apples", "books", "coins", "cards", "eggs", "pens", "stones", "cups")

COUNTS = {2: "two", 3: "three", 4: "four"}

GOOD_MOODS = ("happy", "glad", "cheerful", "proud", "excited", "pleased")
BAD_MOODS = ("sad", "ill", "lonely", "tired", "upset", "worried")


# The share of questions without their last mark, and the shares of the cases: as written, small and capital letters.
TYPED = {"small_talk": (0.35, (0.40, 0.36, 0.24)), "other": (0.1, (0.70, 0.14, 0.16))}


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def listed(words: tuple[str, ...] | list[str]) -> str:
    """Return words as an English list, such as "cat, dog and cow"."""
    return f"{', '.join(words[:-1])} and {words[-1]}"


@dataclass(frozen=True)
class Statement:
    """The content of an answer, as sentences and as one word.

    patterns: the sentences, with "@" in place of `value`
    word: the one-word answer; None if one word cannot express the content

    The sentences are built on access, because most of the questions that are sampled for held-out prompts are
    discarded.
    """

    patterns: tuple[str, ...]
    word: str | None = None
    value: str = ""  # replaces "@" in the patterns

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return the sentences with their value."""
        return tuple(pattern.replace("@", self.value) for pattern in self.patterns)

    def of(self, value: str) -> "Statement":
        """Return the same statement with another value for "@"."""
        return Statement(self.patterns, self.word, value)


@dataclass(frozen=True)
class Question:
    """A question with a right and a wrong answer.

    kind: the name of the function in `KINDS` that made the question
    content: the words that distinguish the question from others of its kind; None if training needs every question of
        this form, for example because it is the only one about its fact
    takes_forms: whether an instruction about form may be added
    """

    text: str
    right: Statement
    wrong: Statement
    kind: str
    content: tuple[str, ...] | None
    takes_forms: bool = True

    def beginning(self, words: str) -> "Question":
        """Return the question with `words` before its text."""
        return replace(self, text=words + self.text)

    def typed(self, rng: Random) -> "Question":
        """Return the question as people type it: sometimes in small or capital letters, or without the last mark.

        Small talk has more of both. Its texts are few and short, and each needs some rows in every form.
        """
        dropped, cases = TYPED["small_talk" if self.kind == "small_talk" else "other"]
        text = self.text[:-1] if self.text[-1] in ".?!" and rng.random() < dropped else self.text
        case = rng.choices((str, str.lower, str.upper), cases)[0]
        return replace(self, text=case(text))


def about(value: str, *sentences: str) -> Statement:
    """Return a statement that has `value` for "@" in its sentences and as its one-word answer."""
    return Statement(sentences, value, value)


def sums(rng: Random) -> Question:
    """Return an addition or a subtraction."""
    left, right = two_addends(rng)
    if rng.random() < 0.5:
        left, right, word, sign = left + right, left, "minus", "-"
        result = left - right
    else:
        word, sign, result = "plus", "+", left + right
    texts = (
        f"What is {left} {word} {right}?",
        f"How much is {left} {word} {right}?",
        f"Tell me {left} {word} {right}.",
        f"What is {left} {sign} {right}?",
        f"{left} {sign} {right}?",
    )
    sentences = ("The answer is @.", "It is @.")
    return on_number(rng.choice(texts), result, sentences, "sums", (str(left), word, str(right)), rng)


def stories(rng: Random) -> Question:
    """Return an addition or a subtraction as a short story."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    left, right = two_addends(rng)
    if rng.random() < 0.5:
        left, right = left + right, left
        change, result = f"gives away {right}", left - right
    else:
        change, result = f"gets {right} more", left + right
    text = f"{name} has {left} {things} and {change}. How many are there now?"
    content = (name, things, str(left), change)
    return on_number(text, result, ("The answer is @.", "There are @ now."), "stories", content, rng)


def two_addends(rng: Random) -> tuple[int, int]:
    """Return two numbers of at least 1 with a sum of at most 10, which a tiny model can learn in a minute."""
    total = rng.randint(2, 10)
    left = rng.randint(1, total - 1)
    return left, total - left


def on_number(
    text: str, result: int, sentences: tuple[str, ...], kind: str, content: tuple[str, ...], rng: Random
) -> Question:
    """Return a question about a number. The wrong result is positive and differs by 1 or 2."""
    step = rng.choice((-2, -1, 1, 2))
    wrong = result + step if result + step > 0 else result + abs(step)
    return Question(text, about(str(result), *sentences), about(str(wrong), *sentences), kind, content)


def numbers(rng: Random) -> Question:
    """Return a question about the larger or smaller of two numbers."""
    small, large = sorted(rng.sample(range(1, 10), 2))
    sign, value, other = rng.choice((("larger", large, small), ("smaller", small, large)))
    first, second = rng.sample((small, large), 2)
    text = rng.choice((f"Which is {sign}, {first} or {second}?", f"Which number is {sign}, {first} or {second}?"))
    sentences = (f"The {sign} number is @.", "It is @.")
    content = (sign, str(small), str(large))
    return Question(text, about(str(value), *sentences), about(str(other), *sentences), "numbers", content)


def sizes(rng: Random) -> Question:
    """Return a question about the bigger or smaller of two animals."""
    low, high = sorted(rng.sample(range(len(SIZES)), 2))
    small, large = with_article(SIZES[low]), with_article(SIZES[high])
    first, second = rng.sample((small, large), 2)
    sign, value, other = rng.choice((("bigger", SIZES[high], SIZES[low]), ("smaller", SIZES[low], SIZES[high])))
    text = rng.choice((f"Which is {sign}, {first} or {second}?", f"Which animal is {sign}, {first} or {second}?"))
    statement = Statement((f"The @ is {sign}.", "It is the @."))
    return Question(text, statement.of(value), statement.of(other), "sizes", (sign, small, large))


def opposites(rng: Random) -> Question:
    """Return a question about the opposite of a word."""
    word = rng.choice(tuple(OPPOSITES))
    value = OPPOSITES[word]
    other = rng.choice([entry for entry in OPPOSITES if entry not in (word, value)])
    statement = Statement(("The opposite is @.", "It is @."))
    if rng.random() < 0.5:
        first, second = rng.sample((value, other), 2)
        forms = (f"Is the opposite of {word} {first} or {second}?", f"Opposite of {word}, {first} or {second}?")
        return Question(
            rng.choice(forms), statement.of(value), statement.of(other), "opposites", (word, *sorted((value, other)))
        )
    texts = (
        f"What is the opposite of {word}?",
        f"Tell me the opposite of {word}.",
        f"Which word is the opposite of {word}?",
        f"Do you know the opposite of {word}?",
    )
    return Question(rng.choice(texts), statement.of(value), statement.of(other), "opposites", None)


def letters(rng: Random) -> Question:
    """Return a question about the first letter of a word."""
    word = rng.choice(ALL_WORDS)
    value = word[0].upper()
    other = rng.choice([letter for letter in "BCDGHLMPRSW" if letter != value])
    texts = (
        f"What is the first letter of {word}?",
        f"Tell me the first letter of {word}.",
        f"Which letter starts the word {word}?",
    )
    statement = Statement(("The first letter is @.", "It starts with @."))
    return Question(rng.choice(texts), statement.of(value), statement.of(other), "letters", None, takes_forms=False)


def groups(rng: Random) -> Question:
    """Return a question about the group of a word, or about whether the word is in one group."""
    right, wrong = rng.sample(tuple(GROUPS), 2)
    word = rng.choice(GROUPS[right])
    true, false = with_article(right[:-1]), with_article(wrong[:-1])
    one, other = rng.sample((true, false), 2)
    if rng.random() < 0.5:
        statement = Statement(("It is @.", "That is @."))
        text = rng.choice((f"Is it {one} or {other}: {word}?", f"Tell me if this is {one} or {other}: {word}."))
        content = (word, *sorted((one, other)))
        return Question(text, statement.of(true), statement.of(false), "groups", content)
    yes = Statement(("Yes, it is.", f"Yes, that is {one}."), "yes")
    no = Statement(("No, it is not.", f"No, that is not {one}."), "no")
    text = rng.choice((f"Is this {one}: {word}?", f"Do you think this is {one}: {word}?"))
    return Question(text, yes if one == true else no, no if one == true else yes, "groups", (word, one))


def lists(rng: Random) -> Question:
    """Return a question about several members of a group. Half of the questions name the first member."""
    group, (count, number_word) = rng.choice(tuple(GROUPS)), rng.choice(tuple(COUNTS.items()))
    right, wrong = right_list(group, count, rng), wrong_list(group, count, rng)
    start, content = "", None
    if rng.random() < 0.5:
        words = GROUPS[group]
        at = rng.randrange(len(words))
        first, right = words[at], [words[(at + i) % len(words)] for i in range(count)]
        start, content = f", starting with {first}", (number_word, group, first)
    texts = (
        f"Name {number_word} {group}{start}.",
        f"Can you tell me {number_word} {group}{start}?",
        f"List {number_word} {group}{start}.",
        f"I need {number_word} {group}{start}.",
    )
    statement = Statement((f"{number_word.capitalize()} {group} are @.", "You could take @."))
    return Question(rng.choice(texts), statement.of(listed(right)), statement.of(listed(wrong)), "lists", content)


def right_list(group: str, count: int, rng: Random) -> list[str]:
    """Return different members in the order of the group, which is easier to learn than a random order."""
    return sorted(rng.sample(GROUPS[group], count), key=GROUPS[group].index)


def wrong_list(group: str, count: int, rng: Random) -> list[str]:
    """Return too many members, too few members, or a list with one word of another group."""
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

# The weights of the topics of small talk. Greetings are the most frequent one.
TOPICS = {"hello": 4, "name": 1, "wellbeing": 1, "thanks": 2, "goodbye": 2, "comfort": 2, "joy": 2}

HELLOS = ("Hello", "Hi", "Hey", "Good morning", "Good evening")
FIRST_HELLOS = (*HELLOS, "Hello", "Hi", "Hi")  # "hi" is what most people type first
GREETINGS = ("Hello, how can I help you?", "Hello, nice to meet you.")


def small_talk(rng: Random) -> Question:
    """Return a greeting, an introduction, thanks, a goodbye, a mood or a question about well-being, with a reply."""
    name = rng.choice(NAMES)
    (topic,) = rng.choices(tuple(TOPICS), tuple(TOPICS.values()))
    if topic == "hello":
        text = f"{rng.choice(FIRST_HELLOS)}{rng.choice(('', '', ' there'))}{rng.choice(('', '!', '.'))}"
        wrong = Statement(REPLIES[rng.choice(tuple(REPLIES))])
        return Question(text, Statement(GREETINGS), wrong, "small_talk", None, takes_forms=False)
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
            "Thanks!",
            "Thanks for your help.",
            "Thank you very much.",
            f"Thank you, that helped {name} a lot.",
        ),
        "goodbye": (
            "Goodbye!",
            "Goodbye!",
            "Bye!",
            "I have to go now.",
            "See you tomorrow.",
            f"I have to go now, {name} is waiting.",
        ),
    }
    moods = (
        f"I feel {mood} today.",
        f"I am {mood}.",
        f"I am so {mood} today.",
        f"My friend {name} is {mood}.",
        f"{name} feels {mood} today.",
    )
    other = rng.choice([reply for reply in REPLIES if reply != topic])
    text = rng.choice(texts.get(topic, moods))
    content = (topic, *[word for word in (mood, name) if word in text]) if name in text else None
    return Question(
        text, Statement(REPLIES[topic]), Statement(REPLIES[other]), "small_talk", content, takes_forms=False
    )


def introductions(name: str, rng: Random) -> Question:
    """Return an introduction by name, with a greeting as the right answer. The wrong one greets somebody else.

    The right answer has no name, because a tiny model does not learn in a minute to copy names.
    """
    hello = rng.choice(HELLOS)
    text = rng.choice((f"{hello}, I am {name}.", f"{hello}! My name is {name}."))
    other = rng.choice([entry for entry in NAMES if entry != name])
    wrong = Statement(("Hello @, how can I help you?", "Hello @, nice to meet you."), value=other)
    return Question(text, Statement(GREETINGS), wrong, "small_talk", None, takes_forms=False)


KINDS: dict[Callable[[Random], Question], float] = {
    sums: 0.22,
    stories: 0.09,
    numbers: 0.10,
    sizes: 0.10,
    opposites: 0.11,
    letters: 0.10,
    groups: 0.07,
    lists: 0.06,
    small_talk: 0.15,
}
_KINDS, _UP_TO = tuple(KINDS), tuple(accumulate(KINDS.values()))

OPENINGS = ("Hi! ", "I have a question. ", "Please help me. ", "One question. ")


def draw(rng: Random) -> Question:
    """Return a question of a random kind, sometimes with a friendly opening. (`Question.typed` changes its letters.)"""
    (kind,) = rng.choices(_KINDS, cum_weights=_UP_TO)
    question = kind(rng)
    if not question.takes_forms or rng.random() < 0.8:
        return question
    return question.beginning(rng.choice(OPENINGS))
