"""Downloads public traces: goes on where it broke off, and keeps only what is the whole file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from simserve.errors import TraceError
from simserve.workload.files import file_sha256
from simserve.workload.public import PublicTrace

__all__ = ["FetchProgress", "fetch_trace"]

FetchProgress = Callable[[int, int | None], object]
"""Called with the bytes that are there, and those of the whole file (None: not known)."""
TIMEOUT_S = 30.0
"""Without a byte for so long, a server counts as gone."""
CHUNK_BYTES = 1 << 18
RANGE_NOT_SATISFIABLE = 416
PARTIAL_CONTENT = 206


def fetch_trace(
    trace: PublicTrace, folder: Path, *, progress: FetchProgress | None = None
) -> Path | None:
    """Download a trace into `folder`; it gets its name there when its hash is the published one.

    What came of an interrupted download stays beside it as *.part, and the next one goes on from
    there if the server can. Returns the path; None: it was there already.

    Raises:
        TraceError: the server cannot be reached, refuses, breaks off, or sends another file; or
            the folder cannot be written.
    """
    path = folder / trace.file_name
    if trace.is_at(path):
        return None
    part = path.with_name(f"{path.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _download(trace.url, part, progress)
        found = file_sha256(part)
        if found != trace.sha256:
            part.unlink()
            raise TraceError(
                f"{trace.url}: what came has the SHA-256 {found}, not {trace.sha256}: it was "
                "deleted; try again, and if that does not help, the source has changed"
            )
        os.replace(part, path)
    except OSError as error:
        raise TraceError(f"{part}: cannot be written: {error.strerror or error}") from error
    return path


def _download(url: str, part: Path, progress: FetchProgress | None) -> None:
    """Append what is missing to `part`; begin again if the server sends all of it."""
    had = part.stat().st_size if part.exists() else 0
    answer = _ask(url, had)
    if answer is None:
        return
    with answer:
        goes_on = answer.status == PARTIAL_CONTENT
        had = had if goes_on else 0
        total = None if answer.length is None else had + answer.length
        with part.open("ab" if goes_on else "wb") as file:
            for chunk in _chunks(url, answer):
                file.write(chunk)
                had += len(chunk)
                if progress is not None:
                    progress(had, total)
    if total is not None and had < total:
        raise TraceError(
            f"{url}: broke off after {had:,} of {total:,} bytes; the same command goes on from "
            "there"
        )


def _ask(url: str, had: int) -> HTTPResponse | None:
    """The server's answer; None: there is nothing after the first `had` bytes."""
    headers = {"User-Agent": "simserve", **({"Range": f"bytes={had}-"} if had else {})}
    try:
        answer: HTTPResponse = urlopen(Request(url, headers=headers), timeout=TIMEOUT_S)
    except HTTPError as error:
        with error:
            if error.code == RANGE_NOT_SATISFIABLE and had:
                return None  # whether that is the whole file, the hash will tell
            raise TraceError(f"{url}: the server says {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise TraceError(
            f"{url}: cannot be reached ({reason}); `simserve trace list` says where to put a copy "
            "from elsewhere"
        ) from error
    return answer


def _chunks(url: str, answer: HTTPResponse) -> Iterator[bytes]:
    """What comes, until the end or until the server is gone."""
    try:
        while chunk := answer.read1(CHUNK_BYTES):
            yield chunk
    except (OSError, HTTPException) as error:
        raise TraceError(
            f"{url}: the connection broke ({error}); the same command goes on from there"
        ) from error
