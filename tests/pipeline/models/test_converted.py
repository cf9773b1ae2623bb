"""Tensors that transformers renames, joins and splits are read in slices and equal those that it loads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from engine.loading import Region, SafetensorsFolder, read_region
from pipeline.errors import UserError
from pipeline.models.build import build_policy
from pipeline.models.converted import ConvertedFolder
from tests.pipeline.models.tiny import LLAMA_LIKE, VOCABULARY, config_of, frozen, language_model, source_in

CASES = {  # experts stacked, matrices joined, matrices split
    "mixtral": config_of("mixtral"),
    "glm4_moe": config_of("glm4_moe"),
    "olmo_hybrid": AutoConfig.for_model("olmo_hybrid", vocab_size=VOCABULARY, pad_token_id=0, **LLAMA_LIKE),
    "hrm_text": AutoConfig.for_model("hrm_text", vocab_size=VOCABULARY, pad_token_id=0, **LLAMA_LIKE),
}


def part_of(tensor: Tensor) -> Region:
    """Return the second half of the rows without the first column."""
    rows = slice(tensor.shape[0] // 2, tensor.shape[0])
    return ((rows,), *((slice(1, length),) for length in tensor.shape[1:]))


@pytest.mark.parametrize("family", list(CASES))
def test_every_slice_equals_the_loaded_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model(CASES[family])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    read_names, read = list[str](), SafetensorsFolder.read

    def record(folder: SafetensorsFolder, name: str, region: Region) -> Tensor:
        read_names.append(name)
        return read(folder, name, region)

    monkeypatch.setattr(SafetensorsFolder, "read", record)
    converted = ConvertedFolder(tmp_path, model)
    expected = model.state_dict()
    assert set(expected) - set(SafetensorsFolder(tmp_path).shapes), "nothing to convert"
    assert dict(converted.shapes) == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        read_names.clear()
        part = part_of(tensor)
        assert torch.equal(converted.read(name, part), read_region(tensor, part)), name
        # Experts are separate tensors in the files. The first two are outside of the slice.
        if name.endswith(("gate_up_proj", "down_proj")):
            assert all(f".experts.{expert}." not in other for expert in (0, 1) for other in read_names)


@pytest.mark.parametrize(
    ("lost", "output"),
    [
        (("0.mlp.experts.2.w3", "0.block_sparse_moe.experts.2.w3"), "what belongs to it"),
        ((".experts.3.",), r"has shape \(3, 96, 32\), the model wants \(4, 96, 32\)"),
    ],
)
def test_a_missing_expert_is_named(lost: tuple[str, ...], output: str, tmp_path: Path) -> None:
    language_model(config_of("mixtral")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in lost)}
    assert len(left) < len(tensors)
    save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=output) as error:
        build_policy(source_in(tmp_path), frozen())
    assert "config.json does not belong" in str(error.value)
