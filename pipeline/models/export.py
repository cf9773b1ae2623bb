"""Export of a sharded engine to a Hugging Face folder: safetensors, configurations and tokenizer.

All ranks gather the parameters one at a time, and rank 0 writes them. Rank 0 collects up to 1 GiB per file, so it holds
one file in memory in addition to its shard. The other ranks copy nothing to the host. The folder gets its final name
when it is complete.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from engine import Engine, distributed
from pipeline.config.stage_sections import LoraConfig
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.files import explained_disk
from pipeline.models.internals import reverse_conversion, stacks_experts
from pipeline.models.modules import Policy, Scorer
from pipeline.models.source import ModelSource

FILE_BYTES = 2**30
EXPERT_LAYERS = (".gate", ".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")


def export_policy(
    engine: Engine, source: ModelSource, tokenizer: ChatTokenizer, folder: Path, *, lora: LoraConfig | None = None
) -> None:
    """Write a language model, with its adapters merged, to `folder`. Collective: every rank calls this function.

    lora: if its rank is above 0, the adapters are also written to the folder `adapter` next to `folder`
    """
    assert isinstance(engine.module, Policy)
    if lora is not None and lora.rank:
        export_adapters(engine, source, lora, folder.with_name("adapter"))
    generation = GenerationConfig(
        bos_token_id=tokenizer.hf.bos_token_id,
        eos_token_id=list(tokenizer.end_ids),
        pad_token_id=tokenizer.pad_id,
        do_sample=True,
    )
    _export(engine, source, tokenizer, folder, extra={}, generation=generation)


def export_adapters(engine: Engine, source: ModelSource, lora: LoraConfig, folder: Path) -> None:
    """Write the adapters of a language model in peft's format. Collective: every rank calls this function.

    The list of adapted modules replaces `lora.targets`, so that the file fits the model without our wrapper. peft takes
    module names such as `mlp.gate_proj` of a mixture for those of its experts. Such targets are listed as weights.
    """
    from peft import LoraConfig as PeftLora  # imported here because most runs have no adapters

    with _complete(folder) as staging:
        factors = {
            f"base_model.model.{name.removeprefix('lm.').replace('.default.', '.')}": tensor
            for name, tensor in _on_rank_zero(engine.adapter_parameters())
        }
        if distributed.is_rank_zero():
            targets = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in factors}
            misread = {name for name in targets if stacks_experts(source.config) and name.endswith(EXPERT_LAYERS)}
            config = PeftLora(
                task_type="CAUSAL_LM",
                r=lora.rank,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft accepts a float
                lora_dropout=0.0 if misread else lora.dropout,  # peft refuses dropout with target_parameters
                target_modules=sorted(targets - misread),
                target_parameters=sorted(f"{name}.weight" for name in misread) or None,
                fan_in_fan_out=any(getattr(layer, "fan_in_fan_out", False) for layer in engine.module.modules()),
                base_model_name_or_path=None if source.folder is None else str(source.folder.absolute()),
                inference_mode=True,
            )
            config.save_pretrained(str(staging))
            _save(factors, staging / "adapter_model.safetensors")


def export_scorer(
    engine: Engine, source: ModelSource, tokenizer: ChatTokenizer, folder: Path, *, extra: dict[str, Any]
) -> None:
    """Write a reward model as a sequence classifier with one label. Collective: every rank calls this function.

    `extra` is added to its config.json.
    """
    assert isinstance(engine.module, Scorer)
    _export(engine, source, tokenizer, folder, extra={"num_labels": 1, **extra})


def _export(
    engine: Engine,
    source: ModelSource,
    tokenizer: ChatTokenizer,
    folder: Path,
    *,
    extra: dict[str, Any],
    generation: GenerationConfig | None = None,
) -> None:
    """Write the files of a model. Collective. `extra` is added to its config.json."""
    leads, module = distributed.is_rank_zero(), engine.module
    assert isinstance(module, Policy | Scorer)
    prefix = "lm." if isinstance(module, Policy) else "model."
    with _complete(folder) as staging:
        _write_weights(_full_tensors(engine, prefix, module.backbone), staging, leads=leads)
        if leads:
            config = type(source.config).from_dict(source.config.to_dict())
            config.architectures = [type(module.backbone).__name__.removeprefix("FSDP")]
            config.dtype = engine.dtype
            for key, value in extra.items():
                setattr(config, key, value)
            if not source.trust_remote_code:  # auto_map names files with code, which this folder does not have
                vars(config).pop("auto_map", None)
            config.save_pretrained(staging)
            if generation is not None:
                generation.save_pretrained(staging)
            tokenizer.save(staging)
            if source.folder is not None:
                processors = source.folder.glob("*processor_config.json")  # of images, videos and audio
                # transformers copies the code of the configuration only
                code = source.folder.glob("*.py") if source.trust_remote_code else ()
                for file in (*processors, *code):
                    shutil.copy(file, staging)


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Provide a staging folder, which gets the name `folder` at the end. Collective.

    If an error leaves this context, the staging folder is removed. An incomplete model would fill the disk.

    Raises UserError if the disk is full or not writable.
    """
    staging = folder.with_name(folder.name + ".tmp")
    leads = distributed.is_rank_zero()
    with explained_disk(folder.parent):
        if leads:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        try:
            yield staging
        except BaseException:
            if leads:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        if leads:
            if folder.exists():
                shutil.rmtree(folder)
            staging.rename(folder)
    distributed.barrier()


