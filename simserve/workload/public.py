"""Public traces by name: where they come from, and the copy that lies on this machine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from simserve.errors import TraceError, UnknownNameError, did_you_mean
from simserve.workload.files import file_sha256

__all__ = [
    "PublicTrace",
    "cache_folder",
    "copies_of",
    "find_trace",
    "public_names",
    "public_trace",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicTrace:
    """One file that others publish."""

    name: str
    description: str
    url: str
    """Of one fixed version."""
    sha256: str
    """Of that version, in hexadecimal."""
    licence: str
    attribution: str
    """What is to be cited."""
    source: str
    """Its authors' page."""

    @property
    def file_name(self) -> str:
        """What a copy is called: the trace's name with the ending of the published file."""
        return self.name + PurePosixPath(urlsplit(self.url).path).suffix

    def is_at(self, path: Path) -> bool:
        """Whether the file there is a whole and unchanged copy.

        Raises:
            TraceError: it cannot be read.
        """
        return path.is_file() and file_sha256(path) == self.sha256


def public_names() -> list[str]:
    """Names of the public traces."""
    entries = files("simserve.presets").joinpath("traces").iterdir()
    return sorted(e.name.removesuffix(".json") for e in entries if e.name.endswith(".json"))


def public_trace(name: str) -> PublicTrace:
    """A public trace. Raises UnknownNameError, listing what there is."""
    known = public_names()
    if name not in known:
        raise UnknownNameError(
            f"no public trace is called '{name}'{did_you_mean(name, known)}; "
            f"there are {', '.join(known)}"
        )
    text = files("simserve.presets").joinpath("traces", f"{name}.json").read_text(encoding="utf-8")
    return PublicTrace(name=name, **json.loads(text))


def cache_folder() -> Path:
    """Where fetched traces lie: `traces` in SIMSERVE_CACHE, or in simserve's folder of the user's
    cache (XDG_CACHE_HOME, ~/.cache)."""
    if own := os.environ.get("SIMSERVE_CACHE"):
        return _folder("SIMSERVE_CACHE", own) / "traces"
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _folder("XDG_CACHE_HOME", users) / "simserve" / "traces"


def _folder(variable: str, value: str) -> Path:
    """Raises TraceError: it begins with the home of somebody who does not exist."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise TraceError(f"{variable}: {value}: there is no such home directory") from None


def copies_of(trace: PublicTrace) -> list[Path]:
    """Files that go by the trace's name: in the cache folder, and in what SIMSERVE_TRACES names."""
    given = os.environ.get("SIMSERVE_TRACES")
    folders = [cache_folder(), *([_folder("SIMSERVE_TRACES", given)] if given else [])]
    return [path for folder in folders if (path := folder / trace.file_name).is_file()]


def find_trace(name: str) -> Path:
    """The copy of a public trace, checked to be what was published.

    Raises:
        UnknownNameError: no public trace has this name.
        TraceError: there is no copy, or it is another file.
    """
    trace = public_trace(name)
    copies = copies_of(trace)
    if not copies:
        raise TraceError(
            f"the public trace '{name}' is not on this machine: run `simserve trace fetch {name}`"
        )
    if not trace.is_at(copies[0]):
        raise TraceError(
            f"{copies[0]}: is not the published file, its SHA-256 is another one: delete it, then "
            f"run `simserve trace fetch {name}`"
        )
    return copies[0]
