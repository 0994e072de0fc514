"""Tables and pictures of the study of sampling: what choosing tokens takes, and of what."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from study_attention import rows_of
from study_cases import Case, key, scenario, setting, share
from study_pictures import Panel, draw_panels

from simserve.cost.sampling_file import SamplingFile, load_sampling

SEQS = "scheduler.max_num_seqs"
NAMES = {
    "argmax": "the likeliest, by torch",
    "greedy": "the likeliest",
    "temperature": "temperature 1",
    "min_p": "min-p 0.05",
    "top_k": "top-k 50",
    "top_k top_p": "top-k 50, top-p 0.9",
    "top_p": "top-p 0.9",
    "mixed": "3 of 10 the likeliest, 7 top-p 0.9",
    "penalties": "penalties, temperature 1",
    "None": "tokens alone",
    "0": "log-probability of the token",
    "1": "and of the likeliest",
    "5": "and of the 5 likeliest",
    "20": "and of the 20 likeliest",
}
USES = {
    "greedy": ("the likeliest", "answers that should not vary: code, mathematics, extraction"),
    "temperature": ("temperature", "conversation; all tokens remain possible"),
    "min_p": ("min-p", "high temperatures: drops what is unlikely beside the best"),
    "top_k": ("top-k", "a fixed number of candidates"),
    "top_p": ("top-p", "open text: the more candidates, the less sure the model is"),
    "top_k top_p": ("top-k, top-p", "the same with a bound on the candidates"),
    "penalties": ("penalties", "against repetition; here with a temperature"),
    "20": ("20 log-probabilities", "evaluation, ranking, beams; on top of a method"),
}
USED_ROWS = (1, 64, 256)
LOGPROBS = ("None", "0", "1", "5", "20")
PLACES = ((1, 128_256), (16, 128_256), (64, 128_256), (256, 128_256), (512, 128_256))
OTHER_PLACES = ((256, 32_000), (256, 151_936))
"""Rows and vocabularies of the table."""


@cache
def medians() -> Mapping[tuple[str, int, int], float]:
    """µs by method, rows and vocabulary."""
    return {
        (row["method"] or "argmax", row["batch"], row["vocab_size"]): row["median_us"]
        for row in rows_of("sampling_cost_h200")
    }


def sampling_of(case: Case) -> str:
    """Settings of all requests, or of shares of them."""
    entries: list[dict[str, Any]] = case.values["executor.sampling"]
    total = sum(one.get("weight", 1) for one in entries)
    texts = []
    for one in entries:
        words = [
            f"{name.replace('_', '-')} {value}" for name, value in one.items() if name != "weight"
        ]
        part = f"{100 * one.get('weight', 1) / total:.0f} %: " if len(entries) > 1 else ""
        texts.append(part + ", ".join(words))
    return "; ".join(texts) or "the likeliest, as in the profile"


COLUMNS = {
    "model": scenario,
    "running": setting(SEQS),
    "sampling": sampling_of,
    "ITL p50": key("p50_itl_ms", 2),
    "sampling, of all steps": share("sample"),
    "tokens/s": key("output_throughput"),
}


def measured_rows() -> list[list[str]]:
    """µs a call, a row a method."""
    found = medians()
    places = [*PLACES, *OTHER_PLACES]
    cells = [["", *(f"{rows} × {vocab // 1000}k" for rows, vocab in places)]]
    for method, name in NAMES.items():
        cells.append([name, *(f"{found[method, *place]:,.0f}" for place in places)])
    return cells


def method_rows() -> list[list[str]]:
    """What each method is for, and what it takes: µs a call."""
    found = medians()
    cells = [["method", "for", *(f"{rows} rows" if rows > 1 else "1 row" for rows in USED_ROWS)]]
    for method, (name, use) in USES.items():
        cells.append([name, use, *(f"{found[method, n, 128_256]:,.0f}" for n in USED_ROWS)])
    return cells


def shipped() -> SamplingFile:
    """What simulated steps are priced by."""
    return load_sampling("h200")


def errors_rows() -> list[list[str]]:
    """How far off the lines between measurements are."""
    names = {
        "between_rows": "a number of rows, from those beside it",
        "between_vocabularies": "a vocabulary of 128,256, from 32,000 and 151,936",
        "mixed": "batches of both kinds, from those of one",
    }
    cells = [["left out", "mean error", "largest"]]
    for key_, name in names.items():
        one = shipped().errors[key_]
        cells.append([name, f"{100 * one.mean:.0f} %", f"{100 * one.largest:.0f} %"])
    return cells


def draw_sampling() -> bytes:
    """Log-probabilities against top-p."""
    found = medians()
    panels = []
    for rows in (16, 256):
        series = {
            f"top-p {top_p}": [
                found[method, rows, 128_256] + found[number, rows, 128_256] for number in LOGPROBS
            ]
            for top_p, method in (("1.0", "temperature"), ("0.9", "top_p"))
        }
        title = f"{rows} rows of 128,256, measured"
        places = ["none", *LOGPROBS[1:]]
        panels.append(Panel(title, "µs", series, places, "log-probabilities"))
    return draw_panels(panels)
