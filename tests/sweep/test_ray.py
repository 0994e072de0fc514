"""Ray, with nodes of its own on this machine, comes to the bytes that local processes do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from simserve.cli.main import app
from simserve.config.sweep_loader import load_points, load_sweep
from simserve.errors import ConfigError
from simserve.sweep import ray_cluster
from simserve.sweep.inputs import find_inputs
from simserve.sweep.ray_cluster import SETTINGS, RayBackend, _check_reachable
from simserve.sweep.runner import run_sweep
from simserve.sweep.task import Failure, Task

Start = Callable[..., subprocess.Popen[str]]
PATIENCE_S = 120

# What a sweep reads: its own file, in `configs`, a trace beside that folder, and a module of the
# user, in the current folder, that imports another. Each point waits until two nodes have points.
SWEEP = """
model: llama-3.1-8b
workload: {trace: {path: ../traces/few.jsonl}}
scheduler: {max_num_seqs: 4}
kv_cache: {num_gpu_blocks: 500}
executor: {cost: {kind: 'own_cost:Cost', options: {nodes: NODES}}}
sweep:
  type: scenarios
  scenarios:
    roomy: {}
    too-small: {kv_cache.num_gpu_blocks: 2, scheduler.on_impossible: as_engine}
  parameters: {scheduler.max_num_batched_tokens: [64, 512]}
"""
COST = """
import os, time
from pathlib import Path
from own_number import BASE_S
from simserve.cost.formula import FormulaCost

class Cost(FormulaCost):
    def __init__(self, model, gpu, nodes):
        super().__init__(base_s=BASE_S)
        if "RAY_RAYLET_PID" in os.environ:
            Path(nodes, os.environ["RAY_RAYLET_PID"]).touch()
            while len(os.listdir(nodes)) < 2:
                time.sleep(0.02)
