"""The model card: batch sizes, and the stages that a model depends on."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.data.encode import labelled_answers
from pipeline.data.records import Message, Preference
from pipeline.export.model_card import model_card
from pipeline.export.source import TrainedStage, find_stage
from pipeline.planning.stage_task import stage_steps
from tests.tiny import tiny_config

PAIRS = [
    Preference(
        (Message("user", f"What is {n} + 1?"),), Message("assistant", str(n + 1)), Message("assistant", str(n)), "mine"
    )
    for n in range(12)
]


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


def finished(folder: Path, base: str = "base", ppo: dict[str, Any] | None = None, **keys: str) -> Path:
    """Create the folder of a finished stage. `keys` are keys outside of sections, such as `actor`."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    config = tiny_config(
        model={"name": base, "weights": "pretrained", "path": f"/models/{base}"}, ppo=ppo or {}
    ).model_copy(update=keys)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return folder


def test_the_stages_of_a_model_are_those_that_it_depends_on(tmp_path: Path) -> None:
    """The reward model of the first run did not train its policy. DPO continues a policy of another run."""
    sft = finished(tmp_path / "x" / "sft")
    finished(tmp_path / "x" / "reward")
    ppo = finished(tmp_path / "x" / "ppo", ppo={"reward_model": False, "reward_function": "f.py:f"})
    assert [stage.folder for stage in find_stage(ppo).history] == [sft, ppo]
    dpo = finished(tmp_path / "y" / "dpo", actor=str(ppo))
    found = find_stage(dpo)
    assert [stage.folder for stage in found.history] == [sft, ppo, dpo]
    assert found.adapter_base == str(ppo / "model")  # a folder that peft can load


def test_a_stage_finds_its_models_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, reward = finished(tmp_path / "x" / "sft"), finished(tmp_path / "x" / "reward")
    monkeypatch.chdir(tmp_path)  # where the command of training was typed
    ppo = finished(tmp_path / "y" / "ppo", actor="x/sft", reward_path="x/reward")
    monkeypatch.chdir(tmp_path / "y")
    found = find_stage(ppo)
    assert [stage.folder for stage in found.history] == [actor, reward, ppo]
    assert found.adapter_base == str(actor / "model")


def test_a_reward_model_of_two_policies_is_listed_once(tmp_path: Path) -> None:
    first, reward = finished(tmp_path / "x" / "ppo"), finished(tmp_path / "x" / "reward")
    second = finished(tmp_path / "y" / "ppo", actor=str(first), reward_path=str(reward))
    assert [stage.folder for stage in find_stage(second).history] == [reward, first, second]


def test_the_base_model_is_not_that_of_the_reward_model(tmp_path: Path) -> None:
    reward = finished(tmp_path / "r" / "reward", "another")
    actor = tmp_path / "mine"
    actor.mkdir()
    ppo = find_stage(finished(tmp_path / "x" / "ppo", "mine", actor=str(actor), reward_path=str(reward)))
    assert [stage.name for stage in ppo.history] == ["reward", "ppo"] and ppo.base == "/models/mine"


@pytest.mark.parametrize(
    ("actor", "title"), [(None, "sft"), ("dpo/model", "dpo"), ("ppo", "earlier ppo"), ("my-chat", "my-chat")]
)
def test_a_column_has_the_name_of_the_policy_that_the_stage_started_from(
    tmp_path: Path, actor: str | None, title: str
) -> None:
    keys = {} if actor is None else {"actor": str(tmp_path / "y" / actor)}
    ppo = finished(tmp_path / "x" / "ppo", **keys)
    (ppo / "summary.json").write_text('{"eval_score": 2.0, "held_out": {"sft": {"eval_score": 1.0}, "ppo": {}}}')
    assert f"| figure | {title} | ppo |" in model_card(find_stage(ppo), title="t")


def test_a_base_folder_that_is_gone_is_no_name_on_the_hub(tmp_path: Path) -> None:
    card = model_card(find_stage(finished(tmp_path / "x" / "sft")), title="t")
    assert "- Base model: unknown" in card and "base_model:" not in card
    assert "Base model: base. Stages: SFT." in card and "/models" not in card


def test_a_relative_base_folder_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft and the hub would take it for one in another current folder."""
    monkeypatch.chdir(tmp_path)
    model = {"name": "mine", "weights": "pretrained", "path": "mine/ppo"}
    stage = TrainedStage("sft", tmp_path / "x" / "sft", tiny_config(model=model))
    assert stage.base == str(tmp_path / "mine" / "ppo")
    (tmp_path / "mine" / "ppo" / "model").mkdir(parents=True)
    assert stage.adapter_base == str(tmp_path / "mine" / "ppo" / "model")


def test_the_score_of_a_reward_function_is_not_called_that_of_a_model(tmp_path: Path) -> None:
    ppo = finished(tmp_path / "x" / "ppo", ppo={"reward_model": False, "reward_function": "f.py:f"})
    (ppo / "summary.json").write_text('{"final": {"eval_score": 0.5}}')
    card = model_card(find_stage(ppo), title="t")
    assert "| score that PPO was trained on, of answers to held-out prompts at temperature 1 | 0.5 |" in card
