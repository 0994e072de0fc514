"""Which format a trace file has, told from its first kilobytes."""

from __future__ import annotations

from pathlib import Path

from simserve.errors import TraceError
from simserve.registry import BUILTINS, names, resolve
from simserve.workload.files import read_head
from simserve.workload.readers.base import first_object

__all__ = ["sniff"]

# The more particular come first: Bailian rows have all of Mooncake's columns.
_JSON_LINES = ("simserve", "bailian", "dynamo", "llmservingsim", "mooncake", "custom")
_OWN = ("arrival_s", "prompt_len", "output_len")
_CSV = ("azure", "burstgpt", "vidur", "servegen")


def sniff(path: str | Path) -> str:
    """The name of the reader for a file. Readers are imported only until one knows the file.

    JSON lines in Mooncake's columns are taken for Mooncake; `timed_trace` goes by name only.

    Raises:
        TraceError: the file cannot be read, is empty, or no reader knows it.
    """
    path = Path(path)
    head = read_head(path)
    if not head.strip():
        raise TraceError(f"{path}: no requests: the file is empty")
    built_in = _JSON_LINES if head.lstrip().startswith("{") else _CSV
    plugins = [name for name in names("readers") if name not in BUILTINS["readers"]]
    candidates: list[str] = [*built_in, *plugins]
    for name in candidates:
        if resolve("readers", name)().sniff(path, head):
            return name
    first = next(line for line in head.splitlines() if line.strip()).strip()
    shown = first if len(first) <= 120 else f"{first[:117]}..."
    raise TraceError(
        f"{path}: no trace format is known that begins like this: {shown!r}; "
        f"known formats: {', '.join(names('readers'))}; name one with format: NAME{_lacking(head)}"
    )


def _lacking(head: str) -> str:
    """What rows with some keys of simserve's own format lack to have it."""
    given = first_object(head).keys()
    lacking = [key for key in _OWN if key not in given]
    if len(lacking) == len(_OWN):
        return ""
    return f". Rows of format simserve have {', '.join(_OWN)}; these lack {' and '.join(lacking)}"
