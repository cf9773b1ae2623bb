"""Generation by vLLM in the process of each rank, behind the interface of `Generator`.

vLLM caches keys and values in pages (Kwon et al., 2023, arXiv:2309.06180). The weight sync of the flip gathers the live
weights and merges adapters. `VllmEngine.refresh` then copies them into this rank's vLLM engine.

An answer depends on its prompt, the sampling settings and its sample seed, as in the decode loop. vLLM draws other
random numbers, so the two sample different answers. vLLM filters by `min_p` before `top_k` and `top_p`.
"""

import copy
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from engine.generation.decode_loop import PREFILL_TOKENS
from engine.generation.kv_cache import VLLM_SEQUENCES, default_cache_bytes, free_bytes
from engine.generation.sampling import SampledToken, Sampling, combine_seeds
from engine.internals import omit_shutdown_at_exit
from engine.parallel import dist, zero

CPU_CACHE_BYTES = 4 * 2**30  # the largest default on a CPU, where vLLM allocates its cache once
MIN_TEMPERATURE = 0.01  # vLLM replaces lower temperatures by this one


class VllmEngine:
    """Decodes with vLLM's `LLMEngine`. `parameters` makes the settings of a request, with vLLM's `SamplingParams`.

    `module` provides the architecture, and in `refresh` the weights.
    """

    mode = "vllm"

    def __init__(self, module: nn.Module, device: torch.device, engine: Any, parameters: Callable[..., Any]) -> None:
        self._module, self._device = module, device
        self._engine, self._parameters, self._is_asleep = engine, parameters, False
        self.refresh()

    def refresh(self) -> None:
        """Copy the weights of the module into vLLM, and discard the keys and values that earlier weights computed."""
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": checkpoint_tensors(self._module)})
        self._engine.apply_model(pack_tied_heads)
        if self._is_asleep:
            self._engine.wake_up(tags=["kv_cache"])
        self._is_asleep = False
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM has not reset its prefix cache, so answers would use keys of earlier weights")

    def release(self) -> None:
        """Free the weights and the cache on a GPU until the next `refresh`. On a CPU, vLLM cannot free them."""
        if self._device.type == "cuda" and not self._is_asleep:
            self._engine.sleep(level=2)
            self._is_asleep = True

    def memory(self) -> tuple[list[Tensor], list[Tensor], int]:
        """Return vLLM's weights and its paged cache, nothing while it sleeps, and 0."""
        weights, pages = ([], []) if self._is_asleep else self._engine.apply_model(tensors_of)[0]
        return weights, pages, 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        sample_seeds: Sequence[int],
        batch_size: int,
        ends: Callable[[int, int], bool],
    ) -> Iterator[list[SampledToken]]:
        """Answer the prompts as `DecodeLoop.run` does. vLLM schedules the sequences; `batch_size` has no effect."""
        needed = max(len(prompt) for prompt in prompts) + sampling.max_new_tokens
        limit = self._engine.model_config.max_model_len
        if needed > limit:
            room = f"a prompt and its answer need {needed} tokens, and vLLM's cache has room for {limit} per sequence"
            raise ValueError(f"{room}; use a larger cache_bytes or a smaller max_new_tokens")
        unfinished = [str(number) for number in range(len(prompts))]
        try:
            for name, prompt, seed in zip(unfinished, prompts, sample_seeds, strict=True):
                parameters = self._parameters(**sampling_settings(sampling, seed))
                self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, parameters)
            while unfinished:
                sampled, ended = take_step(self._engine.step(), ends)
                self._engine.abort_request(sorted(ended))  # does nothing for requests that vLLM has ended
                unfinished = [name for name in unfinished if name not in ended]
                if sampled:
                    yield sampled
        finally:
            self._engine.abort_request(unfinished)


def take_step(outputs: Sequence[Any], ends: Callable[[int, int], bool]) -> tuple[list[SampledToken], set[str]]:
    """Return the tokens of vLLM's `RequestOutput`s (new tokens only), and the names of the requests that ended."""
    sampled, ended = list[SampledToken](), set[str]()
    for output in outputs:
        new, number = output.outputs[0], int(output.request_id)
        for index, (token, logprobs) in enumerate(zip(new.token_ids, new.logprobs, strict=True), start=1):
            is_end, is_last = ends(number, token), output.finished and index == len(new.token_ids)
            finish = "stop" if is_end else "length" if is_last else None
            sampled.append(SampledToken(number, token, logprobs[token].logprob, finish))
            if is_end:
                ended.add(output.request_id)
                break  # tokens after a stop string do not belong to the answer
        if output.finished:
            ended.add(output.request_id)
    return sampled, ended


