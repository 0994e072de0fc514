"""What may differ between runs of one configuration: versions, platform, commit, GPU."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import simserve

__all__ = ["collect"]

_PACKAGES = (
    "simpy",
    "numpy",
    "pandas",
    "pyarrow",
    "pyyaml",
    "pydantic",
    "typer",
    "rich",
    "matplotlib",
    "torch",
    "triton",
)


def collect(look_for_gpu: bool = False) -> dict[str, Any]:
    """Versions, platform and commit by name; None: there is none.

    A GPU is looked for only if asked, because that takes importing torch, where it is installed.
    """
    return {
        "simserve": simserve.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": _gpu() if look_for_gpu else None,
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this code runs from; + after it: with local changes."""
    root = Path(simserve.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    return f"{commit}+" if commit and _git(root, "status", "--porcelain") else commit


def _git(root: Path, *arguments: str) -> str | None:
    try:
        outcome = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return outcome.stdout.strip() or None if outcome.returncode == 0 else None


def _gpu() -> str | None:
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return ", ".join(
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    )
