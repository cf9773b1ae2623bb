"""The demo data that zerochat makes itself, from a seed: no file, no network.

Short English conversations of several kinds (sums, comparisons, word puzzles, lists, small talk,
instructions about form), deliberately of mixed quality: a model that imitates them is right,
friendly and brief about half of the time, which leaves RLHF something to improve.

    facts.py       words and what is true about them
    questions.py   questions with a right and a wrong statement
    forms.py       instructions about form ("Answer in one word."), and how an answer follows them
    flaws.py       what makes an answer bad: wrong, rude, rambling, unfinished, off the point, formless
    rows.py        conversations, preferences and prompts, with their held-out halves
"""

from pipeline.data.demo.rows import demo_rows, rows_of

__all__ = ["demo_rows", "rows_of"]
