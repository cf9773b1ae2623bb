"""Words, and what is true about them. The maker asks about them and the gold scorer knows them too."""

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

# From the smallest to the largest, far enough apart that nobody argues.
SIZES = ("ant", "bee", "mouse", "cat", "wolf", "horse", "elephant", "whale")

THINGS = ("apples", "books", "coins", "cards", "eggs", "pens", "stones", "cups")

COUNTS = {2: "two", 3: "three", 4: "four"}

GOOD_MOODS = ("happy", "glad", "cheerful", "proud", "excited", "pleased")
BAD_MOODS = ("sad", "ill", "lonely", "tired", "upset", "worried")


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def listed(words: tuple[str, ...] | list[str]) -> str:
    """ "cat, dog and cow" """
    return f"{', '.join(words[:-1])} and {words[-1]}"
