"""Step times from a profile: what a real engine's steps were measured to cost."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any, Literal

import numpy as np

from simserve.cost.checks import check_positive
from simserve.cost.dealing import Dealer
from simserve.cost.features import Features, extract
from simserve.cost.heat import Heat
from simserve.cost.profile_file import load_profile
from simserve.cost.regimes import regime_of_counts
from simserve.cost.step_model import PARTS, Path, larger, rates, sheet, step_parts
from simserve.cost.step_work import NO_FACTORS, StepWork, step_work
from simserve.cost.taken import num_taken
from simserve.errors import ConfigError, OutOfDomainError
from simserve.protocols import Price
from simserve.shapes import resolve_kv_dtype
from simserve.types import GPU, ModelShape, StepPlan, StepRun, TraceRequest

__all__ = ["ProfileCost"]

_HOST_PARTS = ("schedule_s", "inputs_s", "update_s")
_HOST_PLACES = tuple(PARTS.index(part) for part in _HOST_PARTS)
_TINY_S = 1e-30
_GPU_PLACES = tuple(at for at in range(len(PARTS)) if at not in _HOST_PLACES)
_KERNEL_PLACES = tuple(at for at in _GPU_PLACES if PARTS[at] != "launch_s")


class ProfileCost:
    """Prices steps by a profile; docs/cost-models.md has its formulas.

    Outside the measured domain the formulas go on, and the step is counted in
    `out_of_domain_steps`; a profile may forbid it instead. Another model is priced by its shape.

    Args:
        model: the model that is simulated.
        gpu: the GPU that is simulated; its name must be the profile's.
        name: a profile that comes with the package, or
        path: a profile's file, relative to `base_dir`.
        kv_cache_dtype: dtype of the KV cache; `auto` is the model's.
        host_scale: factor on all host times: above 1 for a slower host than the measured one.
        host: `adds` to GPU time or `overlaps` it; `as_measured`: what the profile says.

    Raises:
        UnknownNameError, ConfigError: see `load_profile`; or the profile is of another GPU.
    """

    def __init__(
        self,
        model: ModelShape,
        gpu: GPU,
        *,
        name: str | None = None,
        path: str | FilePath | None = None,
        base_dir: FilePath | None = None,
        kv_cache_dtype: str = "auto",
        host_scale: float = 1.0,
        host: Literal["as_measured", "adds", "overlaps"] = "as_measured",
    ) -> None:
        check_positive("profile", {"host_scale": host_scale})
        self.profile = load_profile(name, path, base_dir)
        if self.profile.gpu != gpu.name:
            raise ConfigError(
                f"profile '{self.profile.name}' was measured on gpu '{self.profile.gpu}', "
                f"the configuration has '{gpu.name}'"
            )
        self._num_outside = 0
        self._model = model.name
        self._window = model.sliding_window
        self._coefficients = self.profile.coefficients
        of_model = sheet(model, gpu, resolve_kv_dtype(model, kv_cache_dtype))
        self._rates = rates(self._coefficients, of_model)
        self._graph_sizes = self.profile.graphs.sizes
        self._full_up_to = self.profile.graphs.full_up_to
        self._prefill_graph_sizes = self.profile.graphs.of_prefills
        self._host_scale = host_scale
        self._host = self.profile.host if host == "as_measured" else host
        own = model.name == self.profile.model
        self._size_factors = self.profile.factors if own else NO_FACTORS
        plan = self.profile.attention_plan
        self._dealer = Dealer(plan, model) if plan else None
        self._heat = Heat()
        self._token_share_s = of_model.token_flops_s
        self._outside: dict[str, float] = {}
        self._last: tuple[int, int, Features] | None = None
        """The run priced last, if it is not yet looked at: number, steps, and their counts."""

    @property
    def out_of_domain_steps(self) -> int:
        """Steps that were taken outside what was measured."""
        self._look_at_last(None)
        return self._num_outside

    @property
    def host_adds(self) -> bool:
        """Whether host time comes on top of GPU time."""
        return self._host == "adds"

    @property
    def timing(self) -> str:
        """Whose step times these are."""
        engine = self.profile.engine
        return f"profile {self.profile.name} ({engine.name} {engine.timing_version})"

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of results must know: where the profile went beyond its measurements."""
        num_outside, name, found = self.out_of_domain_steps, self.profile.name, []
        if self._model not in self.profile.measured_models:
            found.append(
                f"profile '{name}': model '{self._model}' was not measured; it is priced by its "
                f"shape from {', '.join(self.profile.measured_models)}"
            )
        if self._host != self.profile.host:
            found.append(
                f"profile '{name}': measured with host time that {self.profile.host}, priced as "
                f"if it {self._host}"
            )
        if self._outside:
            worst = (
                f"{feature} = {value:g} (measured: {low:g} to {high:g})"
                for feature, value in self._outside.items()
                for low, high in [self.profile.domain[feature]]
            )
            found.append(
                f"profile '{name}': {num_outside} steps lie outside what was measured "
                f"and are extrapolated: {', '.join(worst)}"
            )
        return tuple(found)

    def price(self, run: StepRun) -> Price:
        """Durations and parts of the steps of a run; a step without tokens costs 0.

        Raises:
            OutOfDomainError: a step lies outside the measured domain and the profile forbids that.
        """
        return self.price_on(run, 1.0)

    def price_on(self, run: StepRun, host_factor: Any) -> Price:
        """The same on a host that is slower by a factor: a number, or one for each step.

        Raises:
            OutOfDomainError: as `price` has it.
        """
        features = extract(run, self._window)
        if features.num_tokens == 0:
            return Price([0.0] * run.count, dict.fromkeys(PARTS, 0.0))
        self._look_at_last(run.plan.step)
        if self.profile.out_of_domain == "error":
            self._check_domain(features, run.count)
        else:
            self._last = run.plan.step, run.count, features
        sizes = self._prefill_graph_sizes if features.num_prefills else self._graph_sizes
        work = step_work(run, features, sizes, self._window, self._size_factors, self._dealer)
        host_scale = self._host_scale * host_factor
        parts = list(step_parts(self._rates, work, self._path(work, sizes), host_scale))
        self._slow_down(parts, run, features.num_prefills > 0)
        if self._host == "overlaps":
            _hide_host(parts)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        durations_s = [float(total)] if run.count == 1 else total.tolist()
        if features.num_prefills and self.profile.clock is not None:
            self._heat.passed(run.plan.step + run.count - 1, features.num_tokens, durations_s[-1])
        return Price(durations_s, dict(zip(PARTS, parts, strict=True)))

    def _slow_down(self, parts: list[Any], run: StepRun, mixed: bool) -> None:
        """Lengthen kernels as far as the latest steps have lowered the GPU's clock."""
        clock = self.profile.clock
        if clock is None:
            return
        steps: Any = run.plan.step
        if run.count > 1:
            steps = steps + np.arange(run.count)
        gain = clock.prefills if mixed else clock.decodes
        factor = 1.0 + gain * (self._token_share_s * self._heat.before(steps))
        for at in _KERNEL_PLACES:
            parts[at] = factor * parts[at]

    def after_step_s(self, plan: StepPlan) -> float:
        """Time of the engine's loop after a step (s)."""
        c = self._coefficients
        requests_s = c["loop_request_s"] * len(plan.request_ids)
        return self._host_scale * (c["loop_step_s"] + requests_s)

    def take_in_s(self, request: TraceRequest, first: bool) -> float:
        """Time of the engine's loop to take in one request, the `first` since a step or not (s)."""
        c = self._coefficients
        first_s = c["intake_first_s"] if first else 0.0
        prompt_s = c["intake_token_s"] * request.prompt_len
        return self._host_scale * (first_s + c["intake_request_s"] + prompt_s)

    def regime(self, run: StepRun) -> str:
        """The regime of the steps of a run, as in the profile's errors and residuals."""
        num_tokens = run.plan.num_tokens
        return regime_of_counts(sum(num_tokens), len(num_tokens), num_tokens.count(1))

    def _path(self, work: StepWork, graph_sizes: list[int]) -> Path:
        tokens = work.num_padded_tokens
        if not graph_sizes or tokens > graph_sizes[-1]:
            return Path.EAGER
        alone = work.num_prefills is None and tokens <= self._full_up_to
        return Path.FULL if alone else Path.PIECEWISE

    def _look_at_last(self, next_step: int | None) -> None:
        """Count steps outside the domain in the run priced last, as far as it was taken."""
        if self._last is not None:
            (first, count, features), self._last = self._last, None
            self._check_domain(features, num_taken(first, count, next_step))

    def _check_domain(self, features: Features, count: int) -> None:
        """Count those of the first `count` steps that are outside the domain, or refuse them."""
        outside: Any = False
        for feature, (low, high) in self.profile.domain.items():
            value = getattr(features, feature)
            if not isinstance(value, int):
                value = value[:count]
            beyond = (value < low) | (value > high)
            if not (beyond if isinstance(value, int) else beyond.any()):
                continue
            outside = outside | beyond
            far = float(np.max(value) if np.max(value) > high else np.min(value))
            if self.profile.out_of_domain == "error":
                raise OutOfDomainError(
                    f"profile '{self.profile.name}': {feature} = {far:g} is outside the measured "
                    f"{low:g} to {high:g}, and the profile forbids extrapolation"
                )
            known = self._outside.get(feature, far)
            self._outside[feature] = max(known, far) if far > high else min(known, far)
        if outside is not False:
            self._num_outside += int(np.broadcast_to(outside, count).sum())


def _hide_host(parts: list[Any]) -> None:
    """Leave of the host's parts what exceeds the GPU's: the rest runs beside it."""
    host = parts[_HOST_PLACES[0]]
    for at in _HOST_PLACES[1:]:
        host = host + parts[at]
    gpu = parts[_GPU_PLACES[0]]
    for at in _GPU_PLACES[1:]:
        gpu = gpu + parts[at]
    share = larger(host - gpu, 0.0) / larger(host, _TINY_S)
    for at in _HOST_PLACES:
        parts[at] = share * parts[at]
