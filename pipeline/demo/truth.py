"""Checks of the demo's answers: `read_question` parses a question's text and returns a check of the answer's claim.

The generator of the questions passes no result to this file. Each check computes the result from the question's text.
The input of a check is the answer in lower case. An answer with several claims ("yes and no", every number, every word
of the question) is not true.
"""

import re
from collections.abc import Callable, Collection, Iterable

from pipeline.demo.questions import ALL_WORDS, BAD_MOODS, COUNTS, GOOD_MOODS, GROUPS, NAMES, OPPOSITES, SIZES

Check = Callable[[str], bool]

NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
)
LONGEST_NUMBER = 100  # digits
SINGULARS = tuple(group[:-1] for group in GROUPS)
REPLIES = {
    "wellbeing": r"\b(i'm|i am|i feel)( very| doing| quite)? (fine|well|good|great|okay)\b",
    "thanks": r"\bwelcome\b|\bpleasure\b|\b(glad|happy) to help|\bany ?time\b",
    "goodbye": r"\bgoodbye\b|\bbye\b|\bsee you\b|\btake care\b",
    "comfort": r"\bsorry\b|\bfeel better\b|\bcheer up\b",
    "joy": r"\b(glad|good|great|happy|nice|wonderful) (for|to hear)\b|\bwonderful\b",
}
COMPARED = r"\b(?P<one>\w+) is (?P<no>not )?(?P<sign>larger|bigger|smaller)(?: than (?:an? )?(?P<two>\w+))?"


def read_question(question: str) -> Check | None:
    """Return the check of answers to a question; None for a question of an unknown kind."""
    text = question.lower()
    for pattern, make in READERS:
        match = re.search(pattern, text)
        if match:
            return make(match)
    return None


def plus(found: re.Match[str]) -> Check:
    """Return the check for an addition."""
    return says_number(int(found["one"]), int(found["two"]), int(found["one"]) + int(found["two"]))


def minus(found: re.Match[str]) -> Check:
    """Return the check for a subtraction."""
    return says_number(int(found["one"]), int(found["two"]), int(found["one"]) - int(found["two"]))


def says_number(one: int, two: int, result: int) -> Check:
    """Return the check that the last number is the result.

    Numbers before it may only repeat the numbers of the question, each once at most.
    """

    def check(claim: str) -> bool:
        *repeated, last = numbers_in(claim) or [-1]
        echo = sorted(repeated) in ([], [one], [two], sorted((one, two)))
        return last == result and echo and not denies(claim)

    return check


def which_number(found: re.Match[str]) -> Check:
    """Return the check for the larger or smaller of two numbers."""
    one, two = int(found["one"]), int(found["two"])
    ranks = {str(one): one, str(two): two}
    return says_choice(
        found["sign"], str(one), str(two), ranks, lambda claim: [str(number) for number in numbers_in(claim)]
    )


def which_animal(found: re.Match[str]) -> Check:
    """Return the check for the bigger or smaller of two animals."""
    ranks = {animal: rank for rank, animal in enumerate(SIZES)}
    return says_choice(found["sign"], found["one"], found["two"], ranks, lambda claim: named(claim, SIZES))


def says_choice(sign: str, one: str, two: str, ranks: dict[str, int], read: Callable[[str], list[str]]) -> Check:
    """Return the check that an answer names the right one of two words, or compares the two words correctly.

    ranks: the rank of each word
    read: returns the words that a claim names
    """
    right = max(one, two, key=ranks.__getitem__)
    if sign == "smaller":
        right = min(one, two, key=ranks.__getitem__)

    def check(claim: str) -> bool:
        mentioned = read(claim)
        if len(mentioned) == 1:
            return mentioned == [right] and not denies(claim) and all(same(sign, word) for word in signs_in(claim))
        return sorted(mentioned) == sorted((one, two)) and comparison_holds(claim, ranks)

    return check


def signs_in(claim: str) -> list[str]:
    """Return the comparatives of a claim."""
    return re.findall(r"\b(?:larger|bigger|smaller)\b", claim)


def same(sign: str, other: str) -> bool:
    """Return whether two comparatives have the same direction."""
    return (sign == "smaller") == (other == "smaller")


def comparison_holds(claim: str, ranks: dict[str, int]) -> bool:
    """Return whether a claim has exactly one comparison such as "X is bigger than Y", which is true."""
    comparisons = list(re.finditer(COMPARED, claim))
    if len(comparisons) != 1 or comparisons[0]["one"] not in ranks or comparisons[0]["two"] not in ranks:
        return False
    left, right = ranks[comparisons[0]["one"]], ranks[comparisons[0]["two"]]
    true = left < right if comparisons[0]["sign"] == "smaller" else left > right
    return true != bool(comparisons[0]["no"])


def opposite(found: re.Match[str]) -> Check:
    """Return the check for the opposite of a word."""
    word = found["word"]

    def check(claim: str) -> bool:
        mentioned = named(re.sub(rf"\bopposite of {word}\b", "", claim), OPPOSITES)
        return mentioned == [OPPOSITES[word]] and not denies(claim)

    return check


def first_letter(found: re.Match[str]) -> Check:
    """Return the check that the only single letter is the first letter of the word.

    "a" and "i" before another word count as words, not as letters.
    """
    word = found["word"]

    def check(claim: str) -> bool:
        single_letters = re.findall(r"\b[a-z]\b", re.sub(r"\b[ai] (?=\w)", "", claim))
        return single_letters == [word[0]] and not denies(claim)

    return check


def which_group(found: re.Match[str]) -> Check:
    """Return the check for the group of a word."""
    groups = [group[:-1] for group, words in GROUPS.items() if found["word"] in words]
    return lambda claim: named(claim, SINGULARS) == groups and not denies(claim)


