"""A configuration as YAML text that reads back as the same configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from simserve.config.model import RunConfig
from simserve.config.scalars import AmbiguousScalarError, read_scalar

__all__ = ["dump_config", "dump_plain"]


class _Dumper(yaml.SafeDumper):
    """Quotes text that the reader would take for something else (`1e3`, `12:30`)."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = read_scalar(text) == text
    except AmbiguousScalarError:
        is_plain = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else "'")


_Dumper.add_representer(str, _text)


def dump_config(config: RunConfig) -> str:
    """The configuration in full, keys in the order of the model."""
    return dump_plain(config.model_dump(mode="json"))


def dump_plain(plain: Mapping[str, Any]) -> str:
    """Dicts, lists and scalars, keys in their own order."""
    return yaml.dump(dict(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
