"""From a YAML file or a mapping, with overrides, to a validated and resolved configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from pydantic import ValidationError

from simserve.config import presets
from simserve.config.document import Document, Place, from_python
from simserve.config.explain import explain
from simserve.config.keys import Schema
from simserve.config.model import RunConfig
from simserve.config.model_spec import plain_spec
from simserve.config.overrides import Overrides, apply_overrides
from simserve.config.resolve import resolve
from simserve.config.yaml_text import parse_yaml
from simserve.errors import ConfigError, PluginError, Problem, UnknownNameError, why_unreadable
from simserve.types import GPU, ModelShape

__all__ = [
    "ConfigSource",
    "LoadedConfig",
    "load_config",
    "placed",
    "read_document",
    "resolve_document",
    "validate",
]

ConfigSource = str | Path | Mapping[str, object] | RunConfig
"""A YAML file's path, the same as nested dicts, or a configuration already made."""
_MAX_BYTES = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration ready to be built, and what belongs to it."""

    config: RunConfig
    """Every default written out."""
    base_dir: Path
    """What paths in the configuration are relative to."""
    model: ModelShape
    draft: ModelShape | None
    """The draft model, if the configuration names one."""
    gpu: GPU
    source: str | None
    """The YAML file, as it was given; None for mappings."""
    warnings: tuple[str, ...]
    reachable_in_engine: bool
    """Whether an engine of this version can be started so on a common GPU."""
    document: Document
    """Where the keys stand."""

    def placing(self, key: str = "") -> AbstractContextManager[None]:
        """Errors of what is built from this configuration say where the key at fault stands.

        Args:
            key: its dotted path, where an error does not say it itself.
        """
        return _placing(self.document, key)

    def path(self, given: str) -> Path:
        """A path as the configuration has it, made usable from here.

        Raises:
            ConfigError: it begins with the home of somebody who does not exist.
        """
        try:
            return self.base_dir / Path(given).expanduser()
        except RuntimeError:
            raise ConfigError(f"{given}: there is no such home directory") from None


P = ParamSpec("P")
T = TypeVar("T")


def placed(
    function: Callable[Concatenate[LoadedConfig, P], T],
) -> Callable[Concatenate[LoadedConfig, P], T]:
    """Let errors of a function of a configuration say where keys stand, as `placing` does."""

    @wraps(function)
    def call(loaded: LoadedConfig, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with loaded.placing():
            return function(loaded, *args, **kwargs)

    return call


def load_config(
    source: ConfigSource, overrides: Overrides = (), base_dir: Path | None = None
) -> LoadedConfig:
    """Read, override, validate and resolve a configuration.

    Args:
        source: what to read.
        overrides: `KEY=VALUE` strings or values by dotted path, applied in order.
        base_dir: what paths are relative to; by default the file's folder, or the current one.

    Raises:
        ConfigError: all that is wrong, with positions.
        CapacityError: the model's file cannot be used.
    """
    document = read_document(source)
    apply_overrides(document, overrides)
    _refuse_sweep(document)
    return resolve_document(validate(document), document, source, base_dir)


def resolve_document(
    config: RunConfig, document: Document, source: ConfigSource, base_dir: Path | None = None
) -> LoadedConfig:
    """Write out the defaults of `config`, which `validate` has made of `document`.

    Raises:
        ConfigError: values that do not go together, with positions.
        CapacityError: the model's file cannot be used.
    """
    if base_dir is None:
        base_dir = Path(source).parent if isinstance(source, str | Path) else Path()
    with _placing(document, "model"):
        model = presets.load_model(plain_spec(config.model), base_dir)
    speculative, draft = config.scheduler.speculative, None
    if speculative is not None and speculative.draft_model is not None:
        with _placing(document, "scheduler.speculative.draft_model"):
            draft = presets.load_model(plain_spec(speculative.draft_model), base_dir)
    with _placing(document, "gpu"):
        gpu = presets.load_gpu(config.gpu)
    with _placing(document):
        resolution = resolve(config, model, gpu, draft)
    return LoadedConfig(
        config=resolution.config,
        base_dir=base_dir,
        model=model,
        draft=draft,
        gpu=gpu,
        source=str(source) if isinstance(source, str | Path) else None,
        warnings=resolution.warnings,
        reachable_in_engine=resolution.reachable_in_engine,
        document=document,
    )


def read_document(source: ConfigSource) -> Document:
    """The tree of a configuration, with what is wrong with its text.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    if isinstance(source, RunConfig):
        return Document(from_python(source.model_dump(exclude_unset=True)))
    if isinstance(source, Mapping):
        return Document(from_python(source))
    document = parse_yaml(_text(Path(source)), str(source))
    if document.root.faulty:
        raise ConfigError(document.problems)
    if not isinstance(document.root.value, dict):
        what = "is empty" if document.root.value is None else "must be a mapping of keys to values"
        raise ConfigError([document.root.place.problem((), f"the configuration {what}")])
    return document


def _text(path: Path) -> str:
    place = Place(str(path))
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError([place.problem((), f"is larger than {_MAX_BYTES} bytes")])
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = why_unreadable(error)
        raise ConfigError([place.problem((), f"cannot be read: {reason}")]) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig").splitlines() or [""]
        place = place._replace(line=len(before), column=len(before[-1]) + 1)
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise ConfigError([place.problem((), message)]) from None


def _refuse_sweep(document: Document) -> None:
    if document.root.child("sweep") is not None:
        message = "this is a sweep, several runs: `simserve sweep` starts it"
        raise ConfigError([document.place_of(("sweep",)).problem(("sweep",), message)])


def validate(document: Document) -> RunConfig:
    """The document as the model of a configuration.

    Raises:
        ConfigError: all that is wrong, with positions.
    """
    problems = list(document.problems)
    try:
        config = RunConfig.model_validate(document.root.plain())
    except ValidationError as error:
        found = error.errors(include_url=False)
        problems += explain(found, document, _schema())
    if problems:
        raise ConfigError(sorted(problems, key=_order))
    return config


@cache
def _schema() -> Schema:
    return RunConfig.model_json_schema()


def _order(problem: Problem) -> tuple[bool, int, int]:
    """By position; what has none (an override) last."""
    return problem.line is None, problem.line or 0, problem.column or 0


@contextmanager
def _placing(document: Document, key: str = "") -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        placed = [_placed(problem, document, key) for problem in error.problems]
        raise ConfigError(placed) from None
    except (PluginError, UnknownNameError) as error:
        if not key:
            raise
        problem = _placed(Problem(path=key, message=str(error)), document)
        raise type(error)(problem.render()) from None


def _placed(problem: Problem, document: Document, key: str = "") -> Problem:
    """A problem with its position in the document, unless it is one of another file."""
    if problem.file is not None:
        return problem
    path = problem.path or key
    keys = (int(key) if key.isdecimal() else key for key in path.split(".") if key)
    place = document.place_of(tuple(keys))
    return replace(problem, path=path, **place._asdict())
