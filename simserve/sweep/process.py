"""Runs points on this machine, each in a process of its own that a time limit can end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from select import select
from threading import Lock

from simserve.sweep.task import Failure, Task

__all__ = ["PointProcesses", "ProcessBackend"]

_LOG_TAIL = 2000


class PointProcesses:
    """Runs points in processes, and can end all of them. Safe to use from several threads."""

    def __init__(self) -> None:
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._lock = Lock()
        self._closed = False

    def run(
        self, task: Task, folder: Path, timeout_s: float | None, cwd: Path | None = None
    ) -> Failure | None:
        """Run a point, and wait for its end.

        Args:
            task: what to run.
            folder: there, its run directory appears; what else is left in it is of no use.
            timeout_s: after so many seconds its process is killed, and all that it started.
            cwd: its current folder. None: that of this process.
        """
        with self._lock:
            if self._closed:
                return Failure("Interrupted", "the sweep was interrupted")
            worker = self._idle.pop() if self._idle else _Worker()
            self._workers.add(worker)
        failure = worker.run(task, folder, timeout_s, cwd)
        with self._lock:
            if worker.is_alive and not self._closed:
                self._idle.append(worker)
            else:
                self._workers.discard(worker)
                worker.release()
        return failure

    def close(self) -> None:
        """End everything that runs; nothing is started any more."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()  # those that are not idle are released by their threads
            for worker in self._idle:
                worker.release()


class ProcessBackend:
    """So many points at a time on this machine."""

    def __init__(self, jobs: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=jobs)
        self._processes = PointProcesses()

    def run(
        self,
        tasks: Iterable[Task],
        folder: Path,
        timeout_s: float | None,
        started: Callable[[Task], object],
    ) -> Iterator[tuple[Task, Failure | None]]:
        """Run tasks in `folder`, and yield each when it has ended."""

        def run_one(task: Task) -> Failure | None:
            started(task)
            return self._processes.run(task, folder, timeout_s)

        waiting = {self._pool.submit(run_one, task): task for task in tasks}
        for future in as_completed(waiting):
            yield waiting[future], future.result()

    def close(self) -> None:
        """End what runs, and wait for that."""
        self._processes.close()
        self._pool.shutdown(cancel_futures=True)


class _Worker:
    """A `simserve.sweep.worker` process, one task at a time. It ends when this one does."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (till `kill`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "simserve.sweep.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process to handle
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )

    @property
    def is_alive(self) -> bool:
        """Whether it can run another task."""
        return self._process.poll() is None

    def run(
        self, task: Task, folder: Path, timeout_s: float | None, cwd: Path | None
    ) -> Failure | None:
        """Run a task; afterwards the worker is dead if it took too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        where = None if cwd is None else str(cwd)
        request = json.dumps({"folder": str(folder), "task": asdict(task), "cwd": where})
        self._log.seek(0)
        self._log.truncate()
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            if not select([self._process.stdout], [], [], timeout_s)[0]:
                self.kill()
                return Failure("Timeout", f"not done after {timeout_s:g} s (sweep.timeout_s)")
            answer = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):  # dead, or killed by another thread
            answer = ""
        if not answer:
            return self._death(self._process.wait())
        outcome = json.loads(answer)
        if outcome["failure"] is not None:
            return Failure(*outcome["failure"])
        return self._death(outcome["exit_code"]) if outcome["exit_code"] else None

    def kill(self) -> None:
        """End it and its children; harmless if it has ended."""
        if self.is_alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def release(self) -> None:
        """Close what belongs to it, after its end."""
        self.kill()
        self._log.close()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # it died before it had read its task
                if pipe is not None:
                    pipe.close()

    def _death(self, exit_code: int) -> Failure:
        """How a process ended, first in one line, then with what it said last."""
        self._log.seek(0)
        said = self._log.read()[-_LOG_TAIL:].strip()
        if exit_code < 0:
            hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
            how = f"the process was ended by {signal.Signals(-exit_code).name}{hint}"
        else:
            last = said.rpartition("\n")[2]
            how = f"the process ended with exit status {exit_code}: {last or 'it said nothing'}"
        return Failure("Died", f"{how}\n{said}".strip())
