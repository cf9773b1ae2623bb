"""Right answers of the demo's models to what people type first, at temperature 0.

36 inputs (greetings, thanks, goodbyes, moods, sums, comparisons and other questions) as written, in small letters and
in capital letters. A case is a seed: the SFT model and the PPO model of runs/demo-seeds/seed-N, which
`benchmarks.demo_seeds` trains if it is missing. The claim of an answer counts (`pipeline.demo.gold.gold_parts`).

The figure of a case is the number of right answers of PPO to the inputs as written. Its peer is that of SFT.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

from benchmarks import demo_seeds
from benchmarks.measure import run_command
from benchmarks.record import ROOT, Result
from engine import Sampling
from pipeline.chat import folder, participant
from pipeline.data.records import Message
from pipeline.demo.gold import gold_parts

CASES = demo_seeds.CASES[:5]
INPUTS = (
    "Hello",
    "Hi!",
    "Hey there",
    "Good morning",
    "Good evening!",
    "How are you?",
    "How are you today?",
    "Are you well?",
    "Thank you!",
    "Thanks",
    "Thanks for your help.",
    "Goodbye!",
    "Bye",
    "See you tomorrow.",
    "I am sad.",
    "I feel happy today.",
    "What is 2 + 3?",
    "What is 5 + 4?",
    "What is 7 - 2?",
    "How much is 6 + 1?",
    "Tell me 3 plus 3.",
    "Tom has 4 apples and gets 2 more. How many are there now?",
    "Which is larger, 4 or 9?",
    "Which number is smaller, 3 or 8?",
    "Which animal is bigger, an elephant or an ant?",
    "Which is smaller, a horse or a mouse?",
    "What is the opposite of hot?",
    "What is the opposite of big?",
    "Which word is the opposite of night?",
    "What is the first letter of tree?",
    "Which letter starts the word dog?",
    "Is this an animal: dog?",
    "Is this a fruit: dog?",
    "Is it a fruit or a colour: red?",
    "Name three animals.",
    "Can you tell me two fruits?",
)
FORMS: dict[str, Callable[[str], str]] = {"as_written": str, "small_letters": str.lower, "capital_letters": str.upper}
SAMPLING = Sampling(max_new_tokens=40, temperature=0.0)


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Count the right answers of `cases` in order. Greedy answers are the same each time, so a case runs once."""
    for case in cases:
        run_command([sys.executable, *demo_seeds.arguments(case, "ppo")], folder=ROOT, limit=demo_seeds.LIMIT_SECONDS)
        counts = {stage: right_answers(case, stage) for stage in ("sft", "ppo")}
        yield Result(
            bench="everyday_inputs",
            case=case,
            ours=counts["ppo"]["as_written"],
            peer=counts["sft"]["as_written"],
            unit=f"right answers of {len(INPUTS)}",
            lower_is_better=False,
            detail={"peer": "SFT", **counts},
        )


def right_answers(case: str, stage: str) -> dict[str, int]:
    """Return the number of right answers of a stage's model, by the form of the inputs."""
    model = participant.load(folder.find(demo_seeds.folder(case, "ppo") / stage))

    def is_right(text: str) -> bool:
        model.reset()
        answer = "".join(model.answer("", text, SAMPLING, 0))
        return gold_parts([Message("user", text)], answer)["right"] == 1.0

    return {form: sum(is_right(change(text)) for text in INPUTS) for form, change in FORMS.items()}
