"""What every part of the configuration model shares: strictness, number ranges, registry names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema

from simserve import registry
from simserve.errors import did_you_mean

__all__ = [
    "Count",
    "Fraction",
    "Mean",
    "Milliseconds",
    "Natural",
    "OneOf",
    "Positive",
    "Registered",
    "Seconds",
    "Shape",
    "StrictModel",
]

_MAX_COUNT = 10**9

Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
"""A number of things of which there is at least one."""
Natural = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Mean = Annotated[float, Field(ge=1, le=_MAX_COUNT)]
"""Mean of such numbers."""
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Milliseconds = Annotated[float, Field(gt=0, le=1e12)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Shape = Annotated[float, Field(ge=0, le=20)]
"""Parameter of a distribution that is no quantity: an exponent, a sigma."""


class StrictModel(BaseModel):
    """Frozen; unknown keys, values of another type, NaN and infinity are errors."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        defer_build=True,
        allow_inf_nan=False,
    )


class OneOf:
    """An annotation for text: one of the names that a function lists, checked and in the schema."""

    def __init__(self, what: str, names: Callable[[], list[str]], otherwise: str = "") -> None:
        self._what = what
        """What the names stand for."""
        self._names = names
        self._otherwise = otherwise
        """What else could be given."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Check after pydantic has made sure that it is text."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The names, for editors to complete."""
        return {"type": "string", "enum": self._names()}

    def _check(self, name: str) -> str:
        names = self._names()
        if name not in names:
            raise ValueError(
                f"no {self._what} is called '{name}'{did_you_mean(name, names)}; "
                f"there are {', '.join(names)}{self._otherwise}"
            )
        return name


class Registered(OneOf):
    """One of the names of a registry group, or of those in `extra`, or a class of the user's."""

    def __init__(self, group: str, *extra: str) -> None:
        self._built_in = [*extra, *registry.BUILTINS[group]]
        super().__init__(
            group.removesuffix("s").replace("_", " "), lambda: [*extra, *registry.names(group)]
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Built-in names to complete; what is installed or written elsewhere has any other name."""
        return {"anyOf": [{"enum": self._built_in}, {"type": "string"}]}

    def _check(self, name: str) -> str:
        if ":" in name or name in self._built_in:
            return name
        try:
            return super()._check(name)
        except ValueError as error:
            raise ValueError(f"{error}, or a class of your own as 'module:Class'") from None
