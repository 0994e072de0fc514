"""`python -m simserve` does what the `simserve` script does."""

from __future__ import annotations

from simserve.cli.entry import main

if __name__ == "__main__":
    main()
