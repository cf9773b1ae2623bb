"""The gold scorer scores the claim of an answer and gives no score for tricks."""

import pytest

from pipeline.data.records import Message
from pipeline.demo.gold import gold_parts, gold_score


def asked(question: str, system: str | None = None) -> list[Message]:
    return [*([Message("system", system)] if system else []), Message("user", question)]


def score(question: str, answer: str) -> float:
    return gold_score(asked(question), answer)


def right(question: str, answer: str, *, system: str | None = None) -> float:
    return gold_parts(asked(question, system), answer)["right"]


RIGHT = [
    ("What is 7 plus 5?", "7 plus 5 is 12."),
    ("What is 7 plus 5?", "It is twelve!"),
    ("How much is 14 minus 5?", "Nine."),
    ("What is 11 - 8?", "11 - 8 = 3."),
    ("Anna has 6 eggs and gets 3 more. How many eggs does Anna have now?", "Now she has 9 of them."),
    ("Which is larger, 12 or 21?", "12 is smaller than 21."),
    ("Which is smaller, 12 or 21?", "The smaller one is 12."),
    ("Which animal is bigger, an ant or a whale?", "The whale."),
    ("Which is smaller, a cat or a horse?", "A horse is bigger than a cat."),
    ("Is this a tool: saw?", "Yes, I think so."),
    ("Is this a tool: cat?", "That isn't a tool."),
    ("Is it a colour or a fruit: plum?", "A fruit."),
    ("Do you know the opposite of wet?", "Yes, the opposite of wet is dry."),
    ("Which letter starts the word plum?", "It starts with a P."),
    ("Name three colours.", "Here are some: red, blue, green."),
    ("How are you? I am Ben.", "I am very well, thank you."),
    ("Thank you, that helped Sam a lot.", "It was my pleasure."),
    ("My friend Ida is sad.", "Oh, I am sorry."),
    ("Good morning, I am Rosa.", "Good morning Rosa."),
    ("BYE", "Goodbye, see you soon."),
    ("Hi, Hugo here.", "Hi Hugo, nice to meet you."),
]

WRONG = [
    ("What is 7 plus 5?", "It is 13."),
    ("What is 7 plus 5?", "It is not 12."),
    ("What is 7 plus 5?", "It is 11 or 12."),
    ("What is 7 plus 5?", "10 11 12."),
    ("What is 7 plus 5?", "7 5."),
    ("Anna has 6 eggs and gets 3 more. How many eggs does Anna have now?", "I like eggs."),
    ("Which is larger, 12 or 21?", "12 21."),
    ("Which is larger, 12 or 21?", "21 is smaller than 12."),
    ("Which is larger, 12 or 21?", "21 is smaller."),
    ("Which animal is bigger, an ant or a whale?", "An ant and a whale."),
    ("Which is smaller, a cat or a horse?", "A cat is bigger than a horse."),
    ("Is this a tool: saw?", "Yes and no."),
    ("Is this a tool: saw?", "Yes, that is an animal."),
    ("Is this a tool: saw?", "Maybe yes."),
    ("Is this a tool: cat?", "I do not know."),
    ("Is it a colour or a fruit: plum?", "A fruit or a colour."),
    ("Do you know the opposite of wet?", "Yes, I do."),
    ("Do you know the opposite of wet?", "Dry, hot, cold or slow."),
    ("Which letter starts the word plum?", "P Q R S."),
    ("Name three colours.", "Red, red and red."),
    ("Name three colours.", "Red, blue and cat."),
    ("Name three colours.", "Red, blue, green, black and white."),
    ("How are you?", "I am fine, sorry to hear that, you are welcome."),
    ("My friend Ida is sad.", "I am glad to hear that."),
    ("Good morning, I am Rosa.", "Good morning Anna, Ben and Rosa."),
]


@pytest.mark.parametrize(("question", "answer"), RIGHT)
def test_a_correct_claim_in_any_wording(question, answer):
    assert right(question, answer) == 1.0
    assert score(question, answer) == 1.0


@pytest.mark.parametrize(("question", "answer"), WRONG)
def test_a_false_claim_scores_less_than_half(question, answer):
    assert right(question, answer) == 0.0
    assert score(question, answer) < 0.5


def test_a_number_of_thousands_of_digits_is_wrong():
    """Python refuses to convert them. A degenerate model repeats one digit up to the longest answer."""
    assert right("What is 7 plus 5?", "1" * 5000) == right("Which is larger, 12 or 21?", "1" * 5000) == 0.0


@pytest.mark.parametrize("answer", ["", "   ", ".", "...", "!?"])
def test_answers_without_a_claim_score_zero(answer):
    assert set(gold_parts([Message("user", "What is 2 plus 2?")], answer).values()) == {0.0}


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ("What a stupid question. It is 4.", "polite"),
        ("THE ANSWER IS 4.", "polite"),
        ("The answer is 4", "finished"),
        (
            "It is 4. By the way, my uncle likes to talk about the sea and about the many ships that he saw.",
            "to_the_point",
        ),
    ],
)
def test_each_flaw_costs_half(answer, part):
    parts = gold_parts([Message("user", "What is 2 plus 2?")], answer)
    assert parts == {"right": 1.0, "to_the_point": 1.0, "polite": 1.0, "finished": 1.0} | {part: 0.0}
    assert score("What is 2 plus 2?", answer) == 0.5 * score("What is 2 plus 2?", "It is 4.")


def test_repetitions_are_not_to_the_point():
    assert (
        gold_parts([Message("user", "How are you?")], "I am fine fine fine fine fine fine fine fine.")["to_the_point"]
        < 0.7
    )


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ("Answer every question in one word.", "Cold.", "It is cold."),
        ("Always answer in a full sentence.", "It is cold.", "Cold."),
        ("Write in small letters only.", "it is cold.", "It is cold."),
        ("Begin every answer with the word Sure.", "Sure, it is cold.", "It is cold."),
        ("End every answer with an exclamation mark.", "It is cold!", "It is cold."),
    ],
)
def test_the_form_requested_by_system_or_user(rule, good, bad):
    question = "What is the opposite of hot?"
    assert (right(question, good, system=rule), right(question, bad, system=rule)) == (1.0, 0.5)
    by_user = f"{rule.replace('every answer ', '')} {question}"
    assert (right(by_user, good), right(by_user, bad)) == (1.0, 0.5)


def test_the_last_message_is_the_question():
    messages = [Message("user", "What is 2 plus 2?"), Message("assistant", "4."), Message("user", "What is 3 plus 3?")]
    assert [gold_parts(messages, answer)["right"] for answer in ("6.", "4.")] == [1.0, 0.0]


def test_unknown_prompts_are_refused():
    messages = [Message("user", "Write a poem.")]
    with pytest.raises(ValueError, match="demo prompts only"):
        gold_score(messages, "Roses are red.")
