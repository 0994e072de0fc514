"""The formal report of a run: what its numbers mean nothing without, or what of it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from simserve.errors import RunDirectoryError
from simserve.metrics.rundir import read_parts
from simserve.report.formal_facts import Fact, Lookup, Section, missing
from simserve.report.formal_method import measured, method
from simserve.report.formal_setup import system, workload
from simserve.report.markdown import markdown_table

__all__ = ["FormalReport", "formal_report"]

SETTINGS = (
    "model",
    "gpu",
    "workload",
    "scheduler",
    "kv_cache",
    "executor",
    "metrics",
    "seed",
)
"""Parts of which a configuration consists."""


class FormalReport(NamedTuple):
    """A report and what is missing in it."""

    markdown: str
    missing: list[str]


def formal_report(directory: Path) -> FormalReport:
    """The report of a run directory, simulated or real, whatever it lacks.

    Raises:
        RunDirectoryError: there is no summary, a file is broken, or it is a sweep.
    """
    if (directory / "sweep.yaml").is_file():
        raise RunDirectoryError(f"{directory}: is a sweep; name the directory of one of its points")
    lookup = Lookup(read_parts(directory))
    sections = [system(lookup), workload(lookup), *measured(lookup), method(lookup)]
    settings = _settings(lookup)
    found = [fact.missing for one in (*sections, settings) for fact in one.facts if fact.missing]
    name = lookup.parts.summary.get("label") or directory.resolve().name
    lines = [f"# Report of {' '.join(str(name).split())}", "", *_verdict(found), ""]
    for section in sections:
        lines += _section(section)
    lines += ["## Effective configuration", "", *(_line(fact) for fact in settings.facts)]
    lines += _fenced(lookup.parts.config.rstrip("\n"))
    return FormalReport("\n".join(lines) + "\n", found)


def _fenced(text: str) -> list[str]:
    """A block of YAML between fences that it does not contain."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}yaml", text, fence]


def _verdict(found: list[str]) -> list[str]:
    if not found:
        return ["Nothing that a report should tell is missing."]
    return [f"**Missing: {len(found)}.**", "", *(f"* {one}" for one in found)]


def _section(section: Section) -> list[str]:
    lines = [f"## {section.title}", "", *(_line(fact) for fact in section.facts), ""]
    for table in section.tables:
        lines += [*markdown_table(table), ""]
    return lines


def _line(fact: Fact) -> str:
    return f"* {fact.name}: {fact.value}"


def _settings(lookup: Lookup) -> Section:
    """What the configuration lacks, as facts; none if it is whole."""
    absent = [key for key in SETTINGS if key not in lookup.config]
    facts = [missing(f"settings of {key}", f"config.yaml: {key}") for key in absent]
    if lookup.setting("kv_cache", "num_gpu_blocks") == "auto":
        facts.append(missing("size of the pool", "config.yaml: kv_cache.num_gpu_blocks is auto"))
    return Section("Effective configuration", facts)
