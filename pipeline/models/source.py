"""The sources of models: a local folder, a hub, or an architecture with a seed.

Weights are read from safetensors files only. Pickle files are refused, because they can run code when they are opened.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from pipeline import progress
from pipeline.errors import UserError, kind_and_line
from pipeline.models.folder import merge_command, model_folder
from pipeline.models.internals import add_classifier, add_multimodal, language_model_class, supports_sdpa

if TYPE_CHECKING:
    from pipeline.config.schema import ModelConfig

MOST_LAYERS = 10_000
CONVERTER = "SFconvertbot"  # the user that the hub's converter to safetensors writes as
TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.py"]
OTHER_FORMATS = ["*/*", "consolidated*"]  # some repositories have a second copy of their weights


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built.

    folder: the folder of the weights; None initializes random weights from `seed`
    tensor_plan: how tensor parallelism splits the modules, for models without a plan of their own
    fused_kernels: auto, liger or none, as `model.fused_kernels`
    quantize: none or nf4, as `model.quantize`
    """

    name: str
    config: PretrainedConfig
    folder: Path | None
    seed: int
    attention: str
    trust_remote_code: bool
    tensor_plan: dict[str, str] | None = None
    fused_kernels: str = "none"
    quantize: str = "none"

    def __post_init__(self) -> None:
        """Let transformers build a reward model of the family."""
        add_classifier(self.config)

    @classmethod
    def of(cls, model: "ModelConfig", config: PretrainedConfig, folder: Path | None, seed: int) -> "ModelSource":
        """Return a source with the options of a configured model."""
        add_multimodal(config)
        return cls(
            model.name,
            config,
            folder,
            seed,
            natural_attention(config) if model.attention == "auto" else model.attention,
            model.trust_remote_code,
            model.tensor_plan,
            model.fused_kernels,
            model.quantize,
        )


def resolve(model: "ModelConfig", seed: int, *, folder: Path | None = None, weights: bool = True) -> ModelSource:
    """Return the source of a model. `folder` (the output of a stage) replaces the configured source of the weights.

    `weights=False` reads the configuration only: the source has no folder, and of a hub model only text files are
    downloaded. Raises UserError if the model is missing or its configuration or weights are not usable.
    """
    if folder is not None:
        return _from_folder(model, seed, model_folder(folder))
    if model.weights == "random":
        assert model.architecture, "`validate` refuses random weights without an architecture"
        try:
            config = _build_config(model.architecture)
        except ValueError as error:
            raise UserError(f"model.architecture: {error}") from error
        return ModelSource.of(model, config, None, seed)
    if model.path is not None:
        return _from_folder(model, seed, model_folder(model.path, "model.path"), weights=weights)
    assert model.hub is not None, "`validate` refuses a model without a source"
    return _from_folder(model, seed, download(model.hub, weights=weights), weights=weights)


def natural_attention(config: PretrainedConfig) -> str:
    """Return the attention for `model.attention=auto`: sdpa if the family supports it.

    sdpa does not cap scores, as Gemma 2 needs.
    """
    is_capped = own_field(config, "attn_logit_softcapping") is not None
    return "sdpa" if supports_sdpa(config) and not is_capped else "eager"


def _build_config(architecture: Mapping[str, Any]) -> PretrainedConfig:
    """Return the configuration of an architecture: `model_type` and fields of the family in transformers.

    Raises ValueError for an unknown family or field.
    """
    fields = {key: value for key, value in architecture.items() if key not in ("model_type", "name")}
    family = architecture["model_type"]
    if family not in CONFIG_MAPPING:
        near = " or ".join(get_close_matches(family, CONFIG_MAPPING))
        raise ValueError(f"model_type={family}: transformers has no such family{near and f'; did you mean {near}?'}")
    try:
        config = AutoConfig.for_model(family, **fields)
    except Exception as error:  # each family raises its own errors
        reason = " ".join(str(error).split())
        raise ValueError(f"{family} does not accept these fields: {reason}") from error
    _check_fields(config, fields)
    _check_sizes(config)
    return config


