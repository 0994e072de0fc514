"""Scripts of benchmarks/ in this process, so that tests need no process for each call."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

__all__ = ["load_script", "run_script"]


def load_script(name: str, root: Path) -> Any:
    """`benchmarks/<name>.py` under `root` as a module, which has read and computed nothing yet."""
    with importable(root / "benchmarks"):
        return import_module(name)


def run_script(name: str, root: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of `python benchmarks/<name>.py ARGUMENTS` under `root`."""
    script = str(root / "benchmarks" / f"{name}.py")
    with importable(root / "benchmarks") as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr("sys.argv", [script, *arguments])
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0), printed.getvalue()
    return 0, printed.getvalue()


@contextmanager
def importable(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Let scripts import those beside them.

    They are left out of `sys.modules`: another root has scripts of these names.
    """
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        try:
            yield patch
        finally:
            for found in set(sys.modules) - before:
                if (getattr(sys.modules[found], "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[found]
