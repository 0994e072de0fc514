"""Public traces: fetched from a server on this machine, found by name, never used unchecked."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from simserve.errors import TraceError, UnknownNameError
from simserve.workload.fetch import fetch_trace
from simserve.workload.public import (
    PublicTrace,
    cache_folder,
    find_trace,
    public_names,
    public_trace,
)

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"2023-11-16 18:00:00.0,9,9\n" * 40_000
MIDDLE = len(CONTENT) // 2


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT in the ways in which servers do; the path says which."""

    server: Server

    def do_GET(self) -> None:
        way = urlsplit(self.path).path.strip("/").partition(".")[0]
        wanted = self.headers["Range"]
        self.server.ranges.append(wanted)
        start = 0
        if wanted is not None and way != "without_ranges":
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        if way == "missing":
            self.send_error(404)
        elif way == "moved":
            self.answer(302, b"", {"Location": "/whole.csv"})
        elif way == "stalls":
            self.answer(200, b"half", {"Content-Length": "8"})
            self.server.is_done.wait()
        elif start >= len(CONTENT):
            self.answer(416, b"", {})
        else:
            body = CONTENT[start:]
            headers = {"Content-Length": str(len(body))}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"
            sent = body[: len(body) // 2] if way == "breaks_off" else body
            self.answer(206 if start else 200, sent, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest shows what matters."""


class Server(ThreadingHTTPServer):
    """What was asked of it, by `Range`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.is_done = threading.Event()

    def trace(self, way: str) -> PublicTrace:
        return replace(
            public_trace("azure2023_conv"),
            url=f"http://127.0.0.1:{self.server_port}/{way}.csv",
            sha256=hashlib.sha256(CONTENT).hexdigest(),
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.is_done.set()
        server.shutdown()
        thread.join()


def part(folder: Path) -> Path:
    return folder / "azure2023_conv.csv.part"


def begun(folder: Path, content: bytes = CONTENT[:MIDDLE]) -> None:
    """A folder in which a download broke off."""
    folder.mkdir()
    part(folder).write_bytes(content)


# --- fetching


def test_a_whole_file(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    path = fetch_trace(
        server.trace("whole"),
        tmp_path / "new" / "cache",
        progress=lambda had, total: seen.append((had, total)),
    )
    assert path == tmp_path / "new" / "cache" / "azure2023_conv.csv"
    assert path.read_bytes() == CONTENT
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert server.ranges == [None]


def test_what_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "azure2023_conv.csv").write_bytes(CONTENT)
    assert fetch_trace(server.trace("whole"), tmp_path) is None
    assert server.ranges == []


def test_a_damaged_file_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "azure2023_conv.csv").write_bytes(CONTENT[:-1])
    path = fetch_trace(server.trace("whole"), tmp_path)
    assert path is not None
    assert path.read_bytes() == CONTENT


def test_a_download_goes_on_where_it_broke_off(server: Server, tmp_path: Path) -> None:
    broken = server.trace("breaks_off")
    with pytest.raises(TraceError, match=r"broke off after 5.*the same command goes on"):
        fetch_trace(broken, tmp_path)
    assert part(tmp_path).read_bytes() == CONTENT[:MIDDLE]
    path = fetch_trace(server.trace("whole"), tmp_path)
    assert path is not None
    assert path.read_bytes() == CONTENT
    assert not part(tmp_path).exists()
    assert server.ranges == [None, f"bytes={MIDDLE}-"]


def test_a_server_that_stalls_is_one_sentence(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simserve.workload.fetch.TIMEOUT_S", 0.05)
    with pytest.raises(TraceError, match=r"the connection broke \(.*timed out\); the same"):
        fetch_trace(server.trace("stalls"), tmp_path)
    assert part(tmp_path).read_bytes() == b"half"


def test_a_server_without_ranges_sends_all_again(server: Server, tmp_path: Path) -> None:
    begun(tmp_path / "cache", b"x" * MIDDLE)
    path = fetch_trace(server.trace("without_ranges"), tmp_path / "cache")
    assert path is not None
    assert path.read_bytes() == CONTENT


def test_a_complete_part_only_gets_its_name(server: Server, tmp_path: Path) -> None:
    begun(tmp_path / "cache", CONTENT)
    path = fetch_trace(server.trace("whole"), tmp_path / "cache")
    assert path is not None
    assert path.read_bytes() == CONTENT


def test_a_redirection_is_followed(server: Server, tmp_path: Path) -> None:
    begun(tmp_path / "cache")
    path = fetch_trace(server.trace("moved"), tmp_path / "cache")
    assert path is not None
    assert path.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={MIDDLE}-"] * 2


@pytest.mark.parametrize("before", [b"", b"other bytes", CONTENT + b"more"])
def test_another_file_is_deleted(server: Server, tmp_path: Path, before: bytes) -> None:
    trace = server.trace("whole")
    if not before:
        trace = replace(trace, sha256="0" * 64)
    begun(tmp_path / "cache", before)
    with pytest.raises(TraceError, match=r"what came has the SHA-256 .* it was deleted"):
        fetch_trace(trace, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_refusal_is_one_sentence(server: Server, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing\.csv: the server says 404 Not Found$"):
        fetch_trace(server.trace("missing"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_offline_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        trace = server.trace("whole")  # nobody will listen there any more
    begun(tmp_path / "cache")
    with pytest.raises(TraceError, match=r"cannot be reached \(.*refused\)") as caught:
        fetch_trace(trace, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert part(tmp_path / "cache").read_bytes() == CONTENT[:MIDDLE]


def test_a_folder_that_cannot_be_written_is_one_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match=r"azure2023_conv\.csv\.part: cannot be written: Not a"):
        fetch_trace(server.trace("whole"), tmp_path / "file" / "cache")


# --- finding


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The cache folder, and that of SIMSERVE_TRACES."""
    monkeypatch.setenv("SIMSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SIMSERVE_TRACES", str(tmp_path / "mine"))
    for folder in (cache_folder(), tmp_path / "mine"):
        folder.mkdir(parents=True)
    return cache_folder(), tmp_path / "mine"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published file that this test can write."""
    trace = replace(public_trace("burstgpt"), sha256=hashlib.sha256(b"rows").hexdigest())
    monkeypatch.setattr("simserve.workload.public.public_trace", lambda name: trace)


def test_the_cache_comes_before_what_was_named(folders: tuple[Path, Path], small: None) -> None:
    for folder in reversed(folders):
        (folder / "burstgpt.csv").write_bytes(b"rows")
        assert find_trace("burstgpt") == folder / "burstgpt.csv"


def test_a_copy_is_checked_before_use(folders: tuple[Path, Path], small: None) -> None:
    (folders[1] / "burstgpt.csv").write_bytes(b"row")
    with pytest.raises(TraceError, match=r"is not the published file.*trace fetch burstgpt"):
        find_trace("burstgpt")


def test_what_was_not_fetched_names_the_command(folders: tuple[Path, Path]) -> None:
    with pytest.raises(TraceError, match=r"run `simserve trace fetch burstgpt`$"):
        find_trace("burstgpt")


def test_names_are_suggested() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'azure2023_conv'"):
        public_trace("azure2023_con")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SIMSERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "simserve" / "traces"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "simserve" / "traces"
    monkeypatch.setenv("SIMSERVE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "traces"


@pytest.mark.parametrize("name", public_names())
def test_the_registry_hangs_together(name: str) -> None:
    trace = public_trace(name)
    assert trace.url.startswith("https://")
    assert len(bytes.fromhex(trace.sha256)) == 32
    assert trace.source.startswith("https://")
    assert trace.file_name in (f"{name}.csv", f"{name}.jsonl")
    assert trace.description
    assert trace.licence in ("CC-BY 4.0", "Apache-2.0")
    assert " et al., " in trace.attribution


@pytest.mark.parametrize(
    "name", ["azure2023_code", "azure2023_conv", "mooncake_conversation", "mooncake_synthetic"]
)
def test_recorded_traces_are_the_published_ones(name: str, traces_dir: Path) -> None:
    trace = public_trace(name)
    assert trace.is_at(traces_dir / trace.file_name)


@pytest.mark.parametrize("variable", ["SIMSERVE_CACHE", "SIMSERVE_TRACES"])
def test_the_home_of_nobody_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "~nobody-of-this-name/traces")
    with pytest.raises(TraceError, match=f"{variable}: ~nobody.*no such home directory"):
        find_trace("azure2023_conv")
