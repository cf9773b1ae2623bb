"""The model card: the batch size counts what one step of the stage reads."""

import re
from pathlib import Path

import pytest

from pipeline.data.records import Message, Preference, labelled_answers
from pipeline.export.model_card import model_card
from pipeline.export.source import TrainedStage
from pipeline.planning.stage_task import stage_steps
from tests.tiny import tiny_config

PAIRS = [Preference((Message("user", f"What is {n} + 1?"),), str(n + 1), str(n), "mine") for n in range(12)]


@pytest.mark.parametrize(("loss", "unit", "steps"), [("kto", "answers", 6), ("sigmoid", "pairs", 3)])
def test_the_batches_of_an_epoch_have_all_examples_of_the_card(
    tmp_path: Path, loss: str, unit: str, steps: int
) -> None:
    """Twelve pairs are 24 answers of KTO: 6 batches of 4. The other losses count pairs: 3 batches of 4."""
    config = tiny_config(dpo={"loss": loss, "batch_size": 4, "epochs": 1, "steps": None, "lr": 3e-5})
    card = model_card(TrainedStage("dpo", tmp_path / "dpo", config), title="t")
    row = re.search(r"^\| DPO \| 1 \| 3e-05 \| (\d+) (\w+) \| all parameters \|$", card, re.MULTILINE)
    assert row is not None, card
    assert row[2] == unit
    examples = {"answers": len(labelled_answers(PAIRS)), "pairs": len(PAIRS)}[unit]
    assert stage_steps(config.dpo, examples) == steps and int(row[1]) * steps == examples
