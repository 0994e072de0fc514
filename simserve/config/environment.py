"""What may differ between runs of one configuration: versions, platform, commit, GPU."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
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


def collect() -> dict[str, Any]:
    """Versions, platform, commit and GPUs by name; None: there is none."""
    return {
        "simserve": simserve.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": ", ".join(_gpus()) or None,
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


@cache
def _version(package: str) -> str | None:
    """As `importlib.metadata.version`, which would parse each package's whole readme for it."""
    try:
        found = Distribution.from_name(package)
    except PackageNotFoundError:
        return None
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    line = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return line[1] if line else None


def _commit() -> str | None:
    """The commit of the checkout that this code runs from (+ after it: with local changes), or that
    pip installed it from; None: it came as a package without one."""
    root = Path(simserve.__file__).parents[1]
    if not (root / ".git").exists():
        return _installed_commit()
    commit = _git(root, "rev-parse", "HEAD")
    return f"{commit}+" if commit and _git(root, "status", "--porcelain") else commit


def _installed_commit() -> str | None:
    """What pip has noted of an installation from a repository (PEP 610)."""
    try:
        noted = distribution("simserve").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    commit = json.loads(noted or "{}").get("vcs_info", {}).get("commit_id")
    return str(commit) if commit else None


def _git(root: Path, *arguments: str) -> str | None:
    return _output("git", "-C", str(root), *arguments)


def _gpus() -> list[str]:
    """Name and driver version of each NVIDIA GPU, as the driver's own tool prints them."""
    query = "--query-gpu=name,driver_version"
    return (_output("nvidia-smi", query, "--format=csv,noheader") or "").splitlines()


def _output(*command: str) -> str | None:
    """What a command prints; None if it is not there, fails, or prints nothing."""
    try:
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return outcome.stdout.strip() or None if outcome.returncode == 0 else None
