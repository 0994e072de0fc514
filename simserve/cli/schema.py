"""`simserve schema`: the JSON Schema that editors check configurations by."""

from __future__ import annotations

import typer

__all__ = ["schema"]


def schema() -> None:
    """Print the JSON Schema of configurations.

    A configuration names it in its first line:
    # yaml-language-server: $schema=../schema/simserve.schema.json
    """
    from simserve.config.schema import schema_text

    typer.echo(schema_text(), nl=False)
