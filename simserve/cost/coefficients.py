"""What is measured of an engine: the coefficients of `step_model`, with their units and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["COEFFICIENTS", "OF_PLANS", "Coefficient"]


class Coefficient(NamedTuple):
    """A measured number: its unit, where a fit starts, and what physics allows."""

    unit: str
    start: float
    low: float
    high: float
    host: bool = False
    """Whether it is host time, which is shorter on a faster host."""
    meaning: str = ""


def _host_s(start: float, meaning: str) -> Coefficient:
    return Coefficient("s", start, 0.0, 1.0, True, meaning)


def _seconds(start: float, meaning: str) -> Coefficient:
    return Coefficient("s", start, 0.0, 1.0, False, meaning)


def _tokens(start: float, low: float, meaning: str) -> Coefficient:
    return Coefficient("tokens", start, low, 1e6, False, meaning)


def _share(start: float, meaning: str) -> Coefficient:
    return Coefficient("share of the data sheet", start, 0.01, 1.0, False, meaning)


COEFFICIENTS: Mapping[str, Coefficient] = {
    "schedule_step_s": _host_s(60e-6, "schedule(): every step"),
    "schedule_request_s": _host_s(9e-6, "per request scheduled"),
    "schedule_new_request_s": _host_s(50e-6, "per new block table (new or resumed request)"),
    "schedule_new_token_s": _host_s(50e-9, "per token of a new block table"),
    "inputs_step_s": _host_s(1.4e-3, "preparing inputs, sampling, reading the result: every step"),
    "inputs_request_s": _host_s(13e-6, "per request"),
    "inputs_mixed_s": _host_s(100e-6, "if a request has more than one token, where timed"),
    "update_step_s": _host_s(30e-6, "update_from_output(): every step"),
    "update_request_s": _host_s(6e-6, "per request"),
    "loop_step_s": _host_s(10e-6, "the engine's loop between steps: every step"),
    "loop_request_s": _host_s(1e-6, "per request of the step before"),
    "intake_first_s": _host_s(200e-6, "if requests are taken in between two steps"),
    "intake_request_s": _host_s(150e-6, "per request taken in"),
    "intake_token_s": _host_s(150e-9, "per prompt token of a request taken in"),
    "launch_step_s": _host_s(3e-3, "launching a step that is not one graph"),
    "launch_eager_layer_s": _host_s(400e-6, "per layer, where no graph is used"),
    "kernel_gap_layer_s": _seconds(30e-6, "per layer: gaps between kernels, small kernels"),
    "mixed_layer_s": _seconds(30e-6, "per layer, if a request has more than one token"),
    "merge_layer_s": _seconds(3e-6, "per layer, where decodes alone are cut and merged"),
    "linear_bandwidth": _share(0.87, "reading weights and activations"),
    "linear_flops": _share(0.75, "matrix products"),
    "linear_blend": Coefficient("", 0.3, 0.0, 2.0, False, "rounding at weight- to compute-bound"),
    "cached_tokens": _tokens(1300.0, 1.0, "whose activations never leave the GPU's L2 cache"),
    "kv_bandwidth": _share(0.8, "reading KV"),
    "mixed_kv_bandwidth": _share(0.6, "the same by decodes, if a request has more than one token"),
    "context_layer_s": _seconds(5e-9, "per layer and token that is waited for, with prefills"),
    "round_layer_s": _seconds(3e-7, "per layer and round of keys that is waited for"),
    "context_blend": Coefficient("", 0.3, 0.0, 2.0, False, "from waiting for it to adding it up"),
    "overlap_blend": Coefficient("", 0.5, 0.0, 2.0, False, "rounding where two launches overlap"),
    "kv_imbalance": Coefficient("", 0.2, 0.0, 1.0, False, "more for decodes of unlike contexts"),
    "shared_kv_saved": Coefficient(
        "share of its time", 0.5, 0.0, 1.0, False, "that KV saves where another request reads it"
    ),
    "decode_tokens": _tokens(
        200.0, 0.0, "KV tokens a decode, or a chunk of one, costs in any case"
    ),
    "prefill_flops": _share(0.58, "attention of prefills"),
    "launch_blend": Coefficient("", 0.3, 0.0, 2.0, False, "rounding at GPU- to launch-bound"),
}
"""All coefficients of the model; `docs/cost-models.md` has the formulas."""

OF_PLANS = ("merge_layer_s", "round_layer_s", "overlap_blend", "shared_kv_saved")
"""Those that count where it is known how attention is dealt out."""
