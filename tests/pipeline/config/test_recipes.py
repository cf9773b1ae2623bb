"""Each model gets the recipe of its size class, and the command line overrides the recipe."""

import json

import pytest
import yaml

from pipeline.config.compose import Job, compose, compose_jobs, parse_command
from pipeline.config.overrides import groups
from pipeline.config.recipes import SIZE_CLASSES, select
from pipeline.errors import UserError
from pipeline.installation import CONF
from tests.composed import config_of
from tests.tiny import ROOT

CLASSES = {
    "up-to-0.5b": "gpt2 gpt2-medium opt-125m opt-350m pythia-160m pythia-410m qwen2.5-0.5b smollm2-135m",
    "0.5b-to-3b": "gemma-2-2b gpt2-large gpt2-xl llama-3.2-1b opt-1.3b opt-2.7b pythia-1.4b pythia-1b pythia-2.8b "
    "qwen2.5-1.5b qwen3-0.6b qwen3-1.7b",
    "3b-to-15b": "llama-3.1-8b llama-3.2-3b mistral-7b opt-13b opt-6.7b qwen2.5-7b qwen3-4b qwen3-8b",
    "above-15b": "opt-30b opt-66b",
}
TABLE = {
    "sft.lr",
    "reward.lr",
    "dpo.lr",
    "ppo.lr",
    "ppo.critic_lr",
    "ppo.kl_coef",
    "ppo.update_epochs",
    "sft.epochs",
    "sft.max_length",
    "rollout.max_prompt_tokens",
    "rollout.max_new_tokens",
    "lora_lr.sft",
    "lora_lr.reward",
    "lora_lr.dpo",
    "lora_lr.ppo",
}


def job_of(*overrides: str) -> Job:
    return compose_jobs(parse_command(list(overrides)))[0]


def name_of(**values: str) -> str:
    recipe = select(values)
    assert recipe is not None
    return recipe.name


def test_each_model_option_has_a_size_class():
    expected = {model: name for name, models in CLASSES.items() for model in models.split()}
    assert expected.keys() == set(groups()["model"]) - {"tiny"}
    assert {model: name_of(model=model) for model in expected} == expected
    assert [name_of(), name_of(data="gsm8k")] == ["tiny-demo", "tiny"]


def test_the_command_line_overrides_the_recipe():
    ppo = config_of("model=llama-3.1-8b", "data=ultrafeedback").ppo
    assert (ppo.lr, ppo.critic_lr, ppo.kl_coef, ppo.update_epochs) == (1e-6, 9e-6, 0.01, 1)
    assert config_of("model=llama-3.1-8b", "ppo.lr=3e-6").ppo.lr == 3e-6
    assert config_of("model=llama-3.1-8b", "recipe=up-to-0.5b").ppo.lr == 1.41e-5
    assert config_of("model=llama-3.1-8b", "~recipe").ppo.lr == 1e-5


def test_adapters_have_learning_rates_of_the_size_class():
    lora = ["sft=lora", "reward=lora", "dpo=lora", "ppo=lora"]
    config = config_of("model=llama-3.1-8b", *lora)
    assert (config.sft.lr, config.reward.lr, config.dpo.lr, config.ppo.lr) == (2e-4, 1e-4, 5e-6, 1e-5)
    assert config.ppo.critic_lr == 9e-6  # the critic has no adapters
    assert config_of("model=opt-66b", *lora).sft.lr == 1e-4
    assert config_of("model=opt-66b", *lora, "sft.lr=3e-4").sft.lr == 3e-4
    assert config_of("model=opt-66b", "~recipe", *lora).ppo.lr == 1e-4
    with pytest.raises(UserError, match="lora_lr: there is no such key"):
        config_of("model=opt-66b", "lora_lr.sft=1e-4")


def test_a_separate_reward_model_has_the_rates_of_its_own_size():
    overrides = ["model=opt-13b", "reward_model=opt-350m", "reward=default"]
    config = config_of(*overrides)
    assert (config.reward.lr, config.ppo.critic_lr) == (5e-5, 1.41e-5)
    assert (config.ppo.lr, config.reward.max_length) == (1e-6, 2048)
    assert config_of(*overrides[:2], "reward=lora").reward.lr == 1e-4
    line = job_of(*overrides).recipe
    assert "3b-to-15b: the model has about 13 B" in line and "as up-to-0.5b, which has about 0.33 B" in line
    assert config_of("model=opt-13b", "reward_model=opt-6.7b").reward.lr == 1e-5
    assert config_of(*overrides, "reward.lr=7e-5").reward.lr == 7e-5


