"""The base class of all groups of configuration keys."""

import os
from typing import Annotated, Any, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

FilePath = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A path, with a leading ~ expanded."""


class Section(BaseModel):
    """A group of keys.

    Unknown keys, infinity and NaN are rejected. A number becomes text if the key needs text (`name=7`).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), coerce_numbers_to_str=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise PydanticCustomError for true or false where a number is needed: pydantic reads true as 1."""
        if isinstance(value, bool):
            annotation = cls.model_fields[str(info.field_name)].annotation
            kinds = {annotation, *get_args(annotation)}
            for number in (int, float):
                if number in kinds and bool not in kinds:
                    raise PydanticCustomError(f"{number.__name__}_type", "not a number")  # type: ignore[arg-type]
        return value


def inner_section(annotation: Any, *, in_lists: bool = False) -> type[BaseModel] | None:
    """Return the section in an annotation `X`, `X | None` or (with `in_lists`) `list[X]`; None for plain values."""
    if get_origin(annotation) in (list, dict) and not in_lists:
        return None
    for choice in (annotation, *get_args(annotation)):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None
