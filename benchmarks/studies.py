"""The studies of docs/studies: simulates configs/studies, writes the tables and draws the pictures.

    python benchmarks/studies.py [NAME ...]   # all studies, or these
    python benchmarks/studies.py --check      # draw nothing; exit with 1 if a table is out of date

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; NAME is a file of
configs/studies, of recorded runs, of measured kernels, or, behind `h200`, of what
`benchmarks/studies_gpu.py` has measured. `benchmarks/study_traces.py` writes the traces.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd
from study_attention import (
    decode_kernels,
    draw_decode_kernels,
    draw_flash,
    flash_counters,
    flash_time,
)
from study_cases import Cases, Column, run, scenario, shown, table
from study_cells import BUDGET, THRESHOLD
from study_columns import (
    ALLOCATOR,
    BLOCK_SIZE,
    LONG,
    LONG_CONTEXT,
    LONG_PREFILL,
    PRESSURE,
    SEQUENCES,
    SHORT,
    TEMPLATE,
    TEMPLATE_ORDER,
    hit_percent,
    sequences,
    template_crossing,
)
from study_h200 import measured
from study_h200_tables import BLOCKS
from study_h200_tables import PICTURES as MEASURED_PICTURES
from study_pictures import Panel, draw_first_tokens, draw_panels
from study_sampling import COLUMNS as SAMPLING
from study_sampling import draw_sampling, errors_rows, method_rows
from study_traces import PROMPT_LENS

from simserve.config.sweep_cells import short_names
from simserve.executor.simulated import SimulatedExecutor
from simserve.fidelity.logs.vllm_log import read_vllm_log
from simserve.fidelity.replay.log_run import simulate_log
from simserve.fidelity.validate.timing import profile_timing
from simserve.report.markdown import markdown_table

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "tests" / "data" / "vllm_logs"
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end \2 -->)", re.S)


PLACES = {
    "first": "The long one comes first",
    "middle": "in the middle, after 0.6 s",
    "last": "last, after 1.2 s",
}


def draw_long_prefill() -> bytes:
    """First tokens (s) of all requests: a panel a place of the long one, a row a setting."""
    columns: dict[str, dict[str, pd.DataFrame]] = {}
    for name, group in groupby(run("long_prefill_budget"), scenario):
        rows = {f"budget {shown(case.values[BUDGET])}": case.result.requests for case in group}
        columns[PLACES[name]] = rows
    for name, group in groupby(run("long_prefill_threshold"), scenario):
        rows = {
            f"2,048, at most {shown(case.values[THRESHOLD])}": case.result.requests
            for case in group
            if case.values[THRESHOLD]
        }
        columns[PLACES[name]] |= rows
    return draw_first_tokens(columns)


def prefix_rows(cases: Cases) -> list[list[str]]:
    """A row a prompt length: first and second time, with the cache on and off."""
    names = [f"{name}, {which}" for name in map(scenario, cases) for which in ("first", "repeat")]
    cells = [["prompt tokens", "hit tokens", *names]]
    for prompt_len in PROMPT_LENS:
        requests = cases[0].result.requests
        hit = requests.loc[requests["class"] == f"repeat {prompt_len}", "cached_tokens"].sum()
        keys = [f"class.{which} {prompt_len}.p50_ttft_ms" for which in ("cold", "repeat")]
        latencies = [f"{case.number(name):,.1f}" for case in cases for name in keys]
        cells.append([f"{prompt_len:,}", f"{hit:,}", *latencies])
    return cells


def draw_prefix() -> bytes:
    """TTFT (ms, median) over the prompt's length, by scenario and by first or second time."""
    series = {
        f"{case.scenario}, {which} time": [
            case.number(f"class.{name} {prompt_len}.p50_ttft_ms") for prompt_len in PROMPT_LENS
        ]
        for case in run("prefix_cache")
        for name, which in (("cold", "first"), ("repeat", "second"))
    }
    places = [f"{prompt_len:,}" for prompt_len in PROMPT_LENS]
    return draw_panels(
        [Panel("TTFT", "ms", series, places, "prompt (tokens)", is_log=True, is_line=True)]
    )


def draw_long_context() -> bytes:
    names = {"long_context_documents": "8 documents", "long_context_turns": "8 turns"}
    series = {
        label: [case.number("duration") for case in run(name)] for name, label in names.items()
    }
    places = [scenario(case).replace(" ", "\n", 1) for case in run("long_context_turns")]
    return draw_panels([Panel("Time until all is answered", "s", series, places)])


