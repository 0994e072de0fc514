"""Has Triton's kernels interpreted where there is no GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("torch") is not None:
    import torch

    # Before anything imports triton, whose own library is decorated at import.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
