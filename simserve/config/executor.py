"""Configuration of the executor and its cost model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, WithJsonSchema, model_validator

from simserve.config.base import Registered, Seconds, StrictModel

__all__ = ["Cost", "CustomCost", "Executor", "FormulaCost", "ProfileCost", "RooflineCost"]


_BUILT_IN = ("formula", "roofline", "profile")
Efficiency = Annotated[float, Field(gt=0, le=1)]


class FormulaCost(StrictModel):
    """Step time = base_s + per_token_s · Σ n + per_attended_token_s · Σ n (c + n).

    The sums go over the requests of the step, with n new tokens after c computed ones.
    """

    kind: Literal["formula"]
    base_s: Seconds
    """Time of every step (seconds)."""
    per_token_s: Seconds = 0.0
    """Time per token computed (seconds)."""
    per_attended_token_s: Seconds = 0.0
    """Time per pair of a token computed and a token of its request's context (seconds)."""

    @model_validator(mode="after")
    def _not_free(self) -> Self:
        if not (self.base_s or self.per_token_s):
            raise ValueError("base_s and per_token_s are both 0: a step must take time")
        return self


class RooflineCost(StrictModel):
    """Step time from FLOPs and bytes of the model on the GPU."""

    kind: Literal["roofline"]
    linear_flops_efficiency: Efficiency = 0.65
    """Share of the GPU's FLOP/s that matrix multiplications reach."""
    attention_flops_efficiency: Efficiency = 0.55
    """Share of the GPU's FLOP/s that prefill attention reaches."""
    linear_bandwidth_efficiency: Efficiency = 0.9
    """Share of the memory bandwidth at which weights are read."""
    attention_bandwidth_efficiency: Efficiency = 0.8
    """Share of the memory bandwidth at which KV entries are read."""
    layer_launch_s: Seconds = 10e-6
    """Gaps between the kernels of one layer (seconds)."""
    host_step_s: Seconds = 2e-3
    """Host time of a step that the GPU waits for (seconds)."""
    host_request_s: Seconds = 20e-6
    """Host time per request of a step (seconds)."""


class ProfileCost(StrictModel):
    """Step time from coefficients in a JSON file."""

    kind: Literal["profile"]
    name: str | None = None
    """Name of a profile that comes with the package."""
    path: str | None = None
    """A profile of your own, relative to this configuration file."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.name is None) == (self.path is None):
            raise ValueError("needs either name or path")
        return self


class CustomCost(StrictModel):
    """A cost model of your own."""

    kind: Annotated[
        str,
        Registered("cost_models"),
        WithJsonSchema({"type": "string", "not": {"enum": list(_BUILT_IN)}}),
    ]
    """'module:Class', or the name of an installed plug-in."""
    options: dict[str, JsonValue] = {}
    """Arguments of the class."""


def _cost_kind(value: Any) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if kind is None:
        return None
    return kind if kind in _BUILT_IN else "custom"


Cost = Annotated[
    Annotated[FormulaCost, Tag("formula")]
    | Annotated[RooflineCost, Tag("roofline")]
    | Annotated[ProfileCost, Tag("profile")]
    | Annotated[CustomCost, Tag("custom")],
    Discriminator(_cost_kind),
]


class Executor(StrictModel):
    """What runs the steps."""

    kind: Literal["simulated"] = "simulated"
    """simulated: nothing is computed; a cost model says how long each step takes."""
    cost: Cost = RooflineCost(kind="roofline")
    """How long a step takes."""
