"""What one sitting on a GPU measures: a JSON file that grows, within a limit of time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from simserve.config.environment import collect

KINDS = ("machines", "launches", "cells", "steps", "kernels")
"""Kinds of pieces; each is measured and kept, or fails, by itself."""


class Sitting:
    """What is measured, as it grows, and how much time is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._began = perf_counter()
        self._limit_s: float = arguments.time_limit
        self._out = arguments.out
        self.patterns: list[str] = arguments.cells
        self._renewed: set[tuple[str, str]] | None = set() if arguments.renew else None
        self.report: dict[str, Any] = {
            "command": ["python", "benchmarks/studies_gpu.py", "--time-limit", str(self._limit_s)],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": collect(),
            "machines": {},
            "launches": {},
            "cells": {},
            "steps": {},
            "kernels": {},
            "sittings": [],
            "left_out": [],
        }
        if arguments.resume is not None:
            before = json.loads(arguments.resume.read_text(encoding="utf-8"))
            for kind in KINDS:
                good = {k: v for k, v in before.get(kind, {}).items() if not v.get("failure")}
                self.report[kind] = good
            self.report["sittings"] = before["sittings"]
        commit = self.report["environment"]["commit"]
        self.report["sittings"].append({"date": self.report["date"], "commit": commit})
        self.failed = False

    @property
    def left_s(self) -> float:
        return self._limit_s - (perf_counter() - self._began)

    def has(self, kind: str, name: str) -> bool:
        """Whether it is there already, and need not be renewed."""
        done = self._renewed is None or (kind, name) in self._renewed
        return done and name in self.report[kind]

    def measure(
        self, kind: str, name: str, call: Callable[[], dict[str, Any]], needs_s: float = 0.0
    ) -> None:
        """Keep what `call` returns, or why it failed; nothing if it is there or time is up. What is
        renewed without success stays as it was."""
        if self.has(kind, name):
            return
        if self.left_s <= needs_s:
            self.report["left_out"].append(f"{kind}: {name}")
            self._tell(f"{kind}: {name}: left out, time is up")
            return
        began = perf_counter()
        try:
            row = {"failure": None, **call()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest goes on
            row = {"failure": f"{type(error).__name__}: {error}"[:2000]}
        self.failed = self.failed or bool(row["failure"])
        row["wall_s"] = round(perf_counter() - began, 3)
        row["sitting"] = self.report["date"]
        if not row["failure"] or name not in self.report[kind]:
            self.report[kind][name] = row
        if self._renewed is not None:
            self._renewed.add((kind, name))
        self._tell(f"{kind}: {name}: {row['failure'] or 'ok'}, {row['wall_s']:.2f} s")
        self.write()

    def write(self) -> None:
        self.report["sittings"][-1]["wall_s"] = round(perf_counter() - self._began, 1)
        self._forget_sittings()
        text = json.dumps(self.report, ensure_ascii=False, separators=(",", ":"))
        lines = text.replace('},"', '},\n"') + "\n"  # a line a piece: differences can be read
        self._out.write_text(lines, encoding="utf-8")

    def _forget_sittings(self) -> None:
        """Leave out those of which nothing is left."""
        kinds = ("launches", "cells", "steps", "kernels")
        dates = {row.get("sitting") for kind in kinds for row in self.report[kind].values()}
        if None not in dates:
            kept = [one for one in self.report["sittings"][:-1] if one["date"] in dates]
            self.report["sittings"] = [*kept, self.report["sittings"][-1]]

    def _tell(self, text: str) -> None:
        print(f"{perf_counter() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)
