"""Opens the gzipped JSON that step logs and recorded cases are kept in."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path

from simserve.errors import TraceError, why_unreadable

__all__ = ["load_document"]


def load_document(path: Path) -> object:
    """Read a gzipped JSON file.

    Raises:
        TraceError: it cannot be read, or is none.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {why_unreadable(error)}") from error
    try:
        return json.loads(gzip.decompress(content))
    except (gzip.BadGzipFile, ValueError, EOFError, RecursionError, zlib.error) as error:
        raise TraceError(f"{path}: not a gzipped JSON file: {error}") from error
