"""What a stage does at its edge."""

from pathlib import Path

import pytest

from pipeline import stage
from pipeline.stage import say_cut
from tests.tiny import tiny_config


def test_a_rank_that_finds_the_tokenizer_made_waits_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(stage.dist, "barrier", lambda: waits.append(1))
    monkeypatch.setattr(stage, "load_tokenizer", lambda folder, **_: folder)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").touch()
    assert stage.run_tokenizer(tiny_config(), tmp_path) == str(tmp_path / "tokenizer")  # type: ignore[comparison-overlap]
    assert waits == [1]  # else it is in another collective than the rank that made it


def test_what_was_cut_for_its_length_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    say_cut("sft", {}, 9, "sft.max_length")
    assert capsys.readouterr().out == ""
    say_cut("sft", {"no answer within max_length": 1, "cut to max_length": 4}, 9, "sft.max_length")
    told = capsys.readouterr().out
    assert told == (
        "sft: too long, of 9: 4 cut to max_length, 1 no answer within max_length; sft.max_length sets the limit\n"
    )
