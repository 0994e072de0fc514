"""Notebooks run (nbmake) in a kernel where a warning is an error, and leave no files behind.

A kernel runs one notebook after another, so that pandas and matplotlib are loaded once. Each begins
without names, in its own folder; behind one that fails, the next gets a new kernel.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

STARTUP = """
import warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="ipykernel")  # what the kernel itself says as it ends
"""
BEGIN = "get_ipython().reset()\n__import__('os').chdir({folder!r})"


class Kernel:
    """The process, from the first notebook on."""

    manager: AsyncKernelManager | None = None
    profiles: TemporaryDirectory[str]

    @classmethod
    def get(cls) -> AsyncKernelManager:
        """The manager; `Client` starts the process."""
        if cls.manager is None:
            cls.profiles = TemporaryDirectory()
            startup = Path(cls.profiles.name, "profile_default", "startup")
            startup.mkdir(parents=True)
            (startup / "warnings.py").write_text(STARTUP)
            cls.manager = AsyncKernelManager(kernel_name="python3")
        return cls.manager

    @classmethod
    def end(cls) -> None:
        """End the process, if there is one."""
        if cls.manager is not None:
            run_sync(cls.manager.shutdown_kernel)(now=True)
            cls.manager = None
            cls.profiles.cleanup()


class Client(NotebookClient):
    """Runs a notebook in the kernel that there is."""

    def __init__(self, nb: Any, **options: Any) -> None:
        super().__init__(nb, km=Kernel.get(), **options)
        self._folder = ""

    async def _execute(self, cwd: Path) -> Any:
        self._folder = str(cwd)
        try:
            return await self.async_execute(env=os.environ | {"IPYTHONDIR": Kernel.profiles.name})
        finally:
            if self.kc is not None:
                self.kc.stop_channels()

    execute = run_sync(_execute)

    async def async_start_new_kernel_client(self) -> Any:
        """Connect, and leave nothing of the notebook before."""
        client = await super().async_start_new_kernel_client()
        begun = await client.execute_interactive(BEGIN.format(folder=self._folder))
        assert begun["content"]["status"] == "ok", begun["content"]
        return client


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Hand nbmake the kernel, and look what the notebook left."""
    before = set(item.path.parent.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nbmake.nb_run.NotebookClient", Client)
        try:
            yield
        except BaseException:
            Kernel.end()
            raise
    left = set(item.path.parent.iterdir()) - before
    assert not left, f"the notebook left files: {left}"


def pytest_sessionfinish() -> None:
    """Leave no process behind."""
    Kernel.end()