"""
TRACE = """\
{"request_id": "r0", "arrival_s": 0.0, "prompt": [["a", 100]], "output_len": 8}
{"request_id": "r1", "arrival_s": 0.01, "prompt": [["b", 200]], "output_len": 8}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a user, with a sweep."""
    files = {
        "configs/some-fail.yaml": SWEEP.replace("NODES", str(tmp_path / "nodes")),
        "traces/few.jsonl": TRACE,
        "own_cost.py": COST,
        "own_number.py": "BASE_S = 0.01",
    }
    for name, text in files.items():
        path = tmp_path / "home" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "nodes").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@contextmanager
def cluster() -> Iterator[subprocess.Popen[str]]:
    """Of one node, and with each line that it is told, of one more."""
    script = Path(__file__).with_name("cluster.py")
    path = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": path},
    )
    with process:
        yield process


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: '.[ray]'")
def test_nodes_come_to_the_same_bytes(
    home: Path, start: Start, same_bytes: Callable[[Path, Path], None]
) -> None:
    """Points and failures. The second node joins while the sweep runs, and has points at once."""
    path, here, there = Path("configs/some-fail.yaml"), home / "here", home / "there"
    nodes = home.parent / "nodes"
    assert run_sweep(path, out=here).num_failed == 2
    with cluster() as nodes_of:
        assert nodes_of.stdin is not None
        assert nodes_of.stdout is not None
        address = nodes_of.stdout.readline().strip()
        process = start("sweep", path, "--out", there, "--backend", "ray", "--ray-address", address)
        end_s = time.monotonic() + PATIENCE_S
        while not any(nodes.iterdir()) and process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.02)
        print(file=nodes_of.stdin, flush=True)
        _, errors = process.communicate(timeout=PATIENCE_S)
        nodes_of.stdin.close()
    assert process.returncode == 1, errors
    assert "2 of 4 points failed" in errors
    assert len(list(nodes.iterdir())) == 2
    same_bytes(here, there)
    assert len(list(there.glob("*.failure.json"))) == 2
    with pytest.raises(ConfigError, match=f"no Ray cluster at {address}"):
        run_sweep(path, out=home / "nothing", backend="ray", ray_address=address)
    assert not (home / "nothing").exists()  # to try again is no --resume


def on_a_node(task: Task, files: dict[str, bytes], cwd: str, base_dir: str) -> Any:
    """What a node does with a point."""
    place = (tuple(files), cwd, base_dir)
    return ray_cluster._run_here(
        ray_cluster.fingerprint(), task, PATIENCE_S, place, *files.values()
    )


def test_a_node_needs_nothing_but_what_it_is_sent(home: Path) -> None:
    (point, *_) = load_points(load_sweep("configs/some-fail.yaml"))
    task = Task.of(point)
    inputs = find_inputs(task)
    assert list(inputs.files) == ["own_cost.py", "own_number.py", "traces/few.jsonl"]
    files = {name: path.read_bytes() for name, path in inputs.files.items()}
    (home / "here").mkdir()
    os.chdir(home / "here")
    for name in ("configs", "traces", "own_cost.py", "own_number.py"):
        (shutil.rmtree if (home / name).is_dir() else os.unlink)(home / name)
    try:
        outcome = on_a_node(task, files, inputs.cwd, inputs.base_dir)
        assert b'"completed"' in outcome["summary.json"]
        files["traces/few.jsonl"] += b"{}\n"
        outcome = on_a_node(task, files, inputs.cwd, inputs.base_dir)
        assert outcome.error == "TraceError"
        assert outcome.message.startswith("configs/../traces/few.jsonl:3: ")
    finally:
        ray_cluster._processes().close()
        ray_cluster._processes.cache_clear()


def test_a_package_is_sent_whole_and_what_is_installed_is_not(home: Path) -> None:
    (home / "mine" / "deep").mkdir(parents=True)
    names = ["mine/__init__.py", "mine/deep/__init__.py", "mine/deep/cost.py", "table.csv"]
    for name in names:
        (home / name).touch()
    config = {
        "a": "mine.deep.cost:Cost",
        "b": "json:loads",
        "c": ["simserve.api:run", "/etc/hosts", {"d": "table.csv"}],
    }
    task = Task(name="", settings={}, values={}, config=config, base_dir="configs")
    assert sorted(find_inputs(task).files) == names


def test_a_node_with_other_code_is_an_error(home: Path) -> None:
    (point, *_) = load_points(load_sweep("configs/some-fail.yaml"))
    outcome = ray_cluster._run_here("0.0.1 (abc)", Task.of(point), None, ((), "", ""))
    assert isinstance(outcome, Failure)
    assert "the sweep was started with 0.0.1 (abc): install the same" in outcome.message


def test_without_an_address_it_is_a_ray_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that runs already, or that RAY_ADDRESS names."""
    asked: dict[str, Any] = {}
    fake = SimpleNamespace(init=asked.update, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", fake)
    RayBackend(2, None).close()
    assert (asked["address"], asked["num_cpus"]) == ("local", 2)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_one_sentence_says_what_to_install(grid: Path, tmp_path: Path) -> None:
    arguments = ["sweep", str(grid), "--out", str(tmp_path / "out"), "--backend", "ray"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "pip install 'simserve[ray]'" in result.output


@pytest.mark.parametrize("form", ["{}:{}", "ray://{}:{}"])
def test_where_no_ray_listens_is_said_soon(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        address = form.format(host, port)
        answers(server, SETTINGS)
        _check_reachable(address)
        answers(server, b"HTTP/1.1 400 Bad Request\r\n")
        with pytest.raises(ConfigError, match=f"at .*{port}: something else listens there"):
            _check_reachable(address)
        with pytest.raises(ConfigError, match=f"no Ray cluster at .*{port}: timed out"):
            _check_reachable(address)
    with pytest.raises(ConfigError, match=f"no Ray cluster at .*{port}"):
        _check_reachable(address)
    _check_reachable("auto")


def answers(server: socket.socket, data: bytes) -> None:
    """Let it say this to who connects next."""

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(data)

    threading.Thread(target=answer, daemon=True).start()


def test_an_address_goes_with_ray(grid: Path) -> None:
    result = CliRunner().invoke(app, ["sweep", str(grid), "--ray-address", "auto"])
    assert result.exit_code == 2
    assert "--backend ray" in result.output
