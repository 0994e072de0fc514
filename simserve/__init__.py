"""Replay LLM-serving traces through vLLM's scheduler, on a cost model or on a real GPU."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, which takes longer to import than all that is here

__version__ = "0.1.0"
__all__ = ["RunResult", "__version__", "run"]

if TYPE_CHECKING:
    from typing import Any

    from simserve.api import RunResult, run


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import simserve` stays light."""
    if name in ("RunResult", "run"):
        import simserve.api

        return getattr(simserve.api, name)
    raise AttributeError(f"module 'simserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
