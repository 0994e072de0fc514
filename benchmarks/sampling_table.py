"""The table of docs/kernels.md that shows samplers: µs by batch, kernels beside torch alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simserve.report.markdown import markdown_table

BATCHES = ("b1", "b64", "b256")
WAYS = ("sampler", "torch")


def table(report: dict[str, Any]) -> Iterator[str]:
    """A row a method; the cases of a single batch size are in its columns."""
    rows = {(row["case"], row["path"]): row for row in report["rows"]}
    found: dict[str, None] = {}
    for case, _ in rows:
        found.setdefault(method_of(case)[0])
    cells = [["rows ask for", *(f"{batch}, {way}" for batch in BATCHES for way in WAYS)]]
    for method in found:
        cells.append([method])
        for batch in BATCHES:
            names = [case for case, _ in rows if method_of(case) == (method, batch)]
            cells[-1] += [microseconds(rows.get((names[0], way))) if names else "–" for way in WAYS]
    yield from markdown_table(cells)


def method_of(case: str) -> tuple[str, str]:
    """`sample top_p b64 peaked` is (`top_p, peaked`, `b64`)."""
    words = case.split()[1:]
    batch = next(word for word in words if word in BATCHES)
    place = words.index(batch)
    return ", ".join(filter(None, [" + ".join(words[:place]), *words[place + 1 :]])), batch


def microseconds(row: dict[str, Any] | None) -> str:
    return "–" if row is None or row.get("median_us") is None else f"{row['median_us']:,.1f}"
