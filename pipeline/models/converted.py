"""Checkpoints whose tensors are not the model's own: transformers renames, joins or splits them on the way in.

The experts of Mixtral and Qwen-MoE lie apart in the files and are one parameter of the model. What is joined is read
for one parameter after another, and where experts are stacked, one expert after another of those that a rank holds.
The rules are transformers' own (`conversion_mapping`).
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from engine import loading


@dataclass(frozen=True)
class _Recipe:
    """Tensors of the files, by the pattern of `converter` that they fit, and the first parameter made of them."""

    converter: WeightConverter
    first: str
    tensors: dict[str, list[str]] = field(default_factory=dict)

    def stacks(self) -> bool:
        """Each row of the parameter is made of one tensor of each pattern."""
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in rest)
        )

    def make(self, read: Callable[[str], Tensor], model: PreTrainedModel, row: int | None = None) -> dict[str, Tensor]:
        """The parameters by name; of a stack one row (1, ...)."""
        chosen = slice(None) if row is None else slice(row, row + 1)
        found: Any = {pattern: [read(name) for name in names[chosen]] for pattern, names in self.tensors.items()}
        self.converter.collected_tensors = found
        made: dict[str, Tensor] = self.converter.convert(self.first, model=model, config=model.config)
        return made


class ConvertedFolder:
    """The tensors of a folder by the names and in the shapes that they have in a model."""

    def __init__(self, files: loading.SafetensorsFolder, empty: PreTrainedModel) -> None:
        """`empty` is the model as transformers makes it, without values. Raises ValueError where what belongs together
        can't be joined.
        """
        self._files, self._empty = files, empty
        self._renamed: dict[str, str] = {}
        self._recipes: dict[str, _Recipe] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for recipe in self._find():
            for name, made in self._shapes_of(recipe).items():
                self._recipes[name], self.shapes[name] = recipe, tuple(made.shape)
        self.shapes |= {name: files.shapes[there] for name, there in self._renamed.items()}
        self._share_tied()

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._files.folder

    def read(self, name: str, region: loading.Region) -> Tensor:
        """Part of one tensor (all of a scalar)."""
        if name in self._renamed:
            return self._files.read(self._renamed[name], region)
        recipe = self._recipes[name]
        if not recipe.stacks():
            return loading.read_region(recipe.make(lambda there: self._whole(there).float(), self._empty)[name], region)
        stack = torch.empty([sum(part.stop - part.start for part in parts) for parts in region])
        self._stack(name, region, stack)
        return stack

    def copy(self, name: str, region: loading.Region, target: Tensor) -> None:
        """Part of one tensor into another of that shape. Of a stack no more than a row is held beside it."""
        if name in self._recipes and self._recipes[name].stacks():
            self._stack(name, region, target)
        else:
            target.copy_(self.read(name, region))

    def _stack(self, name: str, region: loading.Region, target: Tensor) -> None:
        rows = (row for part in region[0] for row in range(part.start, part.stop))
        for held, row in zip(target, rows, strict=True):
            made = self._recipes[name].make(self._whole, self._empty, row)[name]
            held.copy_(loading.read_region(made[0], region[1:]))

    def _find(self) -> list[_Recipe]:
        """Sort the tensors of the files: those that only have another name, and those that something is made of."""
        rules = get_model_conversion_mapping(self._empty)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known, prefix = self._empty.state_dict(), self._empty.base_model_prefix
        recipes: dict[str, _Recipe] = {}
        for there in sorted(self._files.shapes, key=dot_natural_key):
            name, pattern = rename_source_key(there, renamings, converters, prefix, known)
            if name not in known:
                name, pattern = rename_source_key(there, [], [], prefix, known)
            if pattern is not None:
                recipe = recipes.setdefault(name, _Recipe(deepcopy(of_pattern[pattern]), name))
                recipe.tensors.setdefault(pattern, []).append(there)
            elif name in known:
                self._renamed[name] = there
        return list(recipes.values())

    def _shapes_of(self, recipe: _Recipe) -> dict[str, Tensor]:
        """What a recipe makes, without values."""
        try:
            return recipe.make(lambda there: torch.empty(self._files.shapes[there], device="meta"), self._empty)
        except (RuntimeError, ValueError) as error:
            one = next(iter(recipe.tensors.values()))[0]
            raise ValueError(
                f"{self.folder}: {recipe.first} can't be made of {one} and what belongs to it ({error}); "
                "its config.json does not belong to these weights, or the download is incomplete"
            ) from error

    def _share_tied(self) -> None:
        """Of parameters that are one the files may have either."""
        by_parameter: dict[int, list[str]] = {}
        for name, parameter in self._empty.named_parameters(remove_duplicate=False):
            by_parameter.setdefault(id(parameter), []).append(name)
        for names in by_parameter.values():
            there = next((name for name in names if name in self._renamed), None)
            for name in names:
                if there is not None and name not in self.shapes:
                    self._renamed[name], self.shapes[name] = self._renamed[there], self.shapes[there]

    def _whole(self, there: str) -> Tensor:
        return self._files.read(there, ((slice(None),),) * len(self._files.shapes[there]))
