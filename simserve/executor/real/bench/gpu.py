"""Whether there is a GPU to measure on. Importing this needs no torch."""

from __future__ import annotations

from importlib.util import find_spec

from simserve.errors import SimserveError

__all__ = ["require_gpu"]


def require_gpu(what: str) -> None:
    """Find out before anything is set up.

    Raises:
        SimserveError: torch or triton is missing, or torch sees no CUDA GPU.
    """
    if missing := [name for name in ("torch", "triton") if find_spec(name) is None]:
        raise SimserveError(
            f"{what} needs {' and '.join(missing)}, not installed here: pip install 'simserve[gpu]'"
        )
    import torch

    if not torch.cuda.is_available():
        raise SimserveError(
            f"{what} needs a CUDA GPU, and torch {torch.__version__} sees none: run it where "
            "there is one, with a torch that is built for CUDA"
        )
