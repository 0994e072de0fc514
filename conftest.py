"""What pytest looks for doctests in: not in the modules that need torch, where there is none."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["simserve/executor/real/*.py"]