def _full_tensors(engine: Engine, prefix: str, module: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the files, tensor on the CPU) of each parameter and persistent buffer on rank 0. Collective.

    Parameters have the engine's dtype. `prefix` is removed from the names. The files have the tensors that transformers
    writes for the family, such as one tensor per expert. vLLM refuses other tensors.
    """
    parameters = _on_rank_zero(engine.full_parameters(), engine.dtype)
    revert = reverse_conversion(module)
    for name, tensor in chain(parameters, _on_rank_zero(engine.full_buffers())):
        yield from revert(name.removeprefix(prefix), tensor)


def _on_rank_zero(
    tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in host memory on rank 0. The other ranks only iterate, because the gathers are collective."""
    for name, tensor in tensors:
        if distributed.is_rank_zero():
            yield name, tensor.to(dtype or tensor.dtype).cpu().contiguous()
        elif tensor.is_cuda:
            torch.cuda.synchronize()  # the timeout of a gather begins when the gather is queued


def _write_weights(tensors: Iterator[tuple[str, Tensor]], folder: Path, *, leads: bool) -> None:
    """Write tensors to consecutive files on rank 0. Other ranks only iterate."""
    file_numbers: dict[str, int] = {}
    batch: dict[str, Tensor] = {}
    size = total = number = 0
    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if batch and size + tensor_bytes > FILE_BYTES:
            _save(batch, folder / f"part-{number}.safetensors")
            batch, size, number = {}, 0, number + 1
        batch[name] = tensor
        file_numbers[name] = number
        size, total = size + tensor_bytes, total + tensor_bytes
    if not leads:
        return
    _save(batch, folder / f"part-{number}.safetensors")
    _name_files(folder, file_numbers, number + 1, total)


def _save(batch: dict[str, Tensor], file: Path) -> None:
    """Write a file with the read and write permissions of its folder. safetensors permits access by the owner only."""
    save_file(batch, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)


def _name_files(folder: Path, file_numbers: dict[str, int], files: int, total: int) -> None:
    """Rename the files as transformers expects them, and write an index if there are several."""
    if files == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    for index, name in enumerate(names):
        (folder / f"part-{index}.safetensors").rename(folder / name)
    weight_map = {name: names[index] for name, index in file_numbers.items()}
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1))
