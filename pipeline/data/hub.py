"""Data sets of the Hugging Face hub: rows, licence, and what to type if the hub cannot be reached.

`describe_hub_data` runs in the launcher before any other work. It downloads every split that the run reads, so that the
stages find the splits in the cache of the library `datasets`.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.errors import UserError, kind_and_line

if TYPE_CHECKING:
    from pipeline.config.schema import SourceConfig

SECONDS = 10.0  # for the first answer of the hub


def describe_hub_data(name: str, sources: Sequence["SourceConfig"]) -> list[str]:
    """Download the splits of hub sources. Return one line for each source: data set, rows, licence.

    name: `data.name`, for messages
    Raises UserError with alternatives if a data set is neither on the hub nor in the cache.
    """
    lines = []
    for source in sources:
        assert source.hub is not None
        _check_connection(source.hub)
        rows = len(load_split(source, source.split))
        held_out = source.eval_split and len(load_split(source, source.eval_split))
        counts = f"{rows:,} rows and {held_out:,} held-out rows" if held_out else f"{rows:,} rows"
        licence = cached_licence(source.hub, "dataset")  # `datasets` has just read the card
        lines.append(f"data: {name} ({source.hub}), {counts}, licence {licence}")
    return lines


def load_split(source: "SourceConfig", split: str) -> Any:
    """Return the rows of a split, from the cache or from the hub. Raises UserError with advice."""
    import datasets

    try:
        rows = datasets.load_dataset(source.hub, source.subset, split=split)
    except Exception as error:  # the hub's client raises dozens of types: no network, no such set, no access, full disk
        if isinstance(error, ValueError) and not datasets.config.HF_HUB_OFFLINE:  # an unknown configuration or split
            named = " ".join(str(error).splitlines()[:2]).rstrip(".")  # with those that exist
            select = f'"data.sources=[{{hub: {source.hub}, subset: NAME, split: NAME}}]"'
            raise UserError(
                f"{source.hub} (subset {source.subset}, split {split}) cannot be read: {named}. `subset` of the source "
                f"is the configuration: {select}."
            ) from error
        cause = kind_and_line(error).rstrip(".")
        subset = "" if source.subset in (None, "default") else f"{source.subset}*"  # the name of a folder
        include = " ".join(f"'*{subset}{each}*'" for each in (source.split, source.eval_split) if each)
        raise UserError(
            f"{source.hub} (split {split}) cannot be downloaded from the hub: {cause}. Without access to the hub, set "
            "data.path=FILE to your own data, or data.path=FOLDER to a copy that this command makes on a machine with "
            f"access: hf download {source.hub} --repo-type dataset --include {include} --local-dir FOLDER"
        ) from error
    if len(rows) == 0:
        raise UserError(f"{source.hub}: the split {split} is empty. Set another split in data.sources.")
    return rows


def cached_licence(name: str, kind: Literal["dataset", "model"]) -> str:
    """Return the licence on the card of a data set or a model in the hub's cache; "unknown" without a card."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "README.md", repo_type=kind)
    return licence_in(file) if isinstance(file, str) else "unknown"


def licence_in(file: str | Path) -> str:
    """Return the licence in the header of a card; "unknown" without one."""
    from huggingface_hub import RepoCard

    card = RepoCard(Path(file).read_text(encoding="utf-8", errors="replace"))
    licence = getattr(card.data, "license", None)
    return ", ".join(licence) if isinstance(licence, list) else str(licence or "unknown")


def _check_connection(hub: str) -> None:
    """If the hub does not answer, let this process and the processes that it starts use the cache only.

    The hub's client would repeat each request for half a minute.
    """
    from huggingface_hub import HfApi, constants, errors

    try:
        if not constants.HF_HUB_OFFLINE:
            HfApi().dataset_info(hub, timeout=SECONDS)
    except errors.HfHubHTTPError:
        pass  # the hub answers, for example that the data set does not exist
    except Exception as error:  # no network: the client raises errors of several libraries
        _go_offline(error)


def _go_offline(error: Exception) -> None:
    import datasets
    from huggingface_hub import constants

    cause = f"the hub does not answer ({kind_and_line(error)})"
    print(f"warning: {cause}, so this run uses only its cache on this machine", file=sys.stderr, flush=True)
    datasets.logging.set_verbosity_error()  # a warning for every use of the cache
    os.environ["DATASETS_VERBOSITY"] = "error"
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes of the stages
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
