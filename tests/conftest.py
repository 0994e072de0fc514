"""Fixtures and hooks for every test.

A test that needs torch or triton says `torch = pytest.importorskip("torch")`. That skips where they
are not installed, unless SIMSERVE_REQUIRE_TORCH=1: then the session does not even start without
them. A test marked `gpu` runs where torch sees a CUDA GPU.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, however slow the machine.
settings.register_profile("simserve", deadline=None, derandomize=True)
settings.load_profile("simserve")

# What a shell starts in the background ignores Ctrl-C, and so does all that is started from there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start without what SIMSERVE_REQUIRE_TORCH=1 promises."""
    if os.environ.get("SIMSERVE_REQUIRE_TORCH") != "1":
        return
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        raise pytest.UsageError(
            f"SIMSERVE_REQUIRE_TORCH=1, but {' and '.join(missing)} cannot be imported; "
            "install '.[gpu]' or unset the variable"
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector pass over what lives as long as the session."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") is None:
        return
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout that these tests stand in."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The folder of recorded traces that SIMSERVE_TRACES names; skips where it names none."""
    name = os.environ.get("SIMSERVE_TRACES")
    if not name:
        pytest.skip("SIMSERVE_TRACES names no folder of recorded traces")
    path = Path(name)
    if not path.is_dir():
        pytest.fail(f"SIMSERVE_TRACES is {name}, which is not a folder")
    return path
