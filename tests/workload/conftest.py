"""Trace files for tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

TraceFile = Callable[[str | bytes, str], Path]


@pytest.fixture
def trace_file(tmp_path: Path) -> TraceFile:
    """Writes a trace: `trace_file(content, "name.jsonl")`."""

    def write(content: str | bytes, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
