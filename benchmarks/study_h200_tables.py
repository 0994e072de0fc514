"""Blocks of docs/studies that show what ran on the GPU, and their pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from study_attention import decode_steps
from study_cases import key, share, shown
from study_cells import BUDGET, PARTS, THRESHOLD
from study_columns import (
    ALLOCATOR,
    BLOCK_SIZE,
    LONG,
    LONG_CONTEXT,
    LONG_PREFILL,
    PRESSURE,
    SHORT,
    TEMPLATE,
    TEMPLATE_ORDER,
    sequences,
    template_crossing,
)
from study_h200 import (
    Pair,
    PairColumn,
    both,
    both_shares,
    kernels,
    launches,
    measured,
    microseconds,
    pair_table,
    pairs,
    provenance,
    same,
)
from study_pictures import draw_first_tokens, draw_real_and_simulated
from study_sampling import measured_rows, shipped
from study_traces import PROMPT_LENS

from simserve.report.markdown import markdown_table

NOT_MEASURED = ["Not measured yet."]
SAME = {"settings", "long one", "budget", "threshold", "blocks", "max_num_seqs", "requests/s"}
SAME |= {"allocator", "template", "requests", "block size", "blocks a table"}
SAME |= {"tokens unused in the last block", "", "n", "W"}
"""Columns that say the same in both worlds: settings, and what follows from lengths."""
PAGE_SIZES = (8, 16, 32, 64, 128, 256)

Cells = list[list[str]]
Lines = Sequence[str]


def paired(columns: Mapping[str, Callable[..., str]]) -> dict[str, PairColumn]:
    """Columns of the simulated tables, each as `real / simulated`."""
    found = {name: (same if name in SAME else both)(column) for name, column in columns.items()}
    if "host share" in found:
        found["host share"] = both_shares(share("schedule|inputs|update"))
        found["launches"] = launches
    if "most running" in found:
        found["most running"] = most_running
    return found


def most_running(pair: Pair) -> str:
    return (
        f"{pair.real.step('max_num_running')} / {pair.simulated.result.steps['num_running'].max()}"
    )


def of(config: str, columns: Mapping[str, Callable[..., str]]) -> Callable[[], Lines]:
    return lambda: lines(pair_table(paired(columns), config))


def lines(cells: Cells | None) -> Lines:
    return NOT_MEASURED if cells is None else list(markdown_table(cells))


def prefix_cache() -> Lines:
    """A row a prompt length, real / simulated."""
    found = pairs("prefix_cache")
    if not found:
        return NOT_MEASURED
    names = [f"{pair.real.scenario}, {which}" for pair in found for which in ("first", "repeat")]
    cells = [["prompt tokens", "hit tokens", *names]]
    (with_cache,) = (pair for pair in found if pair.real.scenario == "cache on")
    for prompt_len in PROMPT_LENS:
        cells.append([f"{prompt_len:,}", hit_tokens(with_cache, f"repeat {prompt_len}")])
        for pair in found:
            for which in ("cold", "repeat"):
                column = key(f"class.{which} {prompt_len}.p50_ttft_ms", 1)
                cells[-1].append(both(column)(pair))
    return list(markdown_table(cells))


def hit_tokens(pair: Pair, name: str) -> str:
    """Of a class of requests, each time it ran; once if all found as many."""
    tables = [pd.DataFrame(row["requests"]) for row in pair.real.rows]
    tables.append(pair.simulated.result.requests)
    sums = (table.loc[table["class"] == name, "cached_tokens"].sum() for table in tables)
    return " / ".join(dict.fromkeys(f"{one:,}" for one in sums))


def template_salts(number: str) -> Lines:
    """A row a length, a column a trace, real / simulated."""
    found = [(pair.simulated, both(TEMPLATE[number])(pair)) for pair in pairs("template_salts")]
    return lines(template_crossing(found) if found else None)


def block_kernels() -> Lines:
    """The same decodes and the same chunk on blocks of other sizes."""
    rows = kernels([f"decode b64 ctx2048 page{size}" for size in PAGE_SIZES])
    if rows is None:
        return NOT_MEASURED
    cells = [["block size", "64 decodes at 2,048 (µs)", "of read", "chunk of 2,048 at 8,192 (µs)"]]
    for size, row in zip(PAGE_SIZES, rows, strict=True):
        chunk = kernels([f"chunk 2048 @ 8192 page{size}"])
        shown_chunk = "–" if chunk is None else f"{microseconds(chunk[0]):,.1f}"
        of_read = f"{row['percent_of_read_ceiling']:.0f} %"
        cells.append([f"{size}", f"{microseconds(row):,.1f}", of_read, shown_chunk])
    return list(markdown_table(cells))


def block_order() -> Lines:
    """Decodes whose blocks lie one after another, or anywhere."""
    cells = [["requests", "context", "blocks in order (µs)", "at random (µs)"]]
    for batch, context in ((1, 32768), (64, 2048)):
        name = f"decode b{batch} ctx{context}, blocks"
        rows = kernels([f"{name} in order", f"{name} at random"])
        if rows is None:
            return NOT_MEASURED
        cells.append([f"{batch}", f"{context:,}", *(f"{microseconds(row):,.1f}" for row in rows)])
    return list(markdown_table(cells))


def what_ran() -> Lines:
    return [provenance()] if measured() else NOT_MEASURED


def picture(name: str, text: str) -> Callable[[], Lines]:
    """A reference to a picture that is there once something was measured."""
    return lambda: [f"![{text}](../images/studies/{name}.png)"] if measured() else NOT_MEASURED


def draw_long_prefill() -> bytes:
    """First tokens where the long one comes first, in both worlds."""
    worlds: dict[str, dict[str, pd.DataFrame]] = {"On the H200": {}, "Simulated": {}}
    for config, name, label in (
        ("long_prefill_budget", BUDGET, "budget {}"),
        ("long_prefill_threshold", THRESHOLD, "2,048, at most {}"),
    ):
        for pair in pairs(config):
            if pair.real.scenario == "first":
                row = label.format(shown(pair.real.values[name]))
                requests = pd.DataFrame(pair.real.rows[0]["requests"])
                worlds["On the H200"][row] = requests
                worlds["Simulated"][row] = pair.simulated.result.requests
    return draw_first_tokens(worlds)


def draw_overview() -> bytes:
    """TTFT, ITL and duration of every cell, simulated over real."""
    numbers = {"p50_ttft_ms": "TTFT p50", "p99_itl_ms": "ITL p99", "duration": "Duration"}
    factors = {"duration": 1e3}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for number, title in numbers.items():
        for config in (part.config for part in PARTS):
            points = [point(pair, number, factors.get(number, 1.0)) for pair in pairs(config)]
            group = config.replace("_", " ")
            found.setdefault(title, {})[group] = [one for one in points if one is not None]
    return draw_real_and_simulated(found)


def point(pair: Pair, number: str, factor: float) -> tuple[float, float] | None:
    values = [one.number(number) for one in (pair.real, pair.simulated)]
    return None if None in values else (factor * values[0], factor * values[1])


BLOCKS: dict[str, Callable[[], Lines]] = {
    "h200": what_ran,
    "h200:picture": picture("real-and-simulated", "Every cell, simulated over real"),
    "h200:long_prefill_picture": picture("long-prefill-h200", "First tokens in both worlds"),
    **{f"h200:{name}": of(name, heads | SHORT) for name, heads in LONG_PREFILL.items()},
    **{f"h200:{name}:long": of(name, heads | LONG) for name, heads in LONG_PREFILL.items()},
    "h200:prefix_cache": prefix_cache,
    "h200:long_context_documents": of("long_context_documents", LONG_CONTEXT),
    "h200:long_context_turns": of("long_context_turns", LONG_CONTEXT),
    "h200:block_size": of("block_size", BLOCK_SIZE),
    "h200:block_kernels": block_kernels,
    "h200:block_order": block_order,
    "h200:pressure": of("pressure", PRESSURE),
    "h200:allocator": of("allocator", ALLOCATOR),
    "h200:template_salts": lambda: template_salts("hit tokens"),
    "h200:template_salts:ttft": lambda: template_salts("TTFT p50"),
    "h200:template_order": of("template_order", TEMPLATE_ORDER),
    "h200:parallel": of("parallel", sequences("n")),
    "h200:beam_search": of("beam_search", sequences("W")),
    "h200:sampling": lambda: [f"{shipped().measured_on}.", "", *lines(measured_rows())],
    "h200:decode_steps": lambda: lines(decode_steps()),
}
PICTURES = {
    "long-prefill": ("long-prefill-h200", draw_long_prefill),
    "README": ("real-and-simulated", draw_overview),
}
"""By page: name and maker; drawn where something was measured."""
