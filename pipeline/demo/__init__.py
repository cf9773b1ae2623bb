"""The demo data, which zerochat makes from a seed, without files or network.

The data are short English conversations of several kinds: sums, comparisons, word puzzles, lists, small talk, and
instructions about form. Their quality is mixed on purpose. A model that imitates them is right, friendly and brief in
about half of its answers, so that RLHF can improve it.

    questions.py   words, facts, and questions with a right and a wrong statement
    answers.py     good answers, instructions about form, and flaws: wrong, rude, rambling, unfinished, off the point
    rows.py        conversations, preferences and prompts, with their held-out halves
    truth.py       checks of what an answer claims, computed from the question's text
    gold.py        the gold scorer, which judges answers and trains nothing
"""

from pipeline.demo.rows import demo_rows, rows_of

__all__ = ["demo_rows", "rows_of"]
