"""What is true: reads a question's text and checks what an answer to it claims.

Nothing is handed over from the maker of the questions: a question is read by its words, the result is
computed here. A check takes the answer in small letters. An answer that claims several things at once
("yes and no", every number, every word of the question) claims nothing true.
"""

import re
from collections.abc import Callable, Collection, Iterable

from pipeline.demo.questions import BAD_MOODS, COUNTS, GOOD_MOODS, GROUPS, NAMES, OPPOSITES, SIZES

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
    """The check of answers to this question; None for a question of no known kind."""
    text = question.lower()
    for pattern, make in READERS:
        found = re.search(pattern, text)
        if found:
            return make(found)
    return None


def plus(found: re.Match[str]) -> Check:
    return says_number(int(found["one"]), int(found["two"]), int(found["one"]) + int(found["two"]))


def minus(found: re.Match[str]) -> Check:
    return says_number(int(found["one"]), int(found["two"]), int(found["one"]) - int(found["two"]))


def says_number(one: int, two: int, result: int) -> Check:
    """The answer ends with the result; numbers before it only repeat the question's, each once at most."""

    def check(claim: str) -> bool:
        *repeated, last = numbers_in(claim) or [-1]
        echo = sorted(repeated) in ([], [one], [two], sorted((one, two)))
        return last == result and echo and not denies(claim)

    return check


def which_number(found: re.Match[str]) -> Check:
    one, two = int(found["one"]), int(found["two"])
    ranks = {str(one): one, str(two): two}
    return says_choice(
        found["sign"], str(one), str(two), ranks, lambda claim: [str(number) for number in numbers_in(claim)]
    )


def which_animal(found: re.Match[str]) -> Check:
    ranks = {animal: rank for rank, animal in enumerate(SIZES)}
    return says_choice(found["sign"], found["one"], found["two"], ranks, lambda claim: named(claim, SIZES))


def says_choice(sign: str, one: str, two: str, ranks: dict[str, int], read: Callable[[str], list[str]]) -> Check:
    """The answer names the right one of two, or says how the two compare, and that is true."""
    right = max(one, two, key=ranks.__getitem__)
    if sign == "smaller":
        right = min(one, two, key=ranks.__getitem__)

    def check(claim: str) -> bool:
        said = read(claim)
        if len(said) == 1:
            return said == [right] and not denies(claim) and all(same(sign, word) for word in signs_in(claim))
        return sorted(said) == sorted((one, two)) and comparison_holds(claim, ranks) is True

    return check


def signs_in(claim: str) -> list[str]:
    return re.findall(r"\b(?:larger|bigger|smaller)\b", claim)


def same(sign: str, other: str) -> bool:
    return (sign == "smaller") == (other == "smaller")


def comparison_holds(claim: str, ranks: dict[str, int]) -> bool | None:
    """Whether "X is bigger than Y" is true; None where the claim doesn't compare two known things exactly once."""
    found = list(re.finditer(COMPARED, claim))
    if len(found) != 1 or found[0]["one"] not in ranks or found[0]["two"] not in ranks:
        return None
    left, right = ranks[found[0]["one"]], ranks[found[0]["two"]]
    true = left < right if found[0]["sign"] == "smaller" else left > right
    return true != bool(found[0]["no"])


def opposite(found: re.Match[str]) -> Check:
    word = found["word"]
    if word not in OPPOSITES:
        return never

    def check(claim: str) -> bool:
        said = named(re.sub(rf"\bopposite of {word}\b", "", claim), OPPOSITES)
        return said == [OPPOSITES[word]] and not denies(claim)

    return check


def first_letter(found: re.Match[str]) -> Check:
    """The one letter that stands alone; "a" and "I" before another word are no letters but words."""
    word = found["word"]

    def check(claim: str) -> bool:
        alone = re.findall(r"\b[a-z]\b", re.sub(r"\b[ai] (?=\w)", "", claim))
        return alone == [word[0]] and not denies(claim)

    return check


def which_group(found: re.Match[str]) -> Check:
    groups = [group[:-1] for group, words in GROUPS.items() if found["word"] in words]
    return lambda claim: named(claim, SINGULARS) == groups and not denies(claim)


def in_group(found: re.Match[str]) -> Check:
    """Yes or no, and nothing that speaks against it."""
    true = found["word"] in GROUPS[f"{found['one']}s"]

    def check(claim: str) -> bool:
        said = {bool(word) for word in re.findall(r"\b(?:(yes|yeah)|no|nope|is not|isn't)\b", claim)}
        others = set(named(claim, SINGULARS)) - {found["one"]}
        return said == {true} and not others and not re.search(r"\b(?:maybe|perhaps)\b", claim)

    return check


