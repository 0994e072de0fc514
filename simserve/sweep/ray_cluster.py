"""Runs points on a Ray cluster. A node does with a point what `process` does on this machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import simserve
from simserve.errors import ConfigError
from simserve.sweep.inputs import find_inputs
from simserve.sweep.process import PointProcesses
from simserve.sweep.task import Failure, Task

__all__ = ["RayBackend"]

CONNECT_S = 10.0
"""A head node that does not answer for so long is not there."""
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""A frame of HTTP/2 without settings: length, type, flags, stream."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
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
                ray.init(
                    address=address or "local",  # with None, Ray would look for one that runs
                    log_to_driver=False,
                    logging_level="ERROR",
                    **local,
                )
        except (ConnectionError, ImportError, ValueError, RuntimeError) as error:
            raise ConfigError(f"no Ray cluster at {address}: {error}") from None
        self._jobs = jobs
        self._waiting: dict[Any, Task] = {}
        self._files: dict[Path, Any] = {}

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
            for task in islice(left, max(0, self._num_wanted() - len(self._waiting))):
                inputs = find_inputs(task)
                contents = [self._sent(path) for path in inputs.files.values()]
                place = (tuple(inputs.files), inputs.cwd, inputs.base_dir)
                reference = remote.remote(fingerprint(), task, timeout_s, place, *contents)
                self._waiting[reference] = task
                started(task)
            if not self._waiting:
                return
            (reference, *_), _ = self._ray.wait(list(self._waiting))
            task = self._waiting.pop(reference)
            yield task, self._collect(reference, folder / task.name)

    def _num_wanted(self) -> int:
        """Points to have in Ray's hands. More than there are CPUs now: a node that is added has
        work at once, and a cluster that can grow sees that it should."""
        return self._jobs or 2 * max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def _sent(self, path: Path) -> Any:
        """A file in Ray's object store, from where each node has it once."""
        if path not in self._files:
            self._files[path] = self._ray.put(path.read_bytes())
        return self._files[path]

    def close(self) -> None:
        """End what runs, and leave the cluster."""
        for reference in self._waiting:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()

    def _collect(self, reference: Any, directory: Path) -> Failure | None:
        try:
            outcome: Files | Failure = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # of `_run_here`, not of the point
            cause = f"{type(error.cause).__name__}: {error.cause}".partition("\n")[0]
            hint = "is the same simserve installed there?"
            return Failure("Died", f"a node cannot run points: {cause}; {hint}\n{_plain(error)}")
        except self._ray.exceptions.RayError as error:
            return Failure("Died", f"Ray: {_plain(error)}")
        if isinstance(outcome, Failure):
            return outcome
        directory.mkdir()
        for name, content in outcome.items():
            (directory / name).write_bytes(content)
        return None


def _plain(error: Exception) -> str:
    """What an error says, without colours."""
    return _COLOUR.sub("", str(error))


def _check_reachable(address: str) -> None:
    """Where nobody listens, or something else does, Ray would try for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return  # a word of Ray's own, such as auto
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "1" and not _speaks_grpc(connection):
                raise ConfigError(f"no Ray cluster at {address}: something else listens there")
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray cluster at {address}: {error}") from None


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether a greeting of HTTP/2, which gRPC is made of, is answered by one (RFC 9113, 3.4)."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
    header = b""
    while len(header) < len(SETTINGS) and (more := connection.recv(len(SETTINGS) - len(header))):
        header += more
    return header[3:4] == SETTINGS[3:4]


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


@cache
def fingerprint() -> str:
    """Of the simulator's code: where it is another one, results may be others."""
    root = Path(simserve.__file__).parent
    digest = sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return f"{simserve.__version__} ({digest.hexdigest()[:8]})"


def _run_here(
    code: str,
    task: Task,
    timeout_s: float | None,
    place: tuple[Sequence[str], str, str],
    *contents: bytes,
) -> Files | Failure:
    """On a node: run a point in a process of its own, among copies of what it reads, and bring its
    files."""
    if code != fingerprint():
        return Failure(
            "ConfigError",
            f"the node {socket.gethostname()} has simserve {fingerprint()}, the sweep was started "
            f"with {code}: install the same on all nodes",
        )
    names, cwd, base_dir = place
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "inputs")
        for folder in (cwd, base_dir):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for at, content in zip(names, contents, strict=True):
            (root / at).parent.mkdir(parents=True, exist_ok=True)
            (root / at).write_bytes(content)
        moved = replace(task, base_dir=os.path.normpath(root / base_dir))
        failure = _processes().run(moved, Path(name), timeout_s, root / cwd)
        if failure is not None:
            return failure._replace(message=_as_given(failure.message, moved, task))
        return {file.name: file.read_bytes() for file in sorted(Path(name, task.name).iterdir())}


def _as_given(message: str, moved: Task, task: Task) -> str:
    """A message with the names that files have where the sweep was started."""
    before = "" if task.base_dir == "." else f"{task.base_dir}/"
    return message.replace(f"{moved.base_dir}/", before)
