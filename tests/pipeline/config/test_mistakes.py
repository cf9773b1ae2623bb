"""Each mistake on a command line becomes one line with the correction."""

import re

import pytest

from pipeline.config import check_engine
from pipeline.config.compose import compose
from pipeline.config.stages import STAGES
from pipeline.errors import UserError
from tests.composed import config_of, refusal

DISTILL = ["method=distill", "teacher=a"]
PAIRS = "method=dpo"
PIPELINES = ["stage=sft", "engine.pipeline_parallel=2"]
SEQUENCES = "engine.sequence_parallel=2"
PLAN = "stage=plan"
QLORA = ["model.quantize=nf4", "sft=lora", "reward=lora", "ppo=lora"]
VLLM = "rollout.generator=vllm"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is no package of the tests."""
    monkeypatch.setattr(check_engine, "find_spec", lambda name: True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("reward.lrr=1", "reward.lrr: there is no such key; did you mean reward.lr?"),
        ("lr=1", "did you mean sft.lr, reward.lr, dpo.lr or ppo.lr?"),
        ("sft.learning_rate=1", "sft.learning_rate: there is no such key; did you mean sft.lr?"),
        ("ppo.max_completion_length=64", "did you mean rollout.max_new_tokens?"),
        ("ppo.beta=0.04", "the weight of the KL is ppo.kl_coef"),
        ("resume=true", "resume: there is no such key: run the same command again to resume"),
        ("data.eval_path=x.jsonl", 'there is no such key: "data.sources=[{path: FILE, eval_path: FILE}]" instead of'),
        ("enginee=zero3", "enginee: there is no such key; did you mean engine?"),
        ("sft.batch_size=0", "sft.batch_size=0: it should be greater than or equal to 1 (examples per step"),
        ("sft.lr=fast", "sft.lr=fast: it should be a valid number"),
        ("evaluation.temperatures=[]", "evaluation.temperatures=[]: List should have at least 1 item"),
        ("engine.dtype=fp8", "engine.dtype=fp8: it should be 'auto', 'bf16', 'fp16' or 'fp32'"),
        ("model=opt-1.3", "did you mean model=opt-1.3b?"),
        ("model=/models/mine", "for your own, set model.path="),
        ("sft=fast", "sft=fast is not an option of sft. Options: default, lora"),
        ("reward=lorra", "did you mean reward=lora? Options: default, lora; for a trained reward model, set"),
        ("opt-1.3b", "'opt-1.3b' is not KEY=VALUE: did you mean model=opt-1.3b?"),
        ("sft", "'sft' is not KEY=VALUE: did you mean stage=sft?"),
        ("plan", "'plan' is not KEY=VALUE: did you mean stage=plan?"),
        (__file__, f"'{__file__}' is not KEY=VALUE: did you mean data.path={__file__}?"),
        ("sft.lr", "'sft.lr' is not KEY=VALUE: a value with a space in it needs quotes"),
        (["data.path=a", "data.sources=[{path: b}]"], "data.path=a and data.sources are both set, but"),
        (["data.path=a", "data.sources.0.columns={q: prompt}"], "data.path=a and data.sources are both set, but"),
        ('data.sources=[{path: a, columns: {"my text": text}}]', "a name before a colon has no quotes"),
        ("rollout.repetition_penalty=1e6", "rollout.repetition_penalty=1000000.0: it should be less than"),
        ("data.path=", "data.path=: String should have at least 1 character (one local file or folder"),
        ("--stage", "write settings as KEY=VALUE, without dashes"),
        ("name=a/b", "name=a/b: a run name has"),
        ("ppo.lora.dropout=0.1", "ppo.lora.dropout=0"),
        ("ppo.advantage=rloo", "ppo.samples=1: set ppo.samples=4, or ppo.advantage=gae"),
        ("profile.steps=5", "profile.steps=5: it should be a valid list (first and last step"),
        (["sft.export=best", "sft.eval_every=0"], "sft.export=best needs sft.eval_every=100, not 0"),
        (["ppo.length_penalty=0.1", "ppo.length_free=256"], "ppo.length_free=256 needs another rollout.max_new_tokens"),
        (["ppo=grpo", "ppo.kl_estimator=k1"], "ppo.kl_estimator=k1 needs ppo.kl_in=reward, not null"),
        ("ppo.minibatches=3", "ppo.batch_size=64 does not divide over ppo.minibatches=3: ppo.batch_size=63 or 66"),
        ("ppo.actor_engine.zero_stag=3", "ppo.actor_engine.zero_stag: there is no such key; did you mean"),
        ("ppo.critic_engine.offload_optimizer=disk", "offload_optimizer=disk: it should be 'none', 'cpu' or"),
        ("ppo.critic_engine={zero_stage: 3, offload_parameters: nvme}", "critic_engine.offload_optimizer=nvme or cpu"),
        ("engine.offload_parameters=nvme", "engine.offload_parameters=nvme needs engine.zero_stage=3, not 0"),
        ("engine.offload_parameters=nvme", "engine.offload_parameters=nvme needs engine.offload_optimizer=nvme or cpu"),
        ("engine.nvme_path=/nowhere", "engine.nvme_path=/nowhere: there is no such folder"),
        ("rollout.max_new_tokens=4096", "set ppo.max_length=4608, or lower the other two keys"),
        ("model.hub=null", "model has no weights to load"),
        ("data.stage_shares.sftt=1", "data.stage_shares.sftt"),
        ("data.sources.0.stagess=[sft]", "there is no such key; did you mean data.sources.0.stages?"),
        ("data.sources=[{path: a}, {path: b, x: 1}]", "data.sources.1.x: there is no such key; data.sources.1 has"),
        ("sft.rank=8", "sft.rank: there is no such key; did you mean sft.lora.rank?"),
        ("data.x=1", "data.x: there is no such key; data has name, path, sources"),
        ("hydra.run.dir=/tmp/x", "hydra.run.dir=/tmp/x: Hydra only reads conf/"),
        ("method=distill", "ppo.advantage=distill needs teacher=FOLDER"),
        ("teacher=a", "teacher=a needs method=distill, not ppo: change"),
        ([*DISTILL, "ppo=grpo"], "method=distill needs ppo.advantage=distill, not grpo"),
        ([*DISTILL, "ppo.kl_coef=0.1"], "ppo.advantage=distill needs ppo.kl_coef=0, not 0.1"),
        ([*DISTILL, "ppo.reference=false"], "needs another ppo.advantage than distill"),
        ([*DISTILL, "ppo.reward_model=true"], "needs ppo.reward_model=false, not true"),
        ([*DISTILL, "ppo.reward_function=f.py:f"], "f.py:f needs another ppo.advantage than"),
        ([*DISTILL, "ppo.ratio=sequence"], "ppo.ratio=sequence needs ppo.advantage=grpo, not distill"),
        ([PAIRS, "reward=x/reward"], "model that PPO starts from, but method=dpo: remove reward="),
        ([PAIRS, "dpo.loss=robust"], "dpo.loss=robust needs dpo.label_smoothing=0.1, not 0.0"),
        ("ppo.reward_weights={brief: 1}", "ppo.reward_weights.brief weighs a reward of ppo.reward_function, which is"),
        (["ppo.kl_target=6", "ppo.kl_horizon=10"], "ppo.kl_horizon=10 is too short for rollouts of 64 answers: one"),
        (["ppo.steps=5", "ppo.critic_warmup=5"], "ppo.critic_warmup=5 leaves no rollout of ppo.steps=5 that trains"),
        ("ppo.kl_estimator=k3_weighted", "k3_weighted needs ppo.kl_in=loss, not null"),
        (["ppo.shared_forward=true", "ppo.minibatches=2"], "needs ppo.minibatches=1, not 2"),
        (["ppo.shared_forward=true", "ppo.unfinished=mask"], "needs ppo.unfinished=penalize, not"),
        (["ppo.shared_forward=true", "ppo.ptx_coef=0.1", "ppo=grpo"], "needs ppo.ptx_coef=0, not 0.1"),
        (["ppo=online-dpo", "ppo.kl_in=reward"], "ppo.advantage=online_dpo needs ppo.kl_in=loss, not reward"),
        (["ppo=online-dpo", "ppo.reference=false"], "false needs another ppo.advantage than online_dpo"),
        (["ppo=online-dpo", "ppo.unfinished=mask"], "online_dpo needs ppo.unfinished=penalize, not mask"),
        ("ppo.advantage=online_dpo", "compares the answers to one prompt, but ppo.samples=1"),
        ([PAIRS, "dpo=orpo", "dpo.sft_coef=1"], "dpo.loss=orpo needs dpo.sft_coef=0, not 1.0"),
        ("data.sources=[{hub: a/b, eval_path: x}]", "data.sources.0.eval_path=x needs the path key: use eval_split="),
        ("sft.lr=inf", "sft.lr=inf: it should be a finite number"),
        ("sft.steps=true", "sft.steps=true: it should be a number"),
        ("ppo.kl_coef=false", "ppo.kl_coef=false: it should be a number"),
        ("hydra/launcher=joblib", "its own settings have no effect: remove it"),
        (["method=dpo", "stage=reward"], "method=dpo has the stages sft and dpo, but stage=reward"),
        ("ppo.reward_engine.offload_parameters=nvme", "needs ppo.reward_engine.zero_stage=3, not 0"),
        (["ppo.export=best", "ppo.eval_every=5", "ppo.ema=0.9"], "ppo.export=best needs ppo.ema=null, not 0.9"),
        (["ppo.kl_coef=0.05", "ppo.reference=false"], "reference=false needs ppo.kl_coef=0, not 0.05"),
        (["rollout.stream=true", "rollout.tensor_parallel=2"], "stream=true needs rollout.tensor_parallel=1, not 2"),
        (["rollout.min_new_tokens=9", "rollout.max_new_tokens=8"], "rollout.min_new_tokens=9 exceeds rollout.max_n"),
        (["stage=sft", "actor=runs/x/sft"], "starts from, but stage=sft: remove actor=, or set stage=ppo (other"),
        ("data.sources=[{path: a.jsonl, eval_split: test}]", "data.sources.0.eval_split=test is a split of a data set"),
        ("rollout.stop=Human:", "rollout.stop=Human:: it should be a valid list"),
        ("rollout.cache_bytes=1.5", "rollout.cache_bytes=1.5: it should be a valid integer"),
        ("engine.compress=both", "engine.compress=both needs sharding: set engine=zero1"),
        ("engine.states=bf16", "engine.states=bf16 needs engine.dtype=bf16, not auto"),
        (["engine.states=bf16", "engine.dtype=bf16", "engine.tensor_parallel=2"], "engine.tensor_parallel=1"),
        (["engine.pipeline_parallel=2", "stage=all"], "engine.pipeline_parallel=2 supports only SFT: set stage=sft"),
        ([*PIPELINES, "engine=zero3"], "engine=zero0, zero1 or zero2"),
        ([*PIPELINES, "engine=zero2-offload"], "pipeline_parallel=2 needs engine.offload_optimizer=none, not cpu"),
        ([*PIPELINES, "rollout.tensor_parallel=2"], "needs rollout.tensor_parallel=1"),
        ("ppo.actor_engine={pipeline_parallel: 2}", "ppo.actor_engine.pipeline_parallel: PPO does not support"),
        ([SEQUENCES, "engine.tensor_parallel=2"], "engine.sequence_parallel=2 needs engine.tensor_parallel=1"),
        ([SEQUENCES, "ppo.actor_engine={compile_blocks: true}"], "needs ppo.actor_engine.compile_blocks=false"),
        ([SEQUENCES, "sft.packing=false"], "engine.sequence_parallel=2 splits packed rows: set sft.packing=true"),
        ("plan.device=h100", "plan.device=h100 needs stage=plan, not all"),
        ([PLAN, "plan.ranks=8"], "plan.ranks=8 needs plan.device=NAME, not null"),
        ([PLAN, "plan.device=h100", "ranks=8"], "write plan.ranks=8 instead"),
        ([PLAN, "plan.device=cpu"], "or 't4' (stage=plan: GPU to plan for, by its data sheet; null: measure"),
        ([*QLORA, "reward=default"], "nf4 freezes the model, so each stage trains adapters, but reward.lora.rank=0"),
        ([*QLORA, "engine=zero3"], "nf4 does not shard the weights in 4 bits: set engine.zero_stage=2 instead of 3"),
        ([*QLORA, "engine.compile_blocks=true"], "nf4 needs engine.compile_blocks=false, not true"),
        ([*QLORA, "engine.deepspeed={zero_optimization: {stage: 1}}"], "nf4 needs engine.deepspeed=null"),
        ([*QLORA, "ppo.critic_engine={offload_optimizer: cpu}"], "needs ppo.critic_engine.offload_optimizer=none"),
        ([*QLORA, "ppo.reward_engine={zero_stage: 3}"], "4 bits: set ppo.reward_engine.zero_stage=2 instead of 3"),
        ([*QLORA, "rollout.stream=true"], "nf4 needs rollout.stream=false"),
        ([VLLM, "rollout.tensor_parallel=2"], "vllm needs rollout.tensor_parallel=1, not 2: change one of the two"),
        ([VLLM, *PIPELINES], "rollout.generator=vllm needs engine.pipeline_parallel=1, not 2"),
        ([VLLM, "model.trust_remote_code=true"], "needs model.trust_remote_code=false, not true"),
        ([VLLM, *QLORA], "rollout.generator=vllm needs model.quantize=none, not nf4"),
    ],
)  # fmt: skip
def test_each_mistake_is_refused_with_a_correction(words: str | list[str], expected: str) -> None:
    lines = refusal("model=opt-1.3b", *([words] if isinstance(words, str) else words))
    assert expected in lines.replace("Did", "did")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("seed=1,2", "add -m to run every value"),
        ("sft.lr='", "close each quote and bracket"),
        ("data.sources=[{path: a, columns: {size (cm): prompt}}]", r"brackets, = : and ,: {size \(cm\): value}; write"),
        ("größe=1", "cannot read größe=1: a key has the letters a to z"),
        ("~sft.weight_decay", "'sft.weight_decay' does not exist. No option or recipe sets this key: remove"),
    ],
)
def test_a_word_that_hydra_cannot_read_is_refused(word: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        compose([word])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.name=opt-1.3b"], "model.name=opt-1.3b is only a name and selects nothing: set model=opt-1.3b"),
        (["model.name=a/b"], "set model.path=PATH or model.hub=HUB"),
        (["reward_model.name=opt-350m"], "set reward_model=opt-350m"),
        (["model=opt-1.3b", "data.name=gsm8k"], "set data=gsm8k"),
    ],
)
def test_a_name_of_what_is_not_selected_is_refused(words: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        compose(words)


@pytest.mark.parametrize(
    ("word", "other", "needed"),
    [
        ("ppo.reward_ensemble=['a']", "ppo.reward_model=false", "ppo.reward_model=true"),
        ("ppo.ensemble_score=worst", "ppo.reward_ensemble=[]", "ppo.reward_ensemble=[FOLDER]"),
        ("ppo.reward_threads=4", "ppo.reward_function=null", "ppo.reward_function=FILE.py:NAME"),
        ("ppo.critic_warmup=2", "ppo.advantage=grpo", "ppo.advantage=gae"),
        ("ppo.value_clip=0.1", "ppo.advantage=grpo", "ppo.advantage=gae"),
        ("ppo.kl_horizon=500", "ppo.kl_target=null", "ppo.kl_target=6"),
        ("ppo.resample=2", "ppo.advantage=reinforce", "ppo.advantage=grpo"),
        ("ppo.kl_target=6.0", "ppo.kl_coef=0.0", "ppo.kl_coef=0.05"),
        ("ppo.score_clip=1.0", "ppo.advantage=distill", "another ppo.advantage"),
        ("ppo.length_penalty=0.1", "ppo.advantage=distill", "another ppo.advantage"),
        ("ppo.importance_weights=token_mask", "ppo.importance_cap=null", "ppo.importance_cap=2"),
        ("ppo.length_free=20", "ppo.length_penalty=0.0", "ppo.length_penalty=0.01"),
        ("dpo.label_smoothing=0.1", "dpo.loss=ipo", "dpo.loss=sigmoid"),
        ("dpo.sft_coef=1.0", "dpo.loss=kto", "dpo.loss=sigmoid"),
        (
            "evaluation.judge_threads=8",
            "evaluation.judge=null",
            "evaluation.judge=FILE.py:NAME or evaluation.pair_judge=FILE.py:NAME",
        ),
        ("rollout.batch_size=8", "rollout.generator=vllm", "rollout.generator=engine"),
        ("sft.lora.targets=['q_proj']", "sft.lora.rank=0", "sft.lora.rank=16"),
        ("reward.lora.alpha=32.0", "reward.lora.rank=0", "reward.lora.rank=16"),
    ],
)
def test_a_key_without_effect_is_refused(word: str, other: str, needed: str) -> None:
    stage = word.partition(".")[0]
    run = f"stage={stage}" if stage in STAGES else "stage=all"
    actual = other.partition("=")[2]
    need = f"{needed}, not {actual}" if "=" in needed else f"{needed} than {actual}"
    expected = f"{word} needs {need}: change one of the two"
    assert expected in refusal("model=opt-1.3b", word, other, run).splitlines()


def test_all_mistakes_are_listed_together() -> None:
    lines = refusal("model=opt-1.3b", "sft.lrr=1", "ppo.clip=-1", "engine.zero_stage=4").splitlines()
    assert [line.split(":")[0] for line in sorted(lines)] == ["engine.zero_stage=4", "ppo.clip=-1", "sft.lrr"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("ppo.kl", "ppo.kl_coef"),
        ("ppo.kl_penalty", "ppo.kl_coef"),
        ("ppo.delta", "ppo.dual_clip"),
        ("ppo.cliprange_value", "ppo.value_clip"),
        ("ppo.vf_coef", "ppo.critic_lr"),
        ("ppo.total_episodes", "ppo.steps"),
        ("ppo.steps_per_generation", "ppo.minibatches"),
        ("ppo.importance_sampling_level", "ppo.ratio"),
        ("ppo.vllm_importance_sampling_clip_max", "ppo.importance_cap"),
        ("ppo.vllm_importance_sampling_mode", "ppo.importance_weights"),
        ("ppo.response_length", "rollout.max_new_tokens"),
        ("ppo.use_vllm", "rollout.generator=vllm"),
        ("reward_funcs", "ppo.reward_function"),
        ("sft.save_total_limit", "sft.keep_checkpoints"),
        ("sft.lora.r", "sft.lora.rank"),
        ("engine.stage", "engine.zero_stage"),
        ("attn_implementation", "model.attention"),
        ("use_liger_kernel", "model.fused_kernels"),
        ("fp16", "engine.dtype=fp16"),
    ],
)
def test_names_of_trl_and_peft_are_refused_with_the_key(name: str, key: str) -> None:
    """The names of the guide "Coming from TRL" that are unlike the key."""
    (line,) = refusal("model=opt-1.3b", f"{name}=1").splitlines()
    assert re.search(rf"{re.escape(name)}: there is no such key.* {re.escape(key)}\b", line), line


def test_a_quantized_reward_model_needs_adapters_in_ppo() -> None:
    words = [*QLORA, "model.quantize=none", "reward_model=opt-350m", "reward_model.quantize=nf4", "ppo=default"]
    assert [line.partition(",")[0] for line in refusal("model=opt-1.3b", *words).splitlines()] == [
        "reward_model.quantize=nf4 freezes the model"
    ]


@pytest.mark.parametrize(("words", "package"), [([VLLM], "vllm"), (QLORA, "bitsandbytes")])
def test_a_missing_package_is_named_with_its_command(
    words: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_engine, "find_spec", lambda name: None)
    (line,) = refusal("model=opt-1.3b", *words).splitlines()
    extra = {"vllm": "vllm", "bitsandbytes": "quantize"}[package]
    assert f"needs the package {package}, which is not installed: pip install '.[{extra}]'" in line
    config_of("model=opt-1.3b", *words, PLAN)  # a plan needs neither


def test_combinations_that_are_supported() -> None:
    for words in (
        [SEQUENCES, "sft.packing=false", "stage=reward"],  # the rows of the reward stage are always packed
        [PLAN, PIPELINES[1]],
        [*PIPELINES, "engine=auto"],
        [*QLORA, "engine=zero2"],
        [VLLM, "ppo=lora", "engine=zero3"],
        ["ppo.reward_engine={zero_stage: 3, offload_parameters: nvme}"],  # a frozen model has no optimizer
        ["stage=sft", "dpo.margin=1", "ppo.pair_beta=0.2"],  # stages that do not run are not checked
        ["ppo.dual_clip=null", "ppo.shared_forward=false", "ppo=cispo", "ppo.minibatches=2"],
        ["stage=sft", "reward.export=best"],
        ["ppo.export=best", "ppo.eval_every=5"],
    ):
        config_of("model=opt-1.3b", *words)
