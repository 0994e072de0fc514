"""Makes points on request: `python -m simserve.sweep.worker`, told what to run on standard input.

Each line of input is a folder, a task and where to run it, as JSON; it is answered by a line of
output: null if the run directory is in the folder, else what went wrong. Each task has a process of
its own, forked from this one, which has loaded the simulator and nothing else. When standard input
is closed, if only by the death of who held it, everything ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from simserve import api
from simserve.config.loader import load_config
from simserve.errors import SimserveError
from simserve.metrics import rundir, tables  # noqa: F401  (loaded here, not in every task)
from simserve.sweep.task import Failure, Task

__all__ = ["OVERRIDES", "main"]

OVERRIDES = "overrides.json"
"""The file of a point's run directory that says what the point changed."""
_MAX_MESSAGE = 10_000


def main() -> None:
    """Answer requests until there are no more."""
    import pyarrow.parquet  # noqa: F401  (as above)

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's own classes print is no answer
    held = os.dup(0)  # multiprocessing closes standard input
    context = get_context("fork")
    for line in sys.stdin:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(line, sender, held))
        process.start()
        process.join()
        failure = receiver.recv() if receiver.poll() else None
        answer = {"exit_code": process.exitcode, "failure": failure}
        print(json.dumps(answer), file=answers, flush=True)
        receiver.close()
        sender.close()


def _run(line: str, sender: Connection, held: int) -> None:
    threading.Thread(target=_end_with, args=(held,), daemon=True).start()
    request = json.loads(line)
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    try:
        _make(Task(**request["task"]), Path(request["folder"]))
    except SimserveError as error:
        sender.send(Failure(type(error).__name__, str(error)[:_MAX_MESSAGE]))


def _end_with(held: int) -> None:
    os.read(held, 1)  # returns when the other end is closed
    os._exit(1)


def _make(task: Task, folder: Path) -> None:
    result = api.run(load_config(task.config, base_dir=Path(task.base_dir)))
    result.summary_dict |= {key: _scalar(value) for key, value in task.values.items()}
    directory = result.save(folder / task.name)
    overrides = json.dumps(task.settings, indent=2, ensure_ascii=False)
    (directory / OVERRIDES).write_text(overrides + "\n", encoding="utf-8", newline="\n")


def _scalar(value: object) -> str | int | float | bool | None:
    """A value as it can stand in a flat summary: lists and mappings become JSON text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    main()
