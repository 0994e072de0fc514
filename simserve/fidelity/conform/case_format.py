"""What the values of a recorded case must be, so that it can be simulated and compared."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

__all__ = ["first_problem"]

_Size = Annotated[int, Field(ge=1, le=10**9)]
_Length = Annotated[int, Field(ge=1, le=10**7)]
_Id = Annotated[int, Field(ge=0)]
_Time = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
_Pair = Annotated[list[_Id], Field(min_length=2, max_length=2)]


class _Spec(BaseModel):
    method: Literal["ngram", "eagle"]
    num: Annotated[int, Field(ge=1, le=1000)]
    accept: _Pair
    draft_len: _Pair | None = None

    @model_validator(mode="after")
    def _has_lengths(self) -> Self:
        if self.method == "ngram" and self.draft_len is None:
            raise ValueError("ngram needs draft_len")
        return self


class _Group(BaseModel):
    type: Literal["full", "sliding"]
    window: _Size | None = None

    @model_validator(mode="after")
    def _has_window(self) -> Self:
        if self.type == "sliding" and self.window is None:
            raise ValueError("a sliding group needs a window")
        return self


class _Config(BaseModel):
    block_size: Annotated[int, Field(ge=1, le=65536)]
    num_gpu_blocks: Annotated[int, Field(ge=1, le=10**7)]
    max_num_batched_tokens: _Size
    max_num_seqs: _Size
    max_model_len: _Size
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=10**9)]
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    max_num_partial_prefills: _Size
    policy: Literal["fcfs", "priority"]
    async_scheduling: bool
    spec: _Spec | None
    kv_groups: Annotated[list[_Group], Field(min_length=1)] | None
    cost: Annotated[list[_Time], Field(min_length=3, max_length=3)]
    max_steps: _Size
    record_blocks: bool = True
    record_queue: bool = True


def _checked_part(part: list[Any]) -> list[Any]:
    numbers = part[1:] if part[:1] == ["o"] else part
    is_pair = len(numbers) == 2 and all(type(number) is int for number in numbers)
    if not is_pair or numbers[0] < 0 or not 1 <= numbers[1] <= 10**7:
        raise ValueError("must be [segment, length] or ['o', request, length]")
    return part


def _checked_abort(abort: list[Any]) -> list[Any]:
    is_pair = len(abort) == 2 and type(abort[0]) in (int, float) and type(abort[1]) is int
    if not is_pair or not 0.0 <= abort[0] < float("inf"):
        raise ValueError("must be [time, request]")
    return abort


class _Request(BaseModel):
    id: _Id
    t: _Time
    prompt: Annotated[
        list[Annotated[list[Any], AfterValidator(_checked_part)]], Field(min_length=1)
    ]
    out: _Length
    prio: int = 0
    salt: str | None = None
    plp: Literal[0, 1] = 0


class _Workload(BaseModel):
    requests: list[_Request]
    aborts: list[Annotated[list[Any], AfterValidator(_checked_abort)]] = []
    resets: list[_Time] = []

    @model_validator(mode="after")
    def _counts(self) -> Self:
        for place, request in enumerate(self.requests):
            if request.id != place:
                raise ValueError(f"requests: {place}: id must be {place}, is {request.id}")
        for _, request_id in self.aborts:
            if not 0 <= request_id < len(self.requests):
                raise ValueError(f"aborts: there is no request {request_id}")
        return self


class _Case(BaseModel):
    config: _Config
    workload: _Workload
    steps: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    summary: dict[str, Any]


def first_problem(case: dict[str, Any]) -> str | None:
    """Where a case breaks the format and how, such as `config.block_size: Field required`."""
    try:
        _Case.model_validate(case, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        what = problem["msg"].removeprefix("Value error, ").partition(" or instance of ")[0]
        return f"{place}: {what}"
    return None