def test_the_sequences_of_a_recipe_fit_the_positions_of_its_models():
    for name, models in CLASSES.items():
        recipe = yaml.safe_load((CONF / "recipe" / f"{name}.yaml").read_text(encoding="utf-8"))
        stages, rollout = [recipe[stage]["max_length"] for stage in ("sft", "reward", "dpo")], recipe["rollout"]
        needed = max(*stages, rollout["max_prompt_tokens"] + rollout["max_new_tokens"])
        for model in models.split():
            fields = yaml.safe_load((CONF / "model" / f"{model}.yaml").read_text(encoding="utf-8"))["architecture"]
            assert needed <= fields.get("max_position_embeddings", fields.get("n_positions", 1024)), (name, model)


def test_the_reference_recipe_is_the_named_one_or_that_of_the_model():
    found = [job_of("model=opt-13b", *words) for words in ([], ["recipe=tiny"], ["~recipe"])]
    assert [job.reference and job.reference.name for job in found] == ["3b-to-15b", "tiny", "3b-to-15b"]
    assert [bool(job.recipe) for job in found] == [True, False, False]
    with pytest.raises(UserError, match="recipe=nope is not an option of recipe"):
        compose(["recipe=nope"])


def test_the_reference_recipe_is_for_the_model_and_the_data_of_the_run_of_the_actor(tmp_path):
    (tmp_path / "sft").mkdir()
    for words, expected in (([], "tiny-demo"), (["data.path=x.jsonl"], "tiny"), (["model=opt-13b"], "3b-to-15b")):
        settings = compose(["model=tiny", *words])
        (tmp_path / "sft" / "config.yaml").write_text(yaml.safe_dump(settings))
        job = job_of(f"actor={tmp_path / 'sft'}", "stage=ppo")
        assert job.reference is not None and job.reference.name == expected and not job.recipe
    job = job_of(f"actor={tmp_path / 'sft'}", "model.path=nowhere", "data=demo")
    assert job.reference is not None and job.reference.name == "3b-to-15b"


def test_a_local_model_gets_a_recipe_by_its_config(tmp_path):
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    job = job_of(f"model.path={tmp_path}")
    assert job.raw["reward"]["lr"] == 5e-5
    assert job.recipe.startswith("recipe=up-to-0.5b: the model has about 0.16 M parameters")
    unknown = job_of("model.hub=nobody/nothing")
    assert unknown.recipe.startswith("recipe=3b-to-15b: the size of the model is unknown without network")
    assert job_of("model=opt-30b", "~recipe").recipe == ""
    stage = tmp_path / "run" / "sft"
    (stage / "model").mkdir(parents=True)
    (tmp_path / "config.json").rename(stage / "model" / "config.json")
    assert job_of(f"model.path={stage}").recipe == job.recipe  # a stage folder is a model, too


@pytest.mark.parametrize(
    "text",
    ['{"model_type": "gpt2", "n_embd": "wide"}', '{"text_config": 3}', "[1]", pytest.param("[" * 100_000, id="nested")],
)
def test_a_config_without_usable_sizes_is_not_blamed_on_the_network(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    for values in ({"model.path": str(tmp_path)}, {"model": "opt-1.3b", "reward_model.path": str(tmp_path)}):
        recipe = select(values)
        assert recipe is not None and "3b-to-15b" in (recipe.name, *recipe.reason.replace(",", " ").split())
        assert "has no usable sizes" in recipe.reason and "network" not in recipe.reason


def test_the_default_model_is_named_if_it_trains_on_other_data(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}))
    cases = {("data.path=x.jsonl",): True, ("data.path=x.jsonl", "model=tiny"): False, (): False}
    cases[("stage=ppo", "data.path=x.jsonl", f"actor={tmp_path}")] = False
    for words, is_named in cases.items():
        line = job_of(*words).recipe
        assert ("model=tiny, the default, has random weights: set model.path=FOLDER" in line) == is_named


def test_the_lengths_of_a_recipe_fit_a_model_with_few_positions(tmp_path):
    fields = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 300}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    job = job_of(f"model.path={tmp_path}", "dpo.max_length=400")
    assert [job.raw[stage]["max_length"] for stage in ("sft", "reward", "dpo")] == [300, 300, 400]
    assert (job.raw["rollout"]["max_prompt_tokens"], job.raw["rollout"]["max_new_tokens"]) == (200, 100)
    assert "parameters, and 300 positions, which limit the lengths (" in job.recipe


def test_the_table_of_the_guide_has_the_values_of_the_recipes():
    lines = (ROOT / "docs" / "guides" / "settings.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    start = next(number for number, row in enumerate(rows) if row[1:] == [name for _, name in SIZE_CLASSES])
    shown = {row[0]: [float(cell) for cell in row[1:]] for row in rows[start + 2 : start + 2 + len(TABLE)]}
    assert shown.keys() == TABLE
    for column, (_, name) in enumerate(SIZE_CLASSES):
        recipe = yaml.safe_load((CONF / "recipe" / f"{name}.yaml").read_text(encoding="utf-8"))
        for key, values in shown.items():
            stage, setting = key.split(".")
            assert values[column] == recipe[stage][setting], (key, name)
