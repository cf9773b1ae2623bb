"""Many rows of ids in one piece of memory: 4 bytes an id, where lists of numbers take up to 36."""

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

Item = TypeVar("Item")


class Items(Sequence[Item]):
    """A sequence whose items `at` makes when they are asked for."""

    @abstractmethod
    def at(self, place: int) -> Item:
        """The item at a place from 0 on."""

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...

    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        places = range(len(self))[place]
        return self.at(places) if isinstance(places, int) else [self.at(each) for each in places]


class TokenRows(Items[list[int]]):
    """Rows of whole numbers: ids, or flags where `kind` is "b"."""

    def __init__(self, kind: Literal["i", "b"] = "i") -> None:
        self._flat: array[int] = array(kind)
        self._ends = array("q", [0])

    def append(self, row: Sequence[int]) -> None:
        """A row more; no view of an earlier one may be alive."""
        self._flat.extend(row)
        self._ends.append(len(self._flat))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def at(self, place: int) -> list[int]:
        return self._flat[self._ends[place] : self._ends[place + 1]].tolist()

    def view(self, place: int) -> npt.NDArray[Any]:
        """One row, int32 or int8, without a copy."""
        return np.frombuffer(self._flat, self._flat.typecode)[self._ends[place] : self._ends[place + 1]]
