"""One thread a worker, and no doctests in modules that need torch where there is none."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["simserve/executor/real/*.py"]

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers fill the cores: threads of one would spin while those of another compute. Read by
    # torch and numpy as they load, and by every process that a test starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
