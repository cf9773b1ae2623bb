"""What a stage says of its data."""

import pytest

from pipeline.stage import say_cut


def test_what_was_cut_for_its_length_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    say_cut("sft", {}, 9, "sft.max_length")
    assert capsys.readouterr().out == ""
    say_cut("sft", {"no answer within max_length": 1, "cut to max_length": 4}, 9, "sft.max_length")
    told = capsys.readouterr().out
    assert told == (
        "sft: too long, of 9: 4 cut to max_length, 1 no answer within max_length; sft.max_length sets the limit\n"
    )
