from pipeline.data.records import Message, Prompt
from pipeline.evaluation.judge import gold_scores

PROMPTS = [Prompt((Message("user", f"What is {n} + 1?"),), "demo") for n in range(3)]


def test_gold_scores_need_the_demos_prompts() -> None:
    scores = gold_scores(PROMPTS, ["It is 1.", "2", "nonsense of the worst kind"])
    assert scores is not None
    assert scores[0] == 1.0 > scores[1] > scores[2] == 0.0
    assert gold_scores([*PROMPTS, Prompt(PROMPTS[0].messages, "gsm8k")], ["1"] * 4) is None
    assert gold_scores([], []) is None
