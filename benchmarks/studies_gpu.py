"""The studies' halves that need a GPU, in one sitting: `python benchmarks/studies_gpu.py`.

Other kernels and block sizes have machines of their own; then come single kernels; and one model
with random weights serves the cells of `study_cells.py`, which differ in settings that a machine
does not depend on. Everything goes to one JSON file, written anew after each piece: what fails is
recorded with its reason, and what the time limit leaves out is named. `--resume FILE` keeps what a
file has already; with `--renew` until it has been measured again. `--rehearse` runs all of it on a
CPU, with a tiny model and short prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from study_cells import BLOCK_SIZE, BUDGET, MACHINE, MAX_NUM_SEQS, PARTS, Cell, cells
from study_machines import TINY, Settings, machine
from study_pieces import launches, run_cell, steps
from study_sitting import Sitting

from simserve.config.loader import LoadedConfig

if TYPE_CHECKING:
    from simserve.executor.real.machine import Machine

RESULTS = Path(__file__).resolve().parent / "results" / "studies_h200.json"
STAGES = ("attention", "block sizes", "kernels", "cells")
"""The last one ends with a profiler, after which every step of its process takes longer."""
LAUNCH_CASES = ("32*1@512", "2048", "512@8000", "32*1@512,2016", "8192")


def main() -> int:
    """Measure stage by stage; exit status 1 if a stage failed."""
    arguments = parse()
    sitting = Sitting(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rehearsal = None
        if arguments.rehearse:
            rehearsal = Path(folder) / "config.json"
            rehearsal.write_text(json.dumps(TINY))
        settings = Settings(rehearsal)
        for stage in (one for one in STAGES if one in (arguments.only or STAGES)):
            {
                "cells": main_machine,
                "attention": attention_kernels,
                "block sizes": block_sizes,
                "kernels": single_kernels,
            }[stage](sitting, settings)
    sitting.write()
    return int(sitting.failed)


def parse() -> argparse.Namespace:
    """What to measure, for how long, and what of an earlier result to keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE.json")
    parser.add_argument("--resume", type=Path, metavar="FILE.json", help="keep what it has")
    parser.add_argument("--time-limit", type=float, default=230.0, metavar="SECONDS")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help=str(STAGES))
    parser.add_argument("--renew", action="store_true", help="measure what it has again")
    parser.add_argument(
        "--cells", nargs="+", default=["*"], metavar="PATTERN", help="only cells of such names"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny")
    return parser.parse_args()


def main_machine(sitting: Sitting, settings: Settings) -> None:
    """All cells with blocks of 16, what a step launches, and whole steps with `auto`."""
    wanted = list(missing(sitting, settings, lambda cell: cell.block_size == 16))
    if not wanted and has_steps(sitting, settings, "auto"):
        return
    loaded = settings.machine()
    with machine(sitting, loaded, "blocks of 16") as opened:
        if opened is None:
            return
        run_cells(sitting, wanted, opened)
        run_steps(sitting, settings, loaded, opened, "auto")
        if settings.device == "cuda":
            for case in LAUNCH_CASES:
                sitting.measure("launches", case, partial(launches, loaded, opened, case))


def attention_kernels(sitting: Sitting, settings: Settings) -> None:
    """Whole steps of decodes alone, with the kernels that the first paged attention had."""
    if settings.is_rehearsal:  # a CPU has no such kernels
        return
    for way in ("v1", "v2"):
        if has_steps(sitting, settings, way):
            continue
        limits = {MAX_NUM_SEQS: 32, BUDGET: 64, "executor.attention": way}
        loaded = settings.machine(limits)
        with machine(sitting, loaded, f"attention {way}") as opened:
            if opened is not None:
                run_steps(sitting, settings, loaded, opened, way)


def block_sizes(sitting: Sitting, settings: Settings) -> None:
    """Cells with blocks of another size than 16, a machine each."""
    wanted = list(missing(sitting, settings, lambda cell: cell.block_size != 16))
    wanted.sort(key=lambda cell: cell.name in sitting.report["cells"])  # first what was never run
    for size in dict.fromkeys(cell.block_size for cell in wanted):
        chosen = [cell for cell in wanted if cell.block_size == size]
        num_blocks = MACHINE["kv_cache.num_gpu_blocks"] * 16 // size
        limits = {BLOCK_SIZE: size, "kv_cache.num_gpu_blocks": num_blocks, BUDGET: 8192}
        with machine(sitting, settings.machine(limits), f"blocks of {size}") as opened:
            if opened is not None:
                run_cells(sitting, chosen, opened)


def single_kernels(sitting: Sitting, settings: Settings) -> None:
    """Decodes and a chunk by block size, and decodes by the order of their blocks."""
    from study_kernels import kernel_pieces

    for name, call in kernel_pieces(is_rehearsal=settings.is_rehearsal):
        sitting.measure("kernels", name, call)


def missing(sitting: Sitting, settings: Settings, keep: Callable[[Cell], bool]) -> Iterator[Cell]:
    for part in PARTS:
        for cell in cells(part, settings.of(part.config)):
            chosen = any(fnmatchcase(cell.name, pattern) for pattern in sitting.patterns)
            if chosen and keep(cell) and not sitting.has("cells", cell.name):
                yield cell


def run_cells(sitting: Sitting, wanted: Sequence[Cell], opened: Machine) -> None:
    for cell in wanted:
        sitting.measure("cells", cell.name, partial(run_cell, cell, opened))


def has_steps(sitting: Sitting, settings: Settings, way: str) -> bool:
    return all(sitting.has("steps", f"{way} {case}") for case in settings.step_cases)


def run_steps(
    sitting: Sitting, settings: Settings, loaded: LoadedConfig, opened: Machine, way: str
) -> None:
    for case in settings.step_cases:
        sitting.measure("steps", f"{way} {case}", partial(steps, loaded, opened, case, (3, 15)))


if __name__ == "__main__":
    sys.exit(main())
