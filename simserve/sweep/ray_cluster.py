"""Runs points on a Ray cluster. A node does with a point what `process` does on this machine."""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from simserve.errors import ConfigError
from simserve.sweep.process import PointProcesses
from simserve.sweep.task import Failure, Task

__all__ = ["RayBackend"]

CONNECT_S = 10.0
"""A head node that does not answer for so long is not there."""
Files = dict[str, bytes]
"""A run directory by file name: nodes need not share a file system with this one."""


class RayBackend:
    """So many points at a time on the nodes of a cluster.

    Args:
        jobs: None: as many as the cluster has CPUs.
        address: of the cluster, as `ray.init` takes it. None: a Ray of one's own on this machine.

    Raises:
        ConfigError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, jobs: int | None, address: str | None) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "--backend ray needs Ray: pip install 'simserve[ray]', on all nodes"
            ) from None
        self._ray = ray
        if address is not None:
            _check_reachable(address)
        local = {"num_cpus": jobs, "include_dashboard": False} if address is None else {}
        try:
            with _sigterm_as_before():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no Ray cluster at {address}: {error}") from None
        self._jobs = jobs or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._waiting: dict[Any, Task] = {}

    def run(
        self,
        tasks: Iterable[Task],
        folder: Path,
        timeout_s: float | None,
        started: Callable[[Task], object],
    ) -> Iterator[tuple[Task, Failure | None]]:
        """Run tasks, write their run directories into `folder`, and yield each that has ended.

        Points of a node that is lost run again on another one.
        """
        remote = self._ray.remote(num_cpus=1)(_run_here)
        left = iter(tasks)
        while True:
            for task in islice(left, self._jobs - len(self._waiting)):
                self._waiting[remote.remote(task, timeout_s)] = task
                started(task)
            if not self._waiting:
                return
            (reference, *_), _ = self._ray.wait(list(self._waiting))
            task = self._waiting.pop(reference)
            yield task, self._collect(reference, folder / task.name)

    def close(self) -> None:
        """End what runs, and leave the cluster."""
        for reference in self._waiting:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()

    def _collect(self, reference: Any, directory: Path) -> Failure | None:
        try:
            outcome: Files | Failure = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return Failure("Died", f"Ray: {error}")
        if isinstance(outcome, Failure):
            return outcome
        directory.mkdir()
        for name, content in outcome.items():
            (directory / name).write_bytes(content)
        return None


def _check_reachable(address: str) -> None:
    """Where nobody listens, Ray itself would try for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return  # a word of Ray's own, such as auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster at {address}: {error}") from None


@contextmanager
def _sigterm_as_before() -> Iterator[None]:
    """Ray's own handler reports a crash, and gives nobody time to leave things in order."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


@cache
def _processes() -> PointProcesses:
    """Of the node's process that serves Ray."""
    return PointProcesses()


def _run_here(task: Task, timeout_s: float | None) -> Files | Failure:
    """On a node: run a point in a process of its own, and bring its files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failure = _processes().run(task, folder, timeout_s)
        if failure is not None:
            return failure
        return {file.name: file.read_bytes() for file in sorted((folder / task.name).iterdir())}
