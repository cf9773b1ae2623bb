"""The demo data, which zerochat generates from a seed, without files or network.

The data are short English conversations of several kinds: sums, comparisons, word puzzles, lists, small talk, and
instructions about form. Their quality is mixed on purpose. Most answers that SFT imitates have a flaw, so that RLHF
can improve the trained model.

    questions.py   words, facts, and questions with a right and a wrong statement
    answers.py     good answers, instructions about form, and flaws: wrong, rude, rambling, unfinished, off the point
    rows.py        conversations, preferences and prompts, each with held-out rows
    truth.py       checks of the claim of an answer, computed from the question's text
    gold.py        the gold scorer, which evaluates answers and is never used for training
"""

from pipeline.demo.rows import rows_of

__all__ = ["rows_of"]
