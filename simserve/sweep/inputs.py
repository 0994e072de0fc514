"""What a point reads besides its configuration, so that it can run on a machine without it."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from simserve.sweep.task import Task

__all__ = ["Inputs", "find_inputs"]

_OWN_CLASS = re.compile(r"(\w+)(\.\w+)*:\w+")
_MAX_NAME = 1000


class Inputs(NamedTuple):
    """Files, and where they stand in a copy of the part of the file system that they are from."""

    files: Mapping[str, Path]
    """By place in the copy."""
    cwd: str
    """Place of the current folder."""
    base_dir: str
    """Place of the folder that paths of the configuration are relative to."""


def find_inputs(task: Task) -> Inputs:
    """Files that the configuration names by relative paths, and modules with classes of its own.

    Paths are relative to the configuration or, as an own class may take them, to the current
    folder. A module comes with the Python files beside it, a package with all of its own. What is
    installed is left out, and so are absolute paths: these are the same on all machines, or wrong.
    """
    cwd = os.getcwd()
    base_dir = os.path.abspath(task.base_dir)
    words = set(_words(task.config))
    found = {path for word in words for base in (base_dir, cwd) for path in _files(word, base)}
    root = os.path.commonpath([cwd, base_dir, *map(os.path.dirname, found)])
    here = os.path.relpath(cwd, root)
    files = {os.path.relpath(path, root): Path(path) for path in found}
    for name in sorted({match[1] for word in words if (match := _OWN_CLASS.fullmatch(word))}):
        found_there = _module(name, [cwd, base_dir])
        files |= {os.path.normpath(os.path.join(here, at)): path for at, path in found_there}
    return Inputs(dict(sorted(files.items())), here, os.path.relpath(base_dir, root))


def _words(value: Any) -> Iterator[str]:
    """All strings of a configuration."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _words(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _words(one)


def _files(word: str, base_dir: str) -> Iterator[str]:
    """The file of that name, if it is one; of a model's folder, what says its shape."""
    if not word or len(word) > _MAX_NAME or "\0" in word or word.startswith((os.sep, "~")):
        return
    path = os.path.normpath(os.path.join(base_dir, word))
    for file in (path, os.path.join(path, "config.json")):
        if os.path.isfile(file):
            yield file


def _module(name: str, first: list[str]) -> Iterator[tuple[str, Path]]:
    """The files of a top-level module that is not installed, by their place on Python's path."""
    spec = PathFinder.find_spec(name, [*first, *sys.path])
    if spec is None or spec.origin is None or _is_installed(spec.origin):
        return
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        yield from ((path.name, path) for path in sorted(origin.parent.glob("*.py")))
    else:
        folder = origin.parent
        for path in sorted(folder.rglob("*.py")):
            yield str(path.relative_to(folder.parent)), path


def _is_installed(origin: str) -> bool:
    """Whether it belongs to Python, to a package of it, or to the simulator."""
    places = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    return origin.startswith((*(place + os.sep for place in places), *_OURS))


_OURS = (str(Path(__file__).resolve().parents[1]) + os.sep,)