def _check_fields(config: PretrainedConfig, fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that the family does not have. transformers stores such a field without a use."""
    try:
        plain = AutoConfig.for_model(config.model_type)
    except Exception:  # a family with required fields has no defaults to compare with
        return
    known = {*vars(plain), *plain.attribute_map}
    for name in fields:
        if name in vars(config) and name not in known and not hasattr(type(plain), name):
            near = get_close_matches(name, [field for field in known if not field.startswith("_")], n=1)
            advice = f"did you mean {near[0]}?" if near else f"remove it, or see the fields of {type(plain).__name__}"
            raise ValueError(f"{config.model_type} has no field {name}: {advice}")


def _check_sizes(config: PretrainedConfig) -> None:
    """Raise ValueError if a size of a model is not a number of which a model can be built."""
    bounds = {"vocab_size": 2**31, "hidden_size": 2**31, "num_hidden_layers": MOST_LAYERS, "num_attention_heads": 2**31}
    for name, bound in bounds.items():
        size = own_field(config, name)
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (is_whole and 0 < size <= bound):
            raise ValueError(f"{name}={str(size)[:40]}: must be a whole number from 1 to {bound}")
    architectures = config.architectures or []
    if not (isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)):
        raise ValueError(f"architectures={str(architectures)[:40]}: must be a list of class names")


def download(hub: str, *, weights: bool = True) -> Path:
    """Return the local copy of a hub model, and download missing files first.

    The safetensors that the hub's converter proposes replace pickled weights. `weights=False` downloads text files
    only. Raises UserError if the download fails.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    patterns = [*TEXT_FILES, "*.safetensors"] if weights else TEXT_FILES
    try:
        with progress.own().allow(progress.ALONE):  # may take hours; the other machines wait for the slowest one
            folder = Path(snapshot_download(hub, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
            if weights and not any(folder.glob("*.safetensors")) and (revision := _converted_revision(hub, folder)):
                folder = Path(snapshot_download(hub, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise UserError(
            f"{hub} is gated: its licence must be accepted first. Accept it on https://huggingface.co/{hub}, then log "
            "in with `hf auth login` or set HF_TOKEN; or set model.path=FOLDER (of a reward model reward_model.path) "
            "with a local copy"
        ) from error
    except Exception as error:
        cause = kind_and_line(error.__cause__ or error).rstrip(".")  # the client hides refused certificates and proxies
        raise UserError(
            f"{hub} cannot be downloaded from the hub: {cause}. Download it on a machine with access and set "
            "model.path=FOLDER (of a reward model reward_model.path), or use random weights with model.weights=random"
        ) from error
    if weights and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{hub} has no safetensors weights on the hub. zerochat does not open pickle files, which can run code. If "
            f"you trust the files, convert them, and set model.path={_converted_name(hub)}: {convert_command(hub)}"
        )
    return folder


def _converted_revision(hub: str, folder: Path) -> str | None:
    """Return the revision with safetensors of a hub model whose own weights are pickled; None if there is none.

    The hub's converter proposes such a revision as a pull request of the user SFconvertbot. Only a request on top of
    the newest commit counts. Without a connection, a revision in the cache counts. `folder` is the copy of the newest
    commit in the cache.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        newest = api.list_repo_commits(hub)[0].commit_id
        requests = api.get_repo_discussions(
            hub, author=CONVERTER, discussion_type="pull_request", discussion_status="open"
        )
        for revision in (str(request.git_reference) for request in requests if request.author == CONVERTER):
            commits = api.list_repo_commits(hub, revision=revision)
            if len(commits) > 1 and commits[1].commit_id == newest:
                return revision
    except Exception:  # no connection: the client raises errors of many types
        requests_dir = folder.parents[1] / "refs" / "refs" / "pr"
        for file in sorted(requests_dir.glob("*")):
            if any((folder.parent / file.read_text(encoding="utf-8").strip()).glob("*.safetensors")):
                return f"refs/pr/{file.name}"
    return None


def convert_command(model: str) -> str:
    """Return the command that writes the pickled weights of a model, and its tokenizer, in Hugging Face's format."""
    program = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; old, new = sys.argv[1:]; "
        "[each.from_pretrained(old).save_pretrained(new) for each in (AutoModelForCausalLM, AutoTokenizer)]"
    )
    return shlex.join(["python", "-c", program, model, _converted_name(model)])


def _converted_name(model: str) -> str:
    return f"{Path(model).name}-safetensors"


def _from_folder(model: "ModelConfig", seed: int, folder: Path, *, weights: bool = True) -> ModelSource:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        _check_sizes(config)
    except Exception as error:  # wrong types in config.json raise errors of many types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        is_field = lines[0].startswith("Validation error")  # the next line names the expected type
        # Other lines are advice on installing transformers. A line may quote a long value.
        reason = " ".join(line[:300] for line in lines[: 2 if is_field else 1])
        raise UserError(f"{folder}/config.json is not supported by transformers: {reason}") from error
    if weights:
        _check_weights(folder)
    return ModelSource.of(model, config, folder if weights else None, seed)


def _check_weights(folder: Path) -> None:
    """Raise UserError if a folder has no complete safetensors weights, or adapters besides them."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} has a model and adapters (adapter_config.json), so it is unclear which weights to use: if the "
            "model contains the adapters, remove adapter_config.json; otherwise merge them, and set the new folder: "
            f"{merge_command(folder)}"
        )
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():  # transformers leaves the index of an earlier save in the folder
        _check_file(single)
        return
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            named = sorted(set(weight_map.values()))
            if not named or not all(isinstance(name, str) for name in named):
                raise TypeError("weight_map must map names of tensors to names of files")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"{index} is damaged ({error}); download it again") from error
        for name in named:
            if Path(name).name != name or name.startswith("."):
                raise UserError(
                    f"{index} names the file {name}, which is not in its folder. Weights are read from the model's "
                    "folder only: copy the file into it, and correct the index"
                )
        stored = {name: _check_file(folder / name) for name in named}
        missing = [f"{file} has no tensor {name}" for name, file in weight_map.items() if name not in stored[file]]
        if missing:
            raise UserError(f"{index} is damaged: {missing[0]}, which the index names; download both again")
        return
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise UserError(
            f"{folder} stores its weights in {pickles[0]}, a pickle file, which can run code when it is opened. If you "
            f"trust the file, convert it, and set model.path={_converted_name(str(folder))}: "
            f"{convert_command(str(folder))}"
        )
    raise UserError(f"{folder} has no model.safetensors: the download may be incomplete, download it again")


def _check_file(file: Path) -> set[str]:
    """Return the names of the tensors in a safetensors file. Raises UserError if it is missing or damaged.

    `safe_open` reads only the header, which determines the expected length of the file.
    """
    if not file.exists():
        raise UserError(
            f"{file.parent} has no {file.name}, which its index names: the download may be incomplete, download it "
            "again"
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            return set(tensors.keys())
    except (SafetensorError, OSError) as error:
        with file.open("rb") as content:
            pointer = content.read(20).startswith(b"version https://git")
        cause = "it is a pointer of Git LFS: run `git lfs pull`" if pointer else f"{error}; download it again"
        raise UserError(f"{file} is not a complete safetensors file: {cause}") from error


def own_field(config: PretrainedConfig, name: str) -> Any:
    """Return a field of a model's text configuration; None if it is missing or differs between layers."""
    try:
        return getattr(config.get_text_config(), name, None)
    except RuntimeError:  # a configuration with values per layer raises this error
        return None


def check_kind(source: ModelSource, *, wanted: str) -> None:
    """Raise UserError if a model folder has another kind of model, such as a reward model for a language model.

    `wanted` is the ending of the class name. Some families use another class name for their language model
    (GPT2LMHeadModel, Gemma3ForConditionalGeneration), which transformers lists. A checkpoint without a head has a class
    name that ends with Model. Such a checkpoint is accepted as a language model.
    """
    architectures = source.config.architectures or []
    endings: tuple[str, ...] = (wanted,)
    if wanted == "ForCausalLM":
        endings = (wanted, "Model", getattr(language_model_class(source.config), "__name__", wanted))
    if source.folder is not None and architectures and not any(name.endswith(endings) for name in architectures):
        kind, stage = ("language", "sft") if wanted == "ForCausalLM" else ("reward", "reward")
        raise UserError(
            f"{source.folder} has a {architectures[0]}, not a {kind} model (...{wanted}): set the folder of a {kind} "
            f"model, for example RUN/{stage}"
        )
