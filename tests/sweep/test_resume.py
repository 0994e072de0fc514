"""A sweep that is killed loses nothing that was done, and resumed comes to the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simserve.errors import RunDirectoryError
from simserve.sweep.runner import run_sweep

Start = Callable[..., subprocess.Popen[str]]
PATIENCE_S = 60


@pytest.fixture
def begun(grid: Path, tmp_path: Path, start: Start) -> Iterator[subprocess.Popen[str]]:
    """A sweep into `out`, of which one point is done and others are not."""
    process = start("sweep", grid, "--out", tmp_path / "out", "--jobs", "1")
    try:
        wait_until(lambda: any((tmp_path / "out").glob("*=*")) or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def children(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of its workers, and of their points."""
    found, parents = [], [process.pid]
    while parents:
        tasks = Path(f"/proc/{parents.pop()}/task").glob("*/children")
        ids = [int(word) for task in tasks for word in task.read_text().split()]
        found += ids
        parents += ids
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return False
    return not state.startswith("Z")


def test_killed_and_resumed(
    grid: Path,
    finished: Path,
    begun: subprocess.Popen[str],
    tmp_path: Path,
    same_bytes: Callable[[Path, Path], None],
) -> None:
    out = tmp_path / "out"
    workers = children(begun)
    assert workers
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    done = {path.name: path.stat().st_ino for path in out.glob("*=*")}
    assert 1 <= len(done) < 4
    assert not (out / "summary.csv").exists()
    wait_until(lambda: not any(is_running(pid) for pid in workers))

    run_sweep(grid, out=out, resume=True)
    same_bytes(finished, out)
    assert {name: (out / name).stat().st_ino for name in done} == done  # not run again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_in_good_order(
    number: signal.Signals,
    grid: Path,
    begun: subprocess.Popen[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with pytest.raises(RunDirectoryError, match="another sweep is writing there"):
        run_sweep(grid, out=out, resume=True)
    assert (out / ".partial").is_dir()  # the other one goes on
    workers = children(begun)

    def is_ended() -> bool:
        begun.send_signal(number)  # whoever is impatient does not keep it from cleaning up
        return begun.poll() is not None

    wait_until(is_ended)
    _, errors = begun.communicate()
    assert begun.returncode == 130
    assert not any(is_running(pid) for pid in workers)
    num_done = len(list(out.glob("*=*")))
    assert f"interrupted: {num_done} of 4 points are done; --resume --out {out}" in errors
    assert "Traceback" not in errors
    assert not (out / ".partial").exists()


@pytest.mark.parametrize("is_new", [True, False])
def test_ended_while_its_directory_is_made(
    is_new: bool, grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    if not is_new:
        out.mkdir()
    monkeypatch.setattr("simserve.sweep.directory.dump_plain", stop)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(grid, out=out)
    assert list(tmp_path.rglob("*")) == ([] if is_new else [out])


def test_what_is_finished_is_not_run_again(grid: Path, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.glob("*=*")}
    assert run_sweep(grid, out=finished, resume=True).num_failed == 0
    assert {path: path.stat().st_mtime_ns for path in finished.glob("*=*")} == before
