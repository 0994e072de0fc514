"""What the `simserve` script calls. It imports nothing, so that Ctrl-C finds it ready at once."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C while it is being imported ends as it does later."""
    try:
        from simserve.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