def list_of(found: re.Match[str]) -> Check:
    """Exactly so many different members of the group, and no member of another."""
    group, count = found["group"], next(number for number, word in COUNTS.items() if word == found["count"])
    everything = [word for words in GROUPS.values() for word in words]

    def check(claim: str) -> bool:
        said = named(claim, everything)
        return len(said) == count == len(set(said)) and set(said) <= set(GROUPS[group]) and not denies(claim)

    return check


def replies(topic: str) -> Callable[[re.Match[str]], Check]:
    """The answer says something that fits the topic, and nothing that fits another."""
    others = [pattern for other, pattern in REPLIES.items() if other != topic]

    def check(claim: str) -> bool:
        return bool(re.search(REPLIES[topic], claim)) and not any(re.search(pattern, claim) for pattern in others)

    return lambda found: check


def greets(found: re.Match[str]) -> Check:
    """A greeting by the right name, and by no other."""
    name = found["name"] or found["here"]

    def check(claim: str) -> bool:
        greeting = re.search(
            r"\b(hello|hi|hey|good (morning|evening|day)|nice to meet you|pleased to meet you)\b", claim
        )
        return bool(greeting) and set(named(claim, [name.lower() for name in NAMES])) == {name}

    return check


def never(claim: str) -> bool:
    return False


def numbers_in(claim: str) -> list[int]:
    """The numbers that the claim names, as digits or words; "the larger one" names none."""
    words = re.findall(rf"\b(?:\d+|(?<!er )(?:{any_of(NUMBER_WORDS)}))\b", claim)
    return [int(word) if word.isdigit() else NUMBER_WORDS.index(word) for word in words]


def named(claim: str, words: Collection[str]) -> list[str]:
    """Those of `words` that the claim names, in its order, repeats included."""
    return re.findall(rf"\b(?:{'|'.join(words)})\b", claim)


def denies(claim: str) -> bool:
    return bool(re.search(r"\bnot\b|n't\b|\bnever\b", claim))


def any_of(words: Iterable[str]) -> str:
    return "|".join(word.lower() for word in words)


ANIMAL = rf"an? (?P<one>{any_of(SIZES)})"
OTHER = rf"an? (?P<two>{any_of(SIZES)})"
SIGN = r"(?P<sign>larger|bigger|smaller)"
READERS: tuple[tuple[str, Callable[[re.Match[str]], Check]], ...] = (
    (r"(?P<one>\d+) (?:plus|\+) (?P<two>\d+)", plus),
    (r"(?:add|sum of) (?P<one>\d+) (?:and|to) (?P<two>\d+)", plus),
    (r"has (?P<one>\d+) \w+ and gets (?P<two>\d+) more", plus),
    (r"(?P<one>\d+) (?:minus|-) (?P<two>\d+)", minus),
    (r"take (?P<two>\d+) (?:away )?from (?P<one>\d+)", minus),
    (r"has (?P<one>\d+) \w+ and gives away (?P<two>\d+)", minus),
    (rf"which (?:number )?is {SIGN}[,:] (?P<one>\d+) or (?P<two>\d+)", which_number),
    (rf"which (?:animal )?is {SIGN}[,:] {ANIMAL} or {OTHER}", which_animal),
    (r"opposite of (?P<word>\w+)", opposite),
    (r"first letter of (?P<word>\w+)", first_letter),
    (r"which letter starts the word (?P<word>\w+)", first_letter),
    (rf"\ban? (?:{any_of(SINGULARS)}) or an? (?:{any_of(SINGULARS)}): (?P<word>\w+)", which_group),
    (rf"\bthis an? (?P<one>{any_of(SINGULARS)}): (?P<word>\w+)", in_group),
    (rf"\bthis is an? (?P<one>{any_of(SINGULARS)}): (?P<word>\w+)", in_group),
    (rf"(?P<count>{any_of(COUNTS.values())}) (?P<group>{any_of(GROUPS)})\b", list_of),
    (r"how are you|are you well", replies("wellbeing")),
    (r"\bthank", replies("thanks")),
    (r"\bgoodbye\b|\bhave to go\b|\bsee you\b", replies("goodbye")),
    (rf"\b(?:i am|i feel|is|feels)(?: so)? (?:{any_of(BAD_MOODS)})\b", replies("comfort")),
    (rf"\b(?:i am|i feel|is|feels)(?: so)? (?:{any_of(GOOD_MOODS)})\b", replies("joy")),
    (rf"\b(?:i am|name is) (?P<name>{any_of(NAMES)})\b|, (?P<here>{any_of(NAMES)}) here\b", greets),
)
