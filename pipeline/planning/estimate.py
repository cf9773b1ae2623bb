"""Predict the memory of a run on GPUs that this machine does not have, without weights and without a network.

    python -m pipeline.planning.estimate model=opt-13b ranks=8 gib=80

`gib` is the memory of one GPU; all other keys are those of train.py. The tables are those of `stage=plan`, without
seconds.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

from pipeline.config.check import validate
from pipeline.config.compose import compose
from pipeline.config.schema import ModelConfig
from pipeline.errors import UserError
from pipeline.models.source import ModelSource, build_config, model_folder
from pipeline.planning.candidates import Capacity
from pipeline.planning.table import GIB, describe, planned_stages

UNLIMITED = 2**50  # bytes of host memory and disk


def main(arguments: Sequence[str]) -> int:
    """Print the tables; return 2 for a user's mistake."""
    try:
        capacity = Capacity(_device_bytes(arguments), UNLIMITED, UNLIMITED, is_gpu=True)
        overrides = [word for word in arguments if not word.startswith("gib=")]
        config = validate({**compose(overrides), "stage": "plan"})
        if config.engine.dtype == "auto":
            config = config.model_copy(update={"engine": config.engine.model_copy(update={"dtype": "bf16"})})
        policy = architecture(config.model, config.seed)
        reward = architecture(config.reward_model, config.seed) if config.reward_model is not None else None
        for stage in planned_stages(config):
            source = reward or policy if stage == "reward" else policy
            lines = describe(config, stage, policy=source, reward=reward, ranks=config.ranks or 1, capacity=capacity)
            print("\n".join(lines), flush=True)
    except (UserError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader is `head`
        pass
    return 0


def _device_bytes(arguments: Sequence[str]) -> int:
    """Return the bytes of one GPU; 80 GiB without `gib`. Raises UserError for what is not a number."""
    text = next((word.removeprefix("gib=") for word in arguments if word.startswith("gib=")), "80")
    try:
        return round(float(text) * GIB)
    except ValueError:
        raise UserError(f"gib={text} is not a number; write the GiB of one GPU, such as gib=80") from None


def architecture(model: ModelConfig, seed: int) -> ModelSource:
    """Return a model's source without its weights. Raises UserError where its architecture is not on this machine."""
    if model.path is not None:
        config = AutoConfig.from_pretrained(model_folder(Path(model.path)), trust_remote_code=model.trust_remote_code)
    elif model.architecture:
        config = build_config(model.architecture)
    else:
        raise UserError(f"model={model.name}: conf/model has no architecture of it; give model.path=FOLDER")
    return ModelSource.of(model, config, None, seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