def draw_block_size() -> bytes:
    """Percent of prompts found in the cache, and of the KV cache in use at most, by block size."""
    cases = run("block_size")
    places = [str(case.values["kv_cache.block_size"]) for case in cases]
    hit = [hit_percent(case) for case in cases]
    used = [100 * case.number("max_kv_cache_usage") for case in cases]
    panel = partial(Panel, places=places, xlabel="block size (tokens)")
    return draw_panels(
        [panel("Found of prompts", "%", {"": hit}), panel("Most KV used", "%", {"": used})]
    )


def draw_pressure() -> bytes:
    """Preemptions, tokens/s and requests/s within the SLO over `max_num_seqs`, a line a cache."""
    titles = {
        "num_preemptions": ("Preemptions", ""),
        "output_throughput": ("Throughput", "tokens/s"),
        "request_goodput": ("Goodput", "requests/s"),
    }
    return draw_grid(
        "pressure", titles, "scheduler.max_num_seqs", "kv_cache.num_gpu_blocks", "blocks"
    )


def draw_allocator() -> bytes:
    """Requests running, tokens/s and requests/s within the SLO by rate, a line an allocator."""
    titles = {
        "mean_num_running": ("Mean running", "requests"),
        "output_throughput": ("Throughput", "tokens/s"),
        "request_goodput": ("Goodput", "requests/s"),
    }
    return draw_grid(
        "allocator", titles, "workload.synthetic.arrival.rate", "kv_cache.allocator", ""
    )


def draw_grid(
    name: str, titles: Mapping[str, tuple[str, str]], x: str, by: str, what: str
) -> bytes:
    """A panel a number of the summary, over one setting, with a line for each value of another."""
    cases = run(name)
    places = list(dict.fromkeys(str(case.values[x]) for case in cases))
    lines = list(dict.fromkeys(case.values[by] for case in cases))
    panels = []
    for number, (title, unit) in titles.items():
        series = {
            f"{shown(line)} {what}".strip(): [
                case.number(number) for case in cases if case.values[by] == line
            ]
            for line in lines
        }
        label = short_names([x])[x] if x != "workload.synthetic.arrival.rate" else "requests/s"
        panels.append(Panel(title, unit, series, places, label, is_line=True))
    return draw_panels(panels)


def draw_template() -> bytes:
    """TTFT (ms, median) by order of the templates, for a small and a large cache."""
    cases = run("template_order")
    names = list(dict.fromkeys(map(scenario, cases)))
    series = {}
    for num_blocks in (600, 6000):
        chosen = [case for case in cases if case.values["kv_cache.num_gpu_blocks"] == num_blocks]
        series[f"{num_blocks:,} blocks"] = [case.number("p50_ttft_ms") for case in chosen]
    places = [name.replace(" ", "\n") for name in names]
    return draw_panels([Panel("Templates of 4,096 tokens: TTFT p50", "ms", series, places)])


def template_rows(number: str) -> list[list[str]]:
    return template_crossing((case, TEMPLATE[number](case)) for case in run("template_salts"))


def sequence_rows(name: str, width: str) -> list[list[str]]:
    """A row a setting, each number with its multiple of that of the scenario's first row."""
    columns = sequences(width)
    cells = [[*columns, "if none were shared"]]
    for _, group in groupby(run(name), scenario):
        first, *others = group
        for case in (first, *others):
            texts = [column(case) for column in columns.values()]
            for place, measure in enumerate(SEQUENCES.values(), len(texts) - len(SEQUENCES)):
                texts[place] += f" ({measure(case) / measure(first):.2f})"
            unshared = case.number("max_unshared_kv_blocks")
            cells.append([*texts, "–" if unshared is None else f"{unshared:,}"])
    return cells


def draw_sequences() -> bytes:
    """Multiples of what one sequence takes."""
    lines = {
        "n, one at a time": ("parallel", "one at a time"),
        "n, without prefix cache": ("parallel", "without prefix cache"),
        "n, answers end early": ("parallel", "answers end early"),
        "n, sixteen at once": ("parallel", "sixteen at once"),
        "W, one at a time": ("beam_search", "one at a time"),
        "W, without prefix cache": ("beam_search", "without prefix cache"),
        "W, four at once": ("beam_search", "four at once"),
    }
    widths = [1, 2, 4, 8]
    panels = []
    for title, measure in SEQUENCES.items():
        series: dict[str, list[float]] = {}
        for line, (name, wanted) in lines.items():
            found = [measure(case) for case in run(name) if scenario(case) == wanted]
            series[line] = [value / found[0] for value in found]
        places = list(map(str, widths))
        panels.append(
            Panel(
                title,
                "multiple",
                series,
                places,
                "n or W",
                is_log=True,
                is_line=True,
                is_dense=True,
                guide=("n or W times", [float(width) for width in widths]),
            )
        )
    return draw_panels(panels)