def in_group(found: re.Match[str]) -> Check:
    """Return the check for "yes" or "no", without doubt, contradiction or another group."""
    true = found["word"] in GROUPS[f"{found['one']}s"]

    def check(claim: str) -> bool:
        verdicts = {bool(word) for word in re.findall(r"\b(?:(yes|yeah)|no|nope|is not|isn't)\b", claim)}
        others = set(named(claim, SINGULARS)) - {found["one"]}
        return verdicts == {true} and not others and not re.search(r"\b(?:maybe|perhaps)\b", claim)

    return check


def list_of(found: re.Match[str]) -> Check:
    """Return the check for exactly the requested number of different members, without members of other groups.

    If the question names the first member, the answer must begin with that member.
    """
    group, count = found["group"], next(number for number, word in COUNTS.items() if word == found["count"])
    first = found["first"]

    def check(claim: str) -> bool:
        mentioned = named(claim, ALL_WORDS)
        return (
            len(mentioned) == count == len(set(mentioned))
            and set(mentioned) <= set(GROUPS[group])
            and first in (None, mentioned[0])
            and not denies(claim)
        )

    return check


def replies(topic: str) -> Callable[[re.Match[str]], Check]:
    """Return a function whose check requires a reply that fits the topic, and no reply that fits another topic."""
    others = [pattern for other, pattern in REPLIES.items() if other != topic]

    def check(claim: str) -> bool:
        return bool(re.search(REPLIES[topic], claim)) and not any(re.search(pattern, claim) for pattern in others)

    return lambda found: check


def greets(found: re.Match[str]) -> Check:
    """Return the check for a greeting, with the name that the user gave or without a name."""
    name = found.groupdict().get("name")
    allowed = {name} if name else set()

    def check(claim: str) -> bool:
        greeting = re.search(
            r"\b(hello|hi|hey|good (morning|evening|day)|nice to meet you|pleased to meet you)\b", claim
        )
        others = any(re.search(pattern, claim) for pattern in REPLIES.values())
        return bool(greeting) and set(named(claim, [name.lower() for name in NAMES])) <= allowed and not others

    return check


def numbers_in(claim: str) -> list[int]:
    """Return the numbers that a claim names, as digits or words. "the larger one" names none.

    Python refuses to convert thousands of digits, which a degenerate model may write. The first ones already make the
    number wrong.
    """
    words = re.findall(rf"\b(?:\d+|(?<!er )(?:{any_of(NUMBER_WORDS)}))\b", claim)
    return [int(word[:LONGEST_NUMBER]) if word.isdigit() else NUMBER_WORDS.index(word) for word in words]


def named(claim: str, words: Collection[str]) -> list[str]:
    """Return the given words that a claim names, in the claim's order, with repetitions."""
    return re.findall(rf"\b(?:{'|'.join(words)})\b", claim)


def denies(claim: str) -> bool:
    """Return whether a claim has a negation."""
    return bool(re.search(r"\bnot\b|n't\b|\bnever\b", claim))


def any_of(words: Iterable[str]) -> str:
    """Return a pattern of the words in lower case."""
    return "|".join(word.lower() for word in words)


ANIMAL = rf"an? (?P<one>{any_of(SIZES)})"
OTHER = rf"an? (?P<two>{any_of(SIZES)})"
SIGN = r"(?P<sign>larger|bigger|smaller)"
READERS: tuple[tuple[str, Callable[[re.Match[str]], Check]], ...] = (
    (r"(?P<one>\d+) ?(?:plus|\+) ?(?P<two>\d+)", plus),
    (r"has (?P<one>\d+) \w+ and gets (?P<two>\d+) more", plus),
    (r"(?P<one>\d+) ?(?:minus|-) ?(?P<two>\d+)", minus),
    (r"has (?P<one>\d+) \w+ and gives away (?P<two>\d+)", minus),
    (rf"which (?:number )?is {SIGN}[,:] (?P<one>\d+) or (?P<two>\d+)", which_number),
    (rf"which (?:animal )?is {SIGN}[,:] {ANIMAL} or {OTHER}", which_animal),
    (r"opposite of (?P<word>\w+)", opposite),
    (r"first letter of (?P<word>\w+)", first_letter),
    (r"which letter starts the word (?P<word>\w+)", first_letter),
    (rf"\ban? (?:{any_of(SINGULARS)}) or an? (?:{any_of(SINGULARS)}): (?P<word>\w+)", which_group),
    (rf"\bthis an? (?P<one>{any_of(SINGULARS)}): (?P<word>\w+)", in_group),
    (rf"\bthis is an? (?P<one>{any_of(SINGULARS)}): (?P<word>\w+)", in_group),
    (
        rf"(?P<count>{any_of(COUNTS.values())}) (?P<group>{any_of(GROUPS)})\b(?:, starting with (?P<first>\w+))?",
        list_of,
    ),
    (r"^(?:hello|hi|hey|good morning|good evening)(?: there)?\W*$", greets),
    (r"how are you|are you well", replies("wellbeing")),
    (r"\bthank", replies("thanks")),
    (r"\b(?:good)?bye\b|\bhave to go\b|\bsee you\b", replies("goodbye")),
    (rf"\b(?:i am|i feel|is|feels)(?: so)? (?:{any_of(BAD_MOODS)})\b", replies("comfort")),
    (rf"\b(?:i am|i feel|is|feels)(?: so)? (?:{any_of(GOOD_MOODS)})\b", replies("joy")),
    (rf"(?:\b(?:i am|name is)|,) (?P<name>{any_of(NAMES)})\b", greets),
)
