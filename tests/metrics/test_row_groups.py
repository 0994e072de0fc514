"""Rows that leave for the files while the run goes on are those that a run kept whole has."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simserve import api
from simserve.config import build
from simserve.config.loader import load_config
from simserve.errors import RunDirectoryError
from simserve.metrics.options import MetricOptions, RunInfo
from simserve.metrics.recorder import RequestRows, RunRecorder, StepRows
from simserve.metrics.rundir import read_run
from simserve.metrics.summary import summarise
from simserve.metrics.table_file import TableFile, TableFiles
from simserve.metrics.tables import requests_table, steps_table

CONFIG: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h200",
    "workload": {
        "synthetic": {
            "num_requests": 300,
            "arrival": {"kind": "poisson", "rate": 20},
            "prompt_len": {"kind": "uniform", "min": 8, "max": 900},
            "output_len": {"kind": "uniform", "min": 2, "max": 60},
        }
    },
    "kv_cache": {"num_gpu_blocks": 300},
    "metrics": {"save_detailed": True, "plot": False},
}
FILES = ("summary.json", "requests.parquet", "steps.parquet", "config.yaml")


class Kept:
    """A sink that keeps tables."""

    def __init__(self) -> None:
        self.requests: list[pa.Table] = []
        self.steps: list[pa.Table] = []

    def add_requests(self, rows: RequestRows) -> None:
        self.requests.append(requests_table(rows, save_detailed=True))

    def add_steps(self, rows: StepRows) -> None:
        self.steps.append(steps_table(rows))


# For each run of steps: how many steps, arrivals before it, which of the live requests end with it,
# are preempted or aborted in it, and whether one more is rejected.
RUNS = st.lists(
    st.tuples(
        st.integers(1, 5), st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.booleans()
    ),
    max_size=15,
)


def tell(told: Any, runs: Sequence[tuple[int, int, int, int, bool]]) -> Any:
    live: list[str] = []
    for number, (count, num_new, ending, aborted, rejects) in enumerate(runs):
        new = [f"{number}.{k}" for k in range(num_new)]
        for name in new:
            told.arrive(name, at=told.now, class_="xy"[number % 2], session=name[0])
        live += new
        if rejects:
            told.reject(f"no{number}", told.now)
        over = live[ending : ending + 2]
        told.step(
            [0.25] * count,
            dict.fromkeys(live, 1),
            finished=over,
            waiting=number,
            shared=number << 31,
            evicted=[number] * count,
            parts={"gpu_s": [0.125] * count} | ({"late_s": 0.5} if number > 9 else {}),
            stop="own" if number > 7 else "empty",
        )
        live = [name for name in live if name not in over]
        if aborted < len(live):
            told.abort(live.pop(aborted))
    return told


@given(runs=RUNS, row_group=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_handed_out_rows_are_the_whole_tables(
    story: Callable[..., Any], runs: list[Any], row_group: int
) -> None:
    options: dict[str, Any] = {
        "window_s": (0.5, None),
        "goodput": {"ttft": 300.0},
        "save_detailed": True,
    }
    whole = tell(story(), runs).result(**options)
    kept = Kept()
    data = tell(story(sink=kept, row_group=row_group), runs).end()
    assert summarise(data, RunInfo(), MetricOptions(**options)) == whole.summary_dict
    for pieces, table in ((kept.requests, whole.requests_table), (kept.steps, whole.steps_table)):
        assert all(len(piece) == row_group for piece in pieces[:-1])
        assert (
            pa.concat_tables(pieces, promote_options="default")
            .select(table.column_names)
            .equals(table)
        )


def test_a_part_that_comes_late_is_null_before(story: Callable[..., Any], tmp_path: Path) -> None:
    files = TableFiles(tmp_path, save_detailed=False)
    told = story(sink=files, row_group=2)
    told.arrive("a")
    for k in range(9):
        parts = {"gpu_s": 0.1} | ({"late_s": 0.2} if k in (4, 5) else {})
        told.step(0.5, {"a": 1}, parts=parts)
    told.end()
    files.close()
    table = pa.parquet.read_table(tmp_path / "steps.parquet")
    assert table["parts.late_s"].to_pylist() == [None] * 4 + [0.2] * 2 + [None] * 3
    assert table["step_id"].to_pylist() == list(range(9))
    names = table.column_names
    assert names.index("parts.late_s") == names.index("parts.gpu_s") + 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["requests.parquet", "steps.parquet"]


def test_files_of_small_groups_read_back_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_config(CONFIG)
    whole = api.run_to_directory(loaded, out=tmp_path / "whole").directory
    assert api.run(loaded).save(tmp_path / "saved")
    for file in FILES:
        assert (whole / file).read_bytes() == (tmp_path / "saved" / file).read_bytes(), file
    monkeypatch.setattr(build, "RunRecorder", partial(RunRecorder, row_group=32))
    parts = api.run_to_directory(loaded, out=tmp_path / "parts").directory
    one, other = read_run(whole), read_run(parts)
    assert one.requests_table.equals(other.requests_table)
    assert one.steps_table.equals(other.steps_table)
    assert one.summary_dict == other.summary_dict


def test_ctrl_c_after_rows_have_left_finishes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "RunRecorder", partial(RunRecorder, row_group=32))

    def press(now_s: float, num_done: int, num_all: int | None) -> None:
        if num_done == 150:
            os.kill(os.getpid(), signal.SIGINT)

    written = api.run_to_directory(load_config(CONFIG), out=tmp_path / "run", progress=press)
    assert written.summary["status"] == "interrupted"
    result = read_run(tmp_path / "run")
    outcomes = result.requests_table["status"].to_pylist()
    assert outcomes.count("completed") == result.summary_dict["completed"] >= 150
    assert outcomes.count("running") == result.summary_dict["running"] > 0
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_a_disk_that_fills_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "RunRecorder", partial(RunRecorder, row_group=32))

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(TableFile, "_open", fail)
    with pytest.raises(RunDirectoryError, match=r"steps\.parquet cannot be written: disk full"):
        api.run_to_directory(load_config(CONFIG), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
