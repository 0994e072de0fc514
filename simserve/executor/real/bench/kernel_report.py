"""Rows of a kernel measurement, as JSON and as tables. Needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simserve.executor.real.bench.launches import Launch

__all__ = ["KernelRow", "kernel_cells", "resource_cells"]

Cells = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One way of computing a case, measured; or why it was not."""

    case: str
    path: str
    layout: str
    kv_dtype: str
    num_bytes: int = 0
    """What must move: K and V read once; of a write both read and written; of a dense case as
    counted for its way."""
    flops: int | None = None
    relative_error: float | None = None
    """‖out − ref‖ / ‖ref‖ of some rows against float64; of a write the share of wrong elements."""
    peak_bytes: int | None = None
    """Memory that the call takes beside its inputs."""
    kernels: tuple[Launch, ...] = ()
    samples_us: tuple[float, ...] = ()
    failure: str | None = None

    def as_json(self, read_gb_s: float, matmul_tflop_s: float) -> dict[str, Any]:
        """The row with median, rates, and their shares of what the GPU reached in the same run."""
        row = asdict(self)
        samples = list(row.pop("samples_us"))
        row["kernels"] = list(row["kernels"])
        if not samples:
            return row
        median = statistics.median(samples)
        gb_s = self.num_bytes / median / 1e3
        row |= {
            "median_us": median,
            "gb_s": gb_s,
            "percent_of_read_ceiling": 100 * gb_s / read_gb_s,
        }
        if self.flops is not None:
            tflop_s = self.flops / median / 1e6
            row |= {"tflop_s": tflop_s, "percent_of_matmul": 100 * tflop_s / matmul_tflop_s}
        return {**row, "samples_us": samples}


KERNEL_HEADER = ("case", "path", "layout", "µs", "GB/s", "% read", "TFLOP/s", "% matmul")
RESOURCE_HEADER = (
    "case",
    "path",
    "layout",
    "kernel",
    "tile",
    "warps",
    "stages",
    "registers",
    "spills",
    "shared KB",
    "programs/SM",
    "occupancy",
)


def kernel_cells(rows: Iterable[Mapping[str, Any]]) -> Cells:
    """Times and rates of rows as `as_json` gives them, under a header."""
    cells = [list(KERNEL_HEADER)]
    for row in rows:
        names = [row["case"], row["path"], row["layout"]]
        if row["failure"]:
            cells.append([*names, row["failure"], "", "", "", ""])
            continue
        rates = [_number(row["median_us"], 1), _number(row["gb_s"])]
        rates += [_number(row["percent_of_read_ceiling"]), _number(row.get("tflop_s"))]
        cells.append([*names, *rates, _number(row.get("percent_of_matmul"))])
    return cells


def resource_cells(rows: Iterable[Mapping[str, Any]]) -> Cells:
    """What each kernel of the rows takes of a multiprocessor, under a header."""
    cells = [list(RESOURCE_HEADER)]
    for row in rows:
        for kernel in row["kernels"]:
            share = kernel["occupancy"]
            cells.append(
                [
                    row["case"],
                    row["path"],
                    row["layout"],
                    kernel["kernel"],
                    " ".join(f"{name}={size}" for name, size in kernel["tile"].items()),
                    *(str(kernel[key]) for key in ("num_warps", "num_stages", "registers")),
                    str(kernel["spills"]),
                    f"{kernel['shared_bytes'] / 1024:.1f}",
                    "–" if kernel["programs_per_sm"] is None else str(kernel["programs_per_sm"]),
                    "–" if share is None else f"{100 * share:.0f} %",
                ]
            )
    return cells


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
