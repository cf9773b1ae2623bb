"""Checkpoints whose tensors differ from the model's parameters: transformers renames, merges or splits the tensors.

For example, Mixtral and Qwen-MoE checkpoints have separate tensors for each expert, and the model has one parameter for
all experts. The tensors are merged for one parameter at a time. Stacked experts are merged one expert at a time, and
each rank merges only the experts of its shard. The rules are those of transformers (`conversion_mapping`).
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
    """The conversion of some tensors of the files into parameters.

    converter: the rule of transformers
    first: the name of the first parameter that the conversion makes
    tensors: for each pattern of `converter`, the names of the tensors that match it
    """

    converter: WeightConverter
    first: str
    tensors: dict[str, list[str]] = field(default_factory=dict)

    def stacks(self) -> bool:
        """Return whether row i of the parameter is made of tensor i of each pattern."""
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in rest)
        )

    def make(self, read: Callable[[str], Tensor], model: PreTrainedModel, row: int | None = None) -> dict[str, Tensor]:
        """Return the converted parameters by name.

        `read` returns a tensor of the files. `row` selects one row of a stack; its parameters have the shape (1, ...).
        """
        rows = slice(None) if row is None else slice(row, row + 1)
        collected: Any = {pattern: [read(name) for name in names[rows]] for pattern, names in self.tensors.items()}
        self.converter.collected_tensors = collected
        parameters: dict[str, Tensor] = self.converter.convert(self.first, model=model, config=model.config)
        return parameters


class ConvertedFolder(loading.SafetensorsFolder):
    """A safetensors folder with the tensor names and shapes of a model."""

    def __init__(self, folder: Path, empty: PreTrainedModel) -> None:
        """Find the conversion of each tensor.

        `empty` is the model as transformers creates it, without values. `unused` lists the tensors that no conversion
        reads. Raises ValueError if a conversion fails.
        """
        super().__init__(folder)
        self._stored_shapes, self._empty = self.shapes, empty
        self._renamed: dict[str, str] = {}
        self.unused: list[str] = []
        self._recipes: dict[str, _Recipe] = {}
        self.shapes = {}
        for recipe in self._find():
            for name, parameter in self._shapes_of(recipe).items():
                self._recipes[name], self.shapes[name] = recipe, tuple(parameter.shape)
        self.shapes |= {name: self._stored_shapes[stored] for name, stored in self._renamed.items()}
        self._share_tied()

    def read(self, name: str, region: loading.Region) -> Tensor:
        """Return a region of a tensor, or the full tensor if it is a scalar."""
        if name in self._renamed:
            return super().read(self._renamed[name], region)
        recipe = self._recipes[name]
        if not recipe.stacks():
            return loading.read_region(
                recipe.make(lambda stored: self._whole(stored).float(), self._empty)[name], region
            )
        stack = torch.empty([sum(rows.stop - rows.start for rows in ranges) for ranges in region])
        self._stack(name, region, stack)
        return stack

    def copy(self, name: str, region: loading.Region, target: Tensor) -> None:
        """Copy a region of a tensor into `target`.

        A stack is copied row by row, so that only one converted row is in memory in addition to `target`.
        """
        if name in self._recipes and self._recipes[name].stacks():
            self._stack(name, region, target)
        else:
            super().copy(name, region, target)

    def _stack(self, name: str, region: loading.Region, target: Tensor) -> None:
        """Copy a region of a stack into `target`, one row at a time."""
        rows = (row for row_range in region[0] for row in range(row_range.start, row_range.stop))
        for target_row, row in zip(target, rows, strict=True):
            converted = self._recipes[name].make(self._whole, self._empty, row)[name]
            target_row.copy_(loading.read_region(converted[0], region[1:]))

    def _find(self) -> list[_Recipe]:
        """Return the recipes of converted tensors, and record the names of tensors that are only renamed."""
        rules = get_model_conversion_mapping(self._empty)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        expected, prefix = self._empty.state_dict(), self._empty.base_model_prefix
        recipes: dict[str, _Recipe] = {}
        for stored in sorted(self._stored_shapes, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, expected)
            if name not in expected:
                name, pattern = rename_source_key(stored, [], [], prefix, expected)
            if pattern is not None:
                recipe = recipes.setdefault(name, _Recipe(deepcopy(of_pattern[pattern]), name))
                recipe.tensors.setdefault(pattern, []).append(stored)
            elif name in expected:
                self._renamed[name] = stored
            else:
                self.unused.append(stored)
        return list(recipes.values())

    def _shapes_of(self, recipe: _Recipe) -> dict[str, Tensor]:
        """Return the parameters that a recipe makes, on the meta device."""
        try:
            return recipe.make(lambda stored: torch.empty(self._stored_shapes[stored], device="meta"), self._empty)
        except (RuntimeError, ValueError) as error:
            example = next(iter(recipe.tensors.values()))[0]
            raise ValueError(
                f"{self.folder}: {recipe.first} can't be made of {example} and what belongs to it ({error}); "
                "its config.json does not belong to these weights, or the download is incomplete"
            ) from error

    def _share_tied(self) -> None:
        """Make each tied parameter available by all of its names, because files may have any of them."""
        by_parameter: dict[int, list[str]] = {}
        for name, parameter in self._empty.named_parameters(remove_duplicate=False):
            by_parameter.setdefault(id(parameter), []).append(name)
        for names in by_parameter.values():
            stored_name = next((name for name in names if name in self._renamed), None)
            for name in names:
                if stored_name is not None and name not in self.shapes:
                    self._renamed[name], self.shapes[name] = self._renamed[stored_name], self.shapes[stored_name]

    def _whole(self, there: str) -> Tensor:
        """Return the full tensor `there` of the files."""
        return super().read(there, ((slice(None),),) * len(self._stored_shapes[there]))
