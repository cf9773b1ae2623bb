"""Gold scores of the demo by method: variants of PPO and of the preference loss, from one SFT model.

`grpo` is the GRPO of `benchmarks.demo_seeds`.

    grpo                8 answers per prompt, 10 rollouts; the cases below change one key of it
    gspo                the ratio of a complete answer
    cispo               clipped tokens keep their gradient
    weights-*           importance weights: per sequence, masked per token, masked per sequence
    k3-weighted         the importance-weighted estimator of the KL
    reinforce-baseline  REINFORCE++ with group baseline
    resample            dynamic sampling, at most 2 rounds
    mask                answers of at most 16 tokens, those without an end token left out of the updates
    rewards             three weighted rewards: the reward model, at most 10 words, a last sentence that ends
    ema                 averaged weights

Others have settings of their own: online-dpo (10 rollouts of 64 prompts with 2 answers), and apo-zero, robust, simpo,
orpo, kto and length-normalized (150 steps of 32 pairs or answers).

runs/demo-seeds/seed-1 of `benchmarks.demo_seeds` provides the SFT model, the reward model and the best of 4 SFT
answers. The figures are those of `benchmarks.demo_seeds`. `logged` contains metrics of the method, as means over its
rollouts. A case that is finished does not run again: remove its folder in runs/demo-methods.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks import demo_seeds
from benchmarks.measure import run_command
from benchmarks.record import ROOT, Result
from pipeline.report.data import RunReading, read_run

FOLDER = ROOT / "runs" / "demo-methods"
DEMO = demo_seeds.folder("seed-1", "ppo")
REWARDS = """def rewards(answer, row):
    return {"brief": float(len(answer.split()) <= 10), "ended": float(answer[-1:] in (".", "!", "?"))}
"""
GRPO = demo_seeds.METHODS["grpo"]
OPTIONS: dict[str, tuple[str, ...]] = {
    "grpo": GRPO,
    "gspo": ("-m", "step3_ppo", "ppo=gspo", *GRPO[3:]),
    "cispo": ("-m", "step3_ppo", "ppo=cispo", *GRPO[3:]),
    "weights-sequence": (*GRPO, "ppo.importance_cap=2", "ppo.importance_weights=sequence"),
    "weights-token-mask": (*GRPO, "ppo.importance_cap=2", "ppo.importance_weights=token_mask"),
    "weights-sequence-mask": (*GRPO, "ppo.importance_cap=2", "ppo.importance_weights=sequence_mask"),
    "k3-weighted": (*GRPO, "ppo.kl_estimator=k3_weighted"),
    "reinforce-baseline": ("-m", "step3_ppo", "ppo=reinforce-baseline", *GRPO[3:]),
    "resample": (*GRPO, "ppo.resample=2"),
    "mask": (*GRPO, "ppo.unfinished=mask", "rollout.max_new_tokens=16"),
    "rewards": (
        *GRPO,
        f"ppo.reward_function={FOLDER}/rewards.py:rewards",
        "ppo.reward_weights={brief: 0.5, ended: 0.5, model: 1}",
    ),
    "ema": (*GRPO, "ppo.ema=0.9"),
    "online-dpo": ("-m", "step3_ppo", "ppo=online-dpo", "ppo.batch_size=64", "ppo.steps=10", "ppo.lr=2e-4"),
    "apo-zero": ("-m", "step2_dpo", "dpo.loss=apo_zero"),
    "robust": ("-m", "step2_dpo", "dpo.loss=robust", "dpo.label_smoothing=0.1"),
    "simpo": ("-m", "step2_dpo", "dpo=simpo", "dpo.lr=2e-4"),
    "orpo": ("-m", "step2_dpo", "dpo=orpo", "dpo.lr=2e-4"),
    "kto": ("-m", "step2_dpo", "dpo=kto", "dpo.lr=2e-4"),
    "length-normalized": ("-m", "step2_dpo", "dpo=length-normalized", "dpo.lr=1e-4"),
}
CASES = tuple(OPTIONS)
COMMON = ("seed=1", "tracking=none", "ppo.eval_every=0", "evaluation.best_of=1")
LOGGED = ("importance_truncated", "replaced_prompts", "alike_prompts", "eos_rate", "reward_brief", "reward_ended")


def run(cases: Sequence[str], rounds: int) -> Iterator[Result]:
    """Train the demo if it is missing, then run `cases` in order. A case runs once, whatever `rounds` is."""
    run_command([sys.executable, *demo_seeds.arguments("seed-1", "ppo")], folder=ROOT, limit=demo_seeds.LIMIT_SECONDS)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "rewards.py").write_text(REWARDS, encoding="utf-8")
    for case in cases:
        run_command([sys.executable, *arguments(case)], folder=ROOT, limit=demo_seeds.LIMIT_SECONDS)
        yield case_result(case, read_run(FOLDER / case), read_run(DEMO))


def arguments(case: str) -> list[str]:
    """Return the arguments of Python that train one method."""
    options = OPTIONS[case]
    models = [f"actor={DEMO / 'sft'}"] + [f"reward={DEMO / 'reward'}"] * ("step3_ppo" in options)
    return [*options, f"run_dir={FOLDER / case}", *models, *COMMON]


def case_result(case: str, trained: RunReading, demo: RunReading) -> Result:
    """Return the figures of one method, with the means of its metrics. Raises BenchFailed without gold scores."""
    found = demo_seeds.seed_result("seed-1", case, trained, demo)
    rows = trained.stage(trained.policy).rows
    logged = {name: [row[name] for row in rows if name in row] for name in LOGGED}
    means = {name: fmean(values) for name, values in logged.items() if values}
    return replace(found, bench="demo_methods", case=case, detail={**found.detail, "logged": means})
