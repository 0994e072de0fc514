"""What `simserve report` makes of a directory: the page and figures of a run, or of a sweep."""

from __future__ import annotations

from pathlib import Path

from simserve.report import figures, sweep_figures
from simserve.report.artefact import load_runs
from simserve.report.run_page import run_page
from simserve.report.sweep_page import sweep_page
from simserve.report.sweep_points import SweepPoints, read_sweep

__all__ = ["figures_of", "page_of"]


def page_of(directory: Path) -> str:
    """HTML of the run or the sweep in a directory.

    Raises:
        RunDirectoryError: it is neither, or cannot be read.
    """
    if _is_sweep(directory):
        return sweep_page(read_sweep(directory))
    return run_page(load_runs(directory))


def figures_of(directory: Path) -> dict[str, bytes]:
    """PNG files by name.

    Raises:
        RunDirectoryError: it is neither a run nor a sweep, or cannot be read.
    """
    if _is_sweep(directory):
        return _sweep_figures(read_sweep(directory))
    runs = load_runs(directory)
    first = next(iter(runs.values()))
    made = {
        "latencies.png": figures.draw_latencies(first),
        "load.png": figures.draw_load(first),
        "batches.png": figures.draw_batch_composition(first),
    }
    if len(runs) == 2:
        made["simulated-against-real.png"] = figures.draw_against(*runs.values())
    return made


def _sweep_figures(points: SweepPoints) -> dict[str, bytes]:
    frame, made = points.frame, {}
    if (load := points.load_key) is not None:
        by = [key for key in points.free if key != load]
        made["percentiles.png"] = sweep_figures.draw_percentiles(frame, load, by=by)
    if points.grid_keys is not None:
        for value in points.heatmaps:
            made[f"heatmap-{value}.png"] = sweep_figures.draw_heatmap(
                frame, *points.grid_keys, value=value, by=points.panel_keys
            )
    for less in ("p99_ttft_ms", "p99_itl_ms"):
        made[f"pareto-{less}.png"] = sweep_figures.draw_pareto(frame, less=less, by=points.free)
    return made


def _is_sweep(directory: Path) -> bool:
    return (directory / "sweep.yaml").is_file()