def recorded_rows() -> list[list[str]]:
    """The two sides as a real engine ran them, each beside its simulation."""
    cells = [
        ["settings", "", "short TTFT p50", "short TTFT p99", "long TTFT", "long E2EL", "steps"]
    ]
    for label, name in (("off", "long_off_40960"), ("on", "long_on_2048_1024")):
        log = read_vllm_log(LOGS / f"{name}.json.gz")
        executor = SimulatedExecutor(profile_timing("h200-llama-3.1-8b-vllm", log).cost(1.0))
        simulated = simulate_log(log, executor)
        rows = [simulated.requests.request_ids.index(one.request_id) for one in log.requests]
        arrivals_s = np.array([one.arrival_s for one in log.requests])
        is_long = np.array([one.prompt_len > 1000 for one in log.requests])
        real = np.array([[times[0], times[-1]] for times in log.token_times_s])
        times = simulated.times
        priced = np.stack([times.first_token_s[rows], times.last_token_s[rows]], axis=1)
        for who, ends_s, num_steps in (
            ("real", real, len(log.steps)),
            ("simulated", priced, simulated.steps.num_steps),
        ):
            first_ms, last_ms = (1e3 * (ends_s - arrivals_s[:, None])).T
            short = np.percentile(first_ms[~is_long], [50, 99])
            numbers = [*short, first_ms[is_long][0], last_ms[is_long][0]]
            cells.append([label, who, *(f"{value:,.0f}" for value in numbers), f"{num_steps}"])
    return cells


def of(name: str, columns: Mapping[str, Column]) -> Callable[[], list[list[str]]]:
    return lambda: table(columns, run(name))


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    **{name: of(name, heads | SHORT) for name, heads in LONG_PREFILL.items()},
    **{f"{name}:long": of(name, heads | LONG) for name, heads in LONG_PREFILL.items()},
    "long_prefill_recorded": recorded_rows,
    "prefix_cache": lambda: prefix_rows(run("prefix_cache")),
    "long_context_documents": of("long_context_documents", LONG_CONTEXT),
    "long_context_turns": of("long_context_turns", LONG_CONTEXT),
    "block_size": of("block_size", BLOCK_SIZE),
    "pressure": of("pressure", PRESSURE),
    "allocator": of("allocator", ALLOCATOR),
    "template_salts": lambda: template_rows("hit tokens"),
    "template_salts:ttft": lambda: template_rows("TTFT p50"),
    "template_order": of("template_order", TEMPLATE_ORDER),
    "parallel": lambda: sequence_rows("parallel", "n"),
    "beam_search": lambda: sequence_rows("beam_search", "W"),
    "sampling": of("sampling", SAMPLING),
    "sampling_errors": errors_rows,
    "sampling_methods": method_rows,
    "decode_kernels": decode_kernels,
    "flash_time": flash_time,
    "flash_counters": flash_counters,
}
PICTURES: dict[str, Callable[[], bytes]] = {
    "long-prefill": draw_long_prefill,
    "prefix-cache": draw_prefix,
    "long-context": draw_long_context,
    "block-size": draw_block_size,
    "pressure": draw_pressure,
    "allocator": draw_allocator,
    "template": draw_template,
    "parallel-and-beam": draw_sequences,
    "sampling": draw_sampling,
    "decode-kernels": draw_decode_kernels,
    "flash-attention": draw_flash,
}
"""By study, which is also the name of its page."""


def written(page: Path) -> str:
    """The page with the tables that come out now."""

    def block(found: re.Match[str]) -> str:
        name = found[2]
        lines = BLOCKS[name]() if name in BLOCKS else markdown_table(TABLES[name]())
        return found[1] + "".join(f"{line}\n" for line in lines) + found[3]

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


def main(names: Sequence[str], check: bool) -> Iterator[str]:
    """Bring pages and pictures up to date; yields pages that were not, if they are only checked."""
    for name in names or [*PICTURES, "README"]:
        page = ROOT / "docs" / "studies" / f"{name}.md"
        text = written(page)
        if check:
            if text != page.read_text(encoding="utf-8"):
                yield str(page.relative_to(ROOT))
            continue
        page.write_text(text, encoding="utf-8")
        if name in PICTURES:
            draw(name, PICTURES[name])
        if name in MEASURED_PICTURES and measured():
            draw(*MEASURED_PICTURES[name])


def draw(name: str, make: Callable[[], bytes]) -> None:
    (ROOT / "docs" / "images" / "studies" / f"{name}.png").write_bytes(make())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    stale = list(main(arguments.names, arguments.check))
    for name in stale:
        print(f"out of date: {name}")
    sys.exit(bool(stale))
