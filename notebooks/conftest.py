"""Notebooks run in kernels (nbmake) where a warning is an error, and leave no files behind."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

STARTUP = """
import warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="ipykernel")  # what the kernel itself says as it ends
"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Give the kernel a profile of its own, and look what the notebook left."""
    before = set(item.path.parent.iterdir())
    with TemporaryDirectory() as profiles, pytest.MonkeyPatch.context() as patch:
        startup = Path(profiles, "profile_default", "startup")
        startup.mkdir(parents=True)
        (startup / "warnings.py").write_text(STARTUP)
        patch.setenv("IPYTHONDIR", profiles)
        yield
    left = set(item.path.parent.iterdir()) - before
    assert not left, f"the notebook left files: {left}"
