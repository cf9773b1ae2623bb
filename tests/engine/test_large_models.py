"""Two processes load a checkpoint of N bytes with about N/2 bytes of memory each."""

import json
import os
import resource
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.parallel import dtensors
from tests.ranks import run_ranks

WIDTH, VOCABULARY = 1024, 512
# Share of the checkpoint's bytes: one unit in flight, the library's memory, and what malloc retains after experts are
# concatenated. This part does not grow with the model (0.08 of a model of 2.1 GB).
MARGIN = 0.4


def written(folder: Path) -> int:
    """Write a Mixtral of about 400 MB into four files in the published format. Return its bytes.

    A published Mixtral has one tensor for each expert, which are one parameter of the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.for_model(
        "mixtral", hidden_size=WIDTH, intermediate_size=WIDTH, vocab_size=VOCABULARY, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8, num_local_experts=6, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = revert_weight_conversion(model, dict(model.named_parameters()))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    where = {name: f"model-{number * 4 // len(shapes)}.safetensors" for number, name in enumerate(shapes)}
    for file in sorted(set(where.values())):
        save_file({name: torch.full(shapes[name], 0.5) for name in shapes if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(4 * shape.numel() for shape in shapes.values())


def loaded(folder: Path) -> tuple[int, float, int]:
    """Load the model in this new process. Return the growth of its memory peak, the sum and the bytes of its shards."""
    from transformers import AutoConfig

    from pipeline.config.schema import EngineSettings
    from pipeline.models.build import EngineChoice, build_policy
    from pipeline.models.source import ModelSource

    source = ModelSource("large", AutoConfig.from_pretrained(folder), folder, 1, "sdpa", False)
    before = peak()
    engine = build_policy(source, EngineChoice(EngineSettings(zero_stage=3, dtype="fp32")))
    grown = peak() - before
    shards = [dtensors.local(parameter) for parameter in engine.module.parameters()]
    return grown, sum(float(shard.sum()) for shard in shards), sum(4 * shard.numel() for shard in shards)


def peak() -> int:
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size * (1 if sys.platform == "darwin" else 1024)


def test_two_processes_hold_half_each(tmp_path: Path) -> None:
    os.sync()
    size = written(tmp_path)
    assert size > 350e6
    actual = run_ranks(loaded, 2, tmp_path)
    assert sum(total for _, total, _ in actual) == 0.5 * size / 4  # each number was loaded once
    for grown, _, shards in actual:
        assert shards < 0.51 * size
        assert grown < shards + MARGIN * size, f"{grown / 1e6:.0f} MB for a checkpoint of {size / 1e6:.0f} MB"
