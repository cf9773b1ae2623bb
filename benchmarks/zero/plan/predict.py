"""What the plan of a run says of its stages, at the lengths that the run had: seconds of a step by phase, as JSON.

`python -m benchmarks.zero.plan.predict RUN_DIR STAGE ...`, on as many ranks as the run had.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from engine.parallel import dist
from engine.planning import step_seconds
from pipeline.launch.worker import read_config
from pipeline.models.stage_models import base_source
from pipeline.planning.choose import measure, pace_of
from pipeline.planning.fit import task
from step3_ppo.models import load_models
from step3_ppo.setup import load_prompts


def predicted(run_dir: Path, stage: str) -> dict[str, float]:
    """Seconds by phase; every rank calls."""
    config = read_config(run_dir / stage)
    policy, reward, length = base_source(config), None, None
    if stage == "ppo":
        sources = load_models(config, run_dir)
        policy, reward = sources.actor, sources.reward
        prompts, _, _ = load_prompts(config, sources)
        length = sum(map(len, prompts.ids)) // len(prompts.ids) + config.rollout.max_new_tokens
    found = task(config, stage, policy=policy, reward=reward, ranks=dist.world().size)
    pace = pace_of(config, stage, found)
    if length is not None:
        pace = replace(pace, length=length)
    on_gpu, rates = dist.world().device.type == "cuda", measure(config, found)
    return step_seconds(found.policy, found.work, pace, rates, on_gpu=on_gpu, critic=found.critic)


def main() -> None:
    run_dir, *stages = sys.argv[1:]
    dist.start("predict")
    found = {stage: predicted(Path(run_dir), stage) for stage in stages}
    print(json.dumps(found), flush=True)
    dist.stop()


if __name__ == "__main__":
    main()
