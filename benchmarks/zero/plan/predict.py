"""What the plan of a run says of its stages, at the lengths that the run had: seconds of a step by phase, as JSON.

`python -m benchmarks.zero.plan.predict RUN_DIR STAGE ...`, on as many ranks as the run had.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from engine.parallel import dist
from pipeline.launch.worker import read_config
from pipeline.models.stage_models import base_source
from pipeline.planning.demand import predict_seconds
from pipeline.planning.planner import measure
from pipeline.planning.stage_task import stage_task
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
    world = dist.world()
    is_gpu = world.device.type == "cuda"
    task = stage_task(config, stage, policy=policy, reward=reward, ranks=world.size, is_cpu=not is_gpu)
    probe = measure(config, task)
    if length is not None:
        task = replace(task, work=replace(task.work, max_length=length))
    return predict_seconds(task, probe, is_gpu=is_gpu)


def main() -> None:
    run_dir, *stages = sys.argv[1:]
    dist.start("predict")
    found = {stage: predicted(Path(run_dir), stage) for stage in stages}
    print(json.dumps(found), flush=True)
    dist.stop()


if __name__ == "__main__":
    main()