def sampling_settings(sampling: Sampling, sample_seed: int) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for one answer. Stop strings are left to `ends` of `run`."""
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        lowest = f"vLLM samples at a temperature of at least {MIN_TEMPERATURE}, not {sampling.temperature}"
        raise ValueError(f"{lowest}: use 0 (greedy) or {MIN_TEMPERATURE}")
    return {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.end_ids),
        "ignore_eos": True,  # `end_ids` lists every token that ends an answer
        "seed": combine_seeds(sampling.seed, sample_seed) & (2**63 - 1),  # vLLM reads -1 as no seed
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
    }


def checkpoint_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of each parameter and persistent buffer as a checkpoint contains it, tied ones once."""
    tensors = dict(module.named_parameters()) | zero.persistent_buffers(module)
    yield from revert_weight_conversion(module, tensors).items()


def tensors_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of vLLM's model, and the pages of its layers. On CPUs, packed matrices are not tensors."""
    pages = (getattr(layer, "kv_cache", None) for layer in model.modules())
    return [each.detach() for each in model.parameters()], [each for each in pages if isinstance(each, Tensor)]


def pack_tied_heads(model: Any) -> None:
    """Pack the matrix of the output layer again: on CPUs, `reload_weights` omits this for a tied matrix (vLLM 0.32)."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and hasattr(layer.quant_method, "tie_weights"):
            layer.quant_method.process_weights_after_loading(layer)


def create_engine(module: nn.Module, device: torch.device, cache_bytes: int | None) -> VllmEngine:
    """Return a vLLM engine with the architecture and the weights of `module`. Raises ValueError if vLLM cannot."""
    world = dist.world()
    local_rank = world.local_rank if device.index is None else device.index  # Slurm may show a rank one GPU only
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    # The engine runs in this process, and finds its rank in the environment.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": str(world.rank), "LOCAL_RANK": str(local_rank)}
    config: Any = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    with tempfile.TemporaryDirectory() as folder, undisturbed(device):
        config.save_pretrained(folder)
        try:
            from vllm import EngineArgs, LLMEngine, SamplingParams
            from vllm.sampling_params import RequestOutputKind

            arguments = EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                generation_config="vllm",  # no settings of the model
                dtype=str(next(module.parameters()).dtype).removeprefix("torch."),
                max_model_len=-1,  # the positions of the model, or fewer if the cache is small
                logprobs_mode="processed_logprobs",  # of the distribution that a token is sampled from
                distributed_executor_backend="external_launcher",  # the ranks exist already
                disable_log_stats=True,
                max_num_seqs=VLLM_SEQUENCES,
                **device_settings(device, cache_bytes),
            )
            engine = LLMEngine.from_engine_args(arguments)
            omit_shutdown_at_exit(engine)
            return VllmEngine(module, device, engine, partial(SamplingParams, output_kind=RequestOutputKind.DELTA))
        except (ImportError, ValueError, NotImplementedError) as problem:
            reason = str(problem).strip().partition("\n")[0]
            raise ValueError(f"vLLM cannot run {type(module).__name__}: {reason}; use generator=engine") from problem


def device_settings(device: torch.device, cache_bytes: int | None) -> dict[str, Any]:
    """Return the arguments of vLLM that depend on the device."""
    if device.type == "cpu":
        own = min(CPU_CACHE_BYTES, default_cache_bytes(device))
        # In chunks, a prompt would draw numbers that vLLM cannot take back from a CPU's generator.
        return {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": cache_bytes or own}
    share = free_bytes(device) / torch.cuda.get_device_properties(device).total_memory / 2
    memory = {"gpu_memory_utilization": share, "kv_cache_memory_bytes": cache_bytes}
    return {"enable_sleep_mode": True, "max_num_batched_tokens": PREFILL_TOKENS["cuda"], **memory}


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the random states of this process and `torch.set_num_threads`, which vLLM's start changes."""
    python, arrays, set_num_threads = random.getstate(), numpy.random.get_state(), torch.set_num_threads  # noqa: NPY002
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    torch.set_num_threads = set_num_threads
    random.setstate(python)
    numpy.random.set_state(arrays)  # noqa: NPY002
