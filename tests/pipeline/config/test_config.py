"""Command lines become configurations, and each mistake becomes one line with the correction."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config.check import validate, warnings
from pipeline.config.check_machine import check_paths, check_ranks
from pipeline.config.compose import compose, compose_jobs, parse_command
from pipeline.config.document import PAGE, page
from pipeline.config.messages import in_keys
from pipeline.config.overrides import groups
from pipeline.config.recipes import parameter_count
from pipeline.config.schema import RunConfig
from pipeline.config.stages import stages_to_run
from pipeline.errors import UserError
from pipeline.installation import CONF
from tests import composed

ROOT = Path(__file__).resolve().parents[3]


def config_of(*overrides: str) -> RunConfig:
    return composed.config_of("model=opt-1.3b", *overrides)


def refusal(*overrides: str) -> str:
    return composed.refusal("model=opt-1.3b", *overrides)


def test_groups_and_keys_reach_the_configuration():
    config = config_of("data=gsm8k", "stage=reward", "reward.lr=3e-5", "engine=zero3", "engine.dtype=bf16")
    assert (config.model.hub, config.data.name, config.stage) == ("facebook/opt-1.3b", "gsm8k", "reward")
    assert (config.reward.lr, config.engine.zero_stage, config.engine.dtype) == (3e-5, 3, "bf16")
    assert config_of("tracking=none").tracking.kind == "none"


def test_reward_model_of_another_size():
    config = config_of("reward_model=opt-350m", "reward_model.weights=random")
    assert config.reward_model is not None
    assert (config.reward_model.name, config.reward_model.weights) == ("opt-350m", "random")
    assert config.model.weights == "pretrained"


def test_reward_is_a_group_or_a_path():
    assert config_of("reward=lora").reward.lora.rank == 16
    assert config_of("reward=runs/default").reward_path == "runs/default"
    config = config_of("stage=ppo", "reward=runs/x/reward", "ppo.kl_coef=0.1")
    assert (config.reward_path, config.ppo.kl_coef) == ("runs/x/reward", 0.1)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("data.path", path) for path in ("/a/my chats (1).jsonl", "/a/it's=b,c.jsonl", "/a/x.json")),
        *(("data.path", path) for path in ("/a/back\\slash'.csv", "/home/jörg/é ö.jsonl")),
        *(("name", name) for name in ("ü", "1.10", "1e3", "1_0")),  # the last three look like numbers
        *(("tracking.project", "my project, part 2"), ("tracking.entity", "1.10")),
    ],
)
def test_texts_need_no_quotes(key: str, text: str) -> None:
    config = config_of(f"{key}={text}")
    section, _, leaf = key.rpartition(".")
    assert getattr(getattr(config, section) if section else config, leaf) == text
    assert config.data.sources == [] or key != "data.path"


def test_folders_and_files_of_the_engine_need_no_quotes(tmp_path):
    folder = tmp_path / "my disk (1)"
    folder.mkdir()
    assert config_of(f"engine.nvme_path={folder}").engine.nvme_path == str(folder)
    assert f"{folder}/ds.json" in refusal(f"engine.deepspeed={folder}/ds.json")


def test_a_models_own_path_replaces_the_default_option(tmp_path):
    config = composed.config_of(f"model.path={tmp_path}/My Model", "data.path=~/chats.v2.jsonl")
    assert (config.model.name, config.model.weights, config.model.architecture) == ("My-Model", "pretrained", None)
    assert config.data.name == "chats.v2"
    sources = "[{path: /a/b.jsonl.gz, columns: {x: prompt}}, {hub: me/set}, {path: /c/b.csv}]"
    assert composed.config_of(f"data.sources={sources}").data.name == "b+set"
    assert config.data.path == str(Path.home() / "chats.v2.jsonl")


def test_path_with_an_option_keeps_the_option():
    config = config_of("model.path=/models/x")
    assert (config.model.name, config.model.path) == ("opt-1.3b", "/models/x")
    assert config.model.architecture is not None


def test_a_complete_architecture_replaces_the_default_one():
    """The fields of the default model are not added. An override of a single field still works."""
    own = ("model.architecture={model_type: opt, num_hidden_layers: 1}", "model.architecture.hidden_size=8")
    config = config_of("model=tiny", *own)
    assert config.model.architecture == {"model_type": "opt", "num_hidden_layers": 1, "hidden_size": 8}
    assert (config.model.weights, config.model.tokenizer) == ("random", "train")
    config = config_of("reward_model=gpt2", "+reward_model.architecture={model_type: opt}")
    assert config.reward_model is not None and config.reward_model.architecture == {"model_type": "opt"}
    message = refusal("model=gpt2", "model.architecture={n_layer: 1}")
    assert message.endswith("model.architecture.KEY=VALUE changes one field of an option's architecture")


def test_only_the_demo_model_uses_the_demo_data_by_default(tmp_path):
    def data(*overrides: str) -> str:
        return compose(overrides)["data"]["name"]

    assert data() == data("model=tiny") == data("model=opt-1.3b", "data=demo") == "demo"
    for model in ("model=opt-1.3b", "model.path=/models/x", "model.hub=a/b", f"actor={tmp_path}"):
        assert data(model) == "ultrafeedback"
    assert data("model=opt-1.3b", "data.path=/a/b.jsonl") == "b"


def test_a_deleted_key_has_its_default():
    usual = RunConfig.model_fields["sft"].get_default()
    assert composed.config_of().sft.lr != usual.lr == composed.config_of("~sft.lr").sft.lr
    assert composed.config_of("~recipe").sft == usual


def test_one_share_of_the_data_may_be_set_alone():
    shares = config_of("data.stage_shares.sft=0.1").data.stage_shares
    assert shares == {"sft": 0.1, "reward": 0.4, "ppo": 0.4}


def test_multirun_composes_every_combination():
    paths = compose_jobs(parse_command(["-m", "evaluation.judge=a.py:f,b c.py:g", "recipe=0.5b-to-3b,up-to-0.5b"]))
    assert [job.raw["evaluation"]["judge"] for job in paths] == [*["a.py:f"] * 2, *["b c.py:g"] * 2]
    assert paths[0].label == "evaluation.judge=a.py:f,recipe=0.5b-to-3b"
    jobs = compose_jobs(parse_command(["-m", "model=gpt2,opt-125m", "seed=1,2", "sft.lr=1e-4"]))
    assert [job.label for job in jobs] == [
        "model=gpt2,seed=1", "model=gpt2,seed=2", "model=opt-125m,seed=1", "model=opt-125m,seed=2",
    ]  # fmt: skip
    third = jobs[2].raw
    assert (third["model"]["name"], third["seed"], third["sft"]["lr"]) == ("opt-125m", 1, 1e-4)


def test_settings_of_the_actors_run_are_used(tmp_path):
    stage = tmp_path / "x" / "sft"
    stage.mkdir(parents=True)
    own = ("name=x", "tracking=none", "profile.steps=[1,2]")  # these keys belong to that run only
    earlier = config_of("data=gsm8k", "seed=7", "engine=zero2", "rollout.max_new_tokens=99", *own)
    settings = earlier.model_dump(mode="json")
    settings["engine"]["pipeline_schedule"] = "gpipe"  # a key of an earlier version
    (stage / "config.yaml").write_text(yaml.safe_dump(settings))
    config = composed.config_of(f"actor={stage}", "stage=ppo", "ppo.kl_coef=0.2")
    assert (config.model.name, config.data.name, config.rollout.max_new_tokens) == ("opt-1.3b", "gsm8k", 99)
    assert (config.engine.zero_stage, config.seed, config.ppo.kl_coef) == (2, 7, 0.2)
    assert (config.name, config.stage, config.tracking.kind, config.profile.steps) == (None, "ppo", "wandb", None)
    other = composed.config_of(f"actor={stage}", "stage=ppo", "data.path=/a/b.jsonl", "engine=zero1")
    assert (other.data.path, other.data.sources, other.engine.zero_stage) == ("/a/b.jsonl", [], 1)
    distilled = composed.config_of(f"actor={stage}", "stage=ppo", "method=distill", "teacher=t")
    assert (distilled.ppo.advantage, distilled.rollout.max_new_tokens) == ("distill", 99)


def test_an_actor_from_another_folder_is_the_model(tmp_path):
    config = composed.config_of(f"actor={tmp_path}", "stage=ppo", "data=gsm8k")
    assert config.model.path == str(tmp_path)


def test_best_export_needs_a_judge_or_the_kl():
    words = ("ppo.export=best", "ppo.eval_every=5", "ppo.reference=false", "ppo.kl_coef=0")
    assert config_of(*words, "data=demo").ppo.export == "best"  # the demo has a gold scorer
    line = refusal(*words, "data=gsm8k")
    assert line.startswith("ppo.export=best without a judge selects by the reward within a KL budget")
    assert config_of(*words[:2], "data=gsm8k").ppo.export == "best"
    distills = (*words[:2], "method=distill", "teacher=a")
    assert config_of(*distills, "data=demo").ppo.export == "best"
    assert refusal(*distills, "data=gsm8k").startswith("ppo.export=best without a judge has no grade to select by")


def test_guard_false_means_off():
    assert config_of().ppo.guard == "stop" and config_of("ppo.guard=off").ppo.guard == "off"
    assert config_of("ppo.guard=false").ppo.guard == "off"


@pytest.mark.parametrize(
    ("file", "is_refused"),
    [
        ("{optimizer: {type: AdamW, params: {lr: 0.1}}}", True),
        ("{optimizer: {type: AdamW, params: {lr: auto}}}", False),
        ("{optimizer: {type: AdamW}}", False),
        ("{scheduler: {type: WarmupLR, params: {warmup_max_lr: 0.1}}}", True),
        ("{scheduler: {type: WarmupLR, params: {warmup_max_lr: auto}}}", False),
        ("{scheduler: {type: WarmupDecayLR, params: {total_num_steps: 9}}}", True),
        ("{zero_optimization: {stage: 2}}", False),
    ],
)
def test_a_rollback_needs_the_learning_rate_of_the_stage(file: str, is_refused: bool):
    words = ("ppo.guard=rollback", f"engine.deepspeed={file}")
    if is_refused:
        assert refusal(*words).startswith(
            "ppo.guard=rollback lowers ppo.lr, but engine.deepspeed sets the learning rate"
        )
    else:
        assert config_of(*words).ppo.guard == "rollback"


def test_distillation_has_two_stages_and_no_reward():
    config = config_of("method=distill", "teacher=runs/x/ppo")
    assert stages_to_run(config) == ["sft", "ppo"] and config.teacher == "runs/x/ppo"
    assert (config.ppo.advantage, config.ppo.reward_model, config.ppo.kl_coef) == ("distill", False, 0.0)
    assert config.ppo.needs_reference and config.ppo.samples == 1
    assert config_of("stage=ppo", "ppo=distill", "teacher=a").ppo == config.ppo


def test_the_reference_runs_if_the_kl_counts_or_is_logged():
    off = ["ppo.guard=off"]
    needed = [config_of(*words, *off).ppo.needs_reference for words in ([], ["ppo.kl_coef=0"], ["ppo=grpo"])]
    assert needed == [True, False, True] and config_of("ppo.kl_coef=0", "ppo.reference=true", *off).ppo.needs_reference
    assert config_of("ppo.kl_coef=0").ppo.needs_reference  # the guard reads the KL
    assert not config_of("ppo.kl_coef=0", "ppo.reference=false").ppo.needs_reference


def test_the_estimator_sets_where_the_kl_counts_by_default():
    options = {option: config_of(f"ppo={option}").ppo.kl_counts_in for option in ("default", "rloo", "grpo")}
    assert options == {"default": "reward", "rloo": "reward", "grpo": "loss"}
    assert config_of("ppo=grpo", "ppo.kl_in=reward").ppo.kl_counts_in == "reward"
    assert config_of("ppo.kl_in=loss", "ppo.kl_target=6").ppo.kl_counts_in == "loss"


def test_minibatches_divide_all_answers_of_a_rollout():
    assert config_of("ppo.batch_size=6", "ppo.samples=2", "ppo.minibatches=4").ppo.minibatches == 4
    assert "ppo.batch_size=6 does not divide" in refusal("ppo.batch_size=6", "ppo.samples=3", "ppo.minibatches=4")


def test_the_gpu_of_a_plan_may_be_written_in_capitals():
    assert config_of("stage=plan", "plan.device=A100-40GB").plan.device == "a100-40gb"


def test_only_sft_of_a_pipeline_is_planned():
    planned = config_of("stage=plan", "engine.pipeline_parallel=2", "sft.batch_size=64", "ppo.batch_size=36")
    check_ranks(planned, 32)  # PPO is not planned
    assert config_of("stage=plan", "engine.pipeline_parallel=2", "actor=runs/x").actor == "runs/x"


def test_ranks_must_divide_batches():
    check_ranks(config_of(), 4)
    check_ranks(config_of("stage=sft", "engine.pipeline_parallel=3"), 12)  # 4 pipelines
    with pytest.raises(UserError, match=r"=3 does not divide the 4 ranks: engine.pipeline_parallel=1, 2 or 4$"):
        check_ranks(config_of("stage=sft", "engine.pipeline_parallel=3"), 4)
    check_ranks(config_of("engine.tensor_parallel=3"), 12)  # 4 groups
    with pytest.raises(UserError, match=r"engine.tensor_parallel=3 does not divide the 4 ranks"):
        check_ranks(config_of("engine.tensor_parallel=3"), 4)
    check_ranks(config_of("engine=zero3", "engine.sequence_parallel=3", "engine.shard_ranks=6"), 12)  # 4 groups
    with pytest.raises(UserError, match=r"engine.sequence_parallel=3 does not divide the 4 ranks"):
        check_ranks(config_of("engine.sequence_parallel=3"), 4)
    with pytest.raises(UserError, match=r"sft.batch_size=64 does not divide over 3 sequence groups"):
        check_ranks(config_of("stage=sft", "engine.sequence_parallel=2"), 6)
    check_ranks(config_of("engine=zero3", "engine.shard_ranks=4"), 8)
    with pytest.raises(UserError, match=r"^rollout.tensor_parallel=3 does not divide the 8 ranks"):
        check_ranks(config_of("rollout.tensor_parallel=3"), 8)
    with pytest.raises(UserError, match=r"=3 does not divide the 8 ranks: ppo.critic_engine.shard_ranks=1, 2, 4 or 8$"):
        check_ranks(config_of("engine.shard_ranks=3", "ppo.critic_engine={zero_stage: 3}"), 8)
    with pytest.raises(UserError, match=r"engine.shard_ranks=3 does not divide the 8 ranks"):
        check_ranks(config_of("engine.deepspeed={zero_optimization: {stage: 3, mics_shard_size: 3}}"), 8)
    with pytest.raises(UserError, match=r"engine.shard_ranks=3 does not divide the 8 ranks"):
        check_ranks(config_of("engine=zero3", "engine.shard_ranks=3"), 8)
    mistake = r"sft.batch_size=64 does not divide over 3 ranks: sft.batch_size=63 or 66; or use 2 ranks \(ranks=2\)$"
    with pytest.raises(UserError, match=mistake):
        check_ranks(config_of("stage=sft"), 3)
    with pytest.raises(UserError, match=r"over 5 tensor groups: .*; or use 12 ranks \(ranks=12\)$"):
        check_ranks(config_of("stage=sft", "engine.tensor_parallel=3", "sft.batch_size=4"), 15)
    with pytest.raises(UserError, match=r"2 ranks x ppo.minibatches=64: ppo.batch_size=128"):
        check_ranks(config_of("stage=ppo", "ppo.minibatches=64"), 2)


def test_given_models_replace_stages():
    assert stages_to_run(config_of()) == ["sft", "reward", "ppo"]
    assert stages_to_run(config_of("model=gpt2", "reward=x/y")) == ["sft", "ppo"]
    assert stages_to_run(config_of("method=dpo")) == ["sft", "dpo"]
    assert stages_to_run(config_of("method=dpo", "actor=x/y")) == stages_to_run(config_of("stage=dpo")) == ["dpo"]


def test_truncated_sampling_causes_a_warning():
    assert warnings(config_of()) == []
    for setting in ("rollout.top_p=0.9", "rollout.min_p=0.1", "rollout.repetition_penalty=1.2"):
        assert warnings(config_of(setting))[0].startswith(f"{setting}: ")


def test_stop_strings_and_cache_bytes():
    config = config_of("rollout.stop=['Human:', ' a b']", "rollout.cache_bytes=2e9")
    assert config.rollout.stop == ["Human:", " a b"] and config.rollout.cache_bytes == 2_000_000_000
    assert config_of().rollout.stop == [] and config_of().rollout.cache_bytes is None
    assert warnings(config) == []
    assert refusal("rollout.stop=['']").startswith("rollout.stop")


def test_paths_are_checked_before_any_work(tmp_path):
    with pytest.raises(UserError, match=r"data.path=.*no such file"):
        check_paths(config_of(f"data.path={tmp_path}/none.jsonl"))

    def with_model(path: Path) -> RunConfig:
        config = config_of()
        return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})

    with pytest.raises(UserError, match=r"model.path=.*no config.json"):
        check_paths(with_model(tmp_path))
    (tmp_path / "sft" / "model").mkdir(parents=True)
    (tmp_path / "sft" / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"model.path={tmp_path}/sft"):
        check_paths(with_model(tmp_path))
    check_paths(with_model(tmp_path / "sft"))
    with pytest.raises(
        UserError, match=f"json is a file: set the folder of the model, model.path={tmp_path}/sft/model$"
    ):
        check_paths(with_model(tmp_path / "sft/model/config.json"))
    with pytest.raises(UserError, match=r"^actor=none"):
        check_paths(config_of("stage=ppo", "actor=none", "reward=none"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    with pytest.raises(UserError, match=f"has only adapters: merge .* python -c .* {tmp_path}/adapter adapter-merged"):
        check_paths(with_model(tmp_path / "adapter"))
    (tmp_path / "model.gguf").touch()
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(UserError, match="is in GGUF format, which cannot be trained: set the folder of the orig"):
            check_paths(with_model(path))
    (tmp_path / "model.gguf").unlink()


def test_a_source_is_checked_only_for_stages_that_read_it(tmp_path):
    """The hub replaces local files that do not exist, also held-out files. Files that no stage reads may be missing."""
    chats = f"{{path: {tmp_path}/a.jsonl, eval_path: {tmp_path}/b.jsonl, hub: x/y, stages: [sft, ppo]}}"
    pairs = f"{{path: {tmp_path}/c.jsonl, stages: [reward]}}"
    sources = f"data.sources=[{chats}, {pairs}]"
    check_paths(config_of(sources, "stage=sft"))
    function = "ppo.reward_function=examples/rewards/gsm8k.py:exact_match"
    check_paths(config_of(sources, "ppo=grpo", "ppo.reward_model=false", function))
    for asked in ("stage=all", "stage=reward", "method=dpo"):
        with pytest.raises(UserError, match=r"data\.sources\.1\.path=.*no such file"):
            check_paths(config_of(sources, asked))
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"data\.sources\.0\.eval_path=.*no such file"):
        check_paths(config_of(sources, "stage=sft"))


def test_every_model_option_is_complete():
    raw = compose(["model=tiny"])
    for option in groups()["model"]:
        fields = yaml.safe_load((CONF / "model" / f"{option}.yaml").read_text())
        model = validate({**raw, "model": {**fields, "weights": "random"}}).model
        assert model.name == option and model.architecture is not None


@pytest.mark.parametrize(
    ("option", "millions"),
    [("opt-125m", 125.2), ("opt-350m", 331.2), ("opt-66b", 65719.7), ("gpt2", 124.4), ("pythia-160m", 162.3),
     ("llama-3.1-8b", 8030.3), ("qwen3-0.6b", 596.0), ("mistral-7b", 7248.0), ("gemma-2-2b", 2614.3)],
)  # fmt: skip
def test_architectures_have_the_published_sizes_and_their_estimates_are_close(option, millions):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(yaml.safe_load((CONF / "model" / f"{option}.yaml").read_text())["architecture"])
    assert parameter_count(fields) == pytest.approx(millions * 1e6, rel=0.02)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


def test_every_option_of_every_group_composes():
    """Each command selects one option of every group that has so many."""
    options = {group: some for group, some in groups().items() if group != "model"}
    for number in range(max(map(len, options.values()))):
        chosen = {group: some[number] for group, some in options.items() if number < len(some)}
        needs = ["teacher=runs/x/ppo"] if chosen.get("ppo") == "distill" else []
        composed.config_of("model=gpt2", *(f"{group}={option}" for group, option in chosen.items()), *needs)


def test_the_page_of_keys_is_current():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m pipeline.config.document"


def test_help_does_not_import_torch():
    code = "import sys, train; from pipeline.launch.command import main; main(['--help']); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = set(shown.splitlines()[-1].split())
    assert not loaded & {"torch", "transformers", "wandb", "hydra", "datasets"}


def test_cfg_job_shows_and_runs_nothing(tmp_path, capsys, monkeypatch):
    from pipeline.launch.command import main

    monkeypatch.chdir(tmp_path)
    assert main(["model=gpt2", "--cfg", "job", "ppo.lr=2e-6"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert RunConfig.model_validate(shown).ppo.lr == 2e-6
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(capsys):
    from pipeline.launch.command import main

    assert main(["model=gpt2", "sft.lrr=1", "debug=true"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and "UserError: sft.lrr: there is no such key" in shown


def test_a_stages_module_is_train_with_that_stage(capsys):
    from pipeline.launch.command import main

    assert main(["model=gpt2", "--cfg", "job"], stage="reward") == 0
    assert yaml.safe_load(capsys.readouterr().out)["stage"] == "reward"
    assert main(["model=gpt2", "stage=ppo"], stage="sft") == 2
    assert "train.py stage=ppo" in capsys.readouterr().err


def test_messages_of_the_engine_name_configuration_keys() -> None:
    assert in_keys("zero_stage must be 0, 1, 2 or 3, not 4") == "engine.zero_stage must be 0, 1, 2 or 3, not 4"
    assert in_keys("states=bf16 needs dtype=bf16 and x=1") == "engine.states=bf16 needs engine.dtype=bf16 and x=1"
    actual = in_keys("stream=True does not go with tensor_parallel=2 for generation")
    assert actual == "rollout.stream=true does not go with rollout.tensor_parallel=2 for generation"
    assert in_keys("...; generate with stream=true, which uses no graphs") == (
        "...; generate with rollout.stream=true, which uses no graphs"
    )
    assert in_keys("Set tensor_plan to {PATTERN: STYLE}") == "Set model.tensor_plan to {PATTERN: STYLE}"
    assert in_keys("engine.dtype=fp16 and my_dtype=1 stay") == "engine.dtype=fp16 and my_dtype=1 stay"


@pytest.mark.parametrize("content", ["model: {path: other}\n", "- 1\n", ""])
def test_a_configuration_of_another_program_beside_a_start_model_is_ignored(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(content)
    raw = compose(["stage=dpo", "data=demo", f"actor={tmp_path}/model"])
    assert raw["model"]["path"] == f"{tmp_path}/model"


def test_a_sweep_by_glob_is_one_message() -> None:
    with pytest.raises(UserError, match=r"model=glob\(gpt2\*\) is not an option of model"):
        compose_jobs(parse_command(["-m", "data=demo", "model=glob(gpt2*)"]))
