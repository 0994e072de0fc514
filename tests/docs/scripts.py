"""Scripts of benchmarks/ as modules, so that tests need no process for each call."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

__all__ = ["load_script"]


def load_script(name: str, root: Path) -> Any:
    """`benchmarks/<name>.py` under `root`, which has read and computed nothing yet.

    It and those beside it are left out of `sys.modules`: another root has scripts of these names.
    """
    folder, before = str(root / "benchmarks"), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = import_module(name)
    for found in set(sys.modules) - before:
        if (getattr(sys.modules[found], "__file__", None) or "").startswith(folder):
            del sys.modules[found]
    return module
