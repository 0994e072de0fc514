"""Configuration of the executor and its cost model."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from simserve.config.base import Fraction, Natural, Positive, Registered, Seconds, StrictModel
from simserve.sampling import MOST_BIAS, MOST_LOGPROBS, RequestSampling

__all__ = [
    "Cost",
    "CustomCost",
    "Executor",
    "FormulaCost",
    "OwnSampling",
    "ProfileCost",
    "Real",
    "RooflineCost",
    "Sampling",
    "Simulated",
]


SHORTEST_STEP_S = 1e-12
"""Of a formula: the rates of much shorter steps are too large for a number."""
_BUILT_IN = ("formula", "roofline", "profile")
Efficiency = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


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
        if self.base_s + self.per_token_s < SHORTEST_STEP_S:
            raise ValueError(
                f"base_s and per_token_s are too small: a step takes at least {SHORTEST_STEP_S} s"
            )
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
    host_scale: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Factor on all host times: above 1 for a slower host than the measured one."""
    host: Literal["as_measured", "adds", "overlaps"] = "as_measured"
    """Whether host time comes on top of GPU time, or runs beside it (asynchronous scheduling)."""

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


class Shadow(StrictModel):
    """A price for each step, beside what it took."""

    cost: Cost
    """The cost model that names it."""


class OwnSampling(StrictModel):
    """How requests want their tokens chosen."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Logits are divided by it; 0: the likeliest token; below 0.01: that much."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Draw among the k likeliest tokens. 0 and -1: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw among the fewest tokens that have this probability together."""
    min_p: Fraction = 0.0
    """Draw among tokens that have this share of the likeliest one's probability."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Of their random numbers. null: each request has one that follows from the run's seed."""
    presence_penalty: Penalty = 0.0
    """Taken from the logit of each token that was put out before."""
    frequency_penalty: Penalty = 0.0
    """Taken from it for each time that it was."""
    repetition_penalty: Positive = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or put out before."""
    logit_bias: dict[Annotated[int, Field(ge=0, strict=False)], Bias] = {}
    """Added to the logits of tokens, by token id."""
    allowed_token_ids: Annotated[tuple[Natural, ...], Field(strict=False, min_length=1)] | None = (
        None
    )
    """Tokens that may be put out. null: all."""
    bad_words: Annotated[
        tuple[Annotated[tuple[Natural, ...], Field(strict=False, min_length=1)], ...],
        Field(strict=False),
    ] = ()
    """Sequences of token ids that are not put out."""
    min_tokens: Natural = 0
    """Before so many are put out, no token ends a request."""
    stop_token_ids: Annotated[tuple[Natural, ...], Field(strict=False)] = ()
    """Tokens that end a request; the one that did is the last of its output."""
    ignore_eos: bool = True
    """Whether the model's end-of-sequence token is a token like any other. false: it ends a
    request, whose output_len is then the most it may get."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Log-probabilities of each token and of so many of the likeliest. null: of none."""

    @model_serializer(mode="wrap")
    def _what_is_said(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the defaults: what is written out stands over what others say."""
        found: dict[str, Any] = dump(self)
        return {key: value for key, value in found.items() if key in self.model_fields_set}

    @property
    def of_request(self) -> RequestSampling:
        """What each of these requests wants."""
        return RequestSampling(**self.model_dump(exclude={"weight"}))

    @property
    def given(self) -> dict[str, Any]:
        """What is written out of it."""
        return self.model_dump()


class Sampling(OwnSampling):
    """How some of the requests want their tokens chosen."""

    weight: Positive = 1.0
    """Their share of the requests, relative to the other entries' weights."""


class Simulated(StrictModel):
    """Nothing is computed; a cost model says how long each step takes."""

    kind: Literal["simulated"] = "simulated"
    """simulated or real."""
    cost: Cost = RooflineCost(kind="roofline")
    """How long a step takes."""
    noise: Literal["none", "residual"] = "none"
    """residual: step times scatter as the measured ones did about their profile (seeded)."""
    sampling: list[Sampling] = []
    """How tokens are chosen, which takes time: each request takes one of these, at random. Empty:
    the likeliest, unless requests or their classes say something else."""

    @model_validator(mode="after")
    def _noise_has_a_source(self) -> Self:
        if self.noise == "residual" and not isinstance(self.cost, ProfileCost):
            raise ValueError("noise residual is drawn from a profile: it needs cost kind profile")
        return self


class Real(StrictModel):
    """The model is computed, and each step takes as long as it does."""

    kind: Literal["real"]
    """simulated or real."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cuda: Triton kernels on a GPU; cpu: plain references, for small models."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """Type of weights and activations; auto: the model's. float64: on a CPU only."""
    weights: Annotated[str, Field(min_length=1)] = "random"
    """random (drawn from `seed`), or a folder with *.safetensors, relative to this file."""
    draft_weights: Annotated[str, Field(min_length=1)] = "random"
    """The same for `scheduler.speculative.draft_model`."""
    attention: Literal["auto", "v1", "v2", "article"] = "auto"
    """Kernel of decodes: auto splits by the actual lengths; v1 and v2 are those of the first paged
    attention, and article the rule that chooses between them."""
    kv_layout: Literal["nhd", "packed"] = "nhd"
    """How a block holds keys and values; packed is the layout of the first paged attention."""
    mixed: Literal["varlen", "split"] = "varlen"
    """Steps with prefills: one attention call, or decodes and prefills apart."""
    tokens: Literal["replay", "sampled"] = "replay"
    """What requests go on with: the tokens that the trace dictates, or those that are chosen."""
    sampling: list[Sampling] = []
    """How tokens are chosen: each request takes one of these, at random. Empty: the likeliest."""
    max_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Of how many of the likeliest tokens a request may want log-probabilities. null: as many as
    `sampling` and `workload.decoding` want."""
    pace: Literal["virtual", "realtime"] = "virtual"
    """virtual: time without requests is passed over; realtime: arrivals are waited for."""
    breakdown: bool = False
    """Also time KV writes, attention, matrix products and the output head. Costs some time."""
    shadow: Shadow | None = None
    """Prices each step beside its measured duration. null: no."""
    cost: Cost = RooflineCost(kind="roofline")
    """How long a step takes where the same configuration is simulated beside it. Without one of its
    own, that simulation has the shadow's."""

    @model_validator(mode="after")
    def _cost_of_the_shadow(self) -> Self:
        if self.shadow is not None and "cost" not in self.model_fields_set:
            object.__setattr__(self, "cost", self.shadow.cost)  # it is frozen once it is made
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dtype == "float64" and self.device != "cpu":
            raise ValueError("dtype float64 needs device cpu: the GPU kernels stop at float32")
        if self.device == "cpu" and self.attention != "auto":
            raise ValueError(
                f"attention {self.attention} is a GPU kernel: leave it at auto with device cpu"
            )
        return self


def _simulated_if_not_said(value: Any) -> Any:
    return {"kind": "simulated", **value} if isinstance(value, dict) else value


Executor = Annotated[
    Annotated[Simulated | Real, Field(discriminator="kind")],
    BeforeValidator(_simulated_if_not_said),
]
