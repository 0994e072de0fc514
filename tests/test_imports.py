"""Importing stays cheap, and nothing heavy comes in by the back door."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import simserve

HEAVY = {"torch", "triton", "pandas", "pyarrow", "matplotlib"}


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code`."""
    tail = "\nimport json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    outcome = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    return set(json.loads(outcome.stdout.splitlines()[-1]))


def modules() -> list[str]:
    """Every module of simserve, but those of the real executor, which torch lives in."""
    found = pkgutil.walk_packages(simserve.__path__, "simserve.")
    return [module.name for module in found if not module.name.startswith("simserve.executor.real")]


def test_import_simserve_loads_nothing_heavy() -> None:
    assert not loaded_by("import simserve") & (HEAVY | {"numpy", "pydantic", "simpy"})


def test_import_simserve_is_over_before_ctrl_c_could_interrupt_it() -> None:
    code = (
        "import sys; before = set(sys.modules); import simserve; print(*set(sys.modules) - before)"
    )
    beside = str(Path(simserve.__file__).parents[1])
    outcome = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=beside, capture_output=True, text=True, check=True
    )
    assert set(outcome.stdout.split()) == {"__future__", "simserve"}


def test_help_loads_nothing_heavy() -> None:
    code = """
import sys
from simserve.cli.main import main
sys.argv = ["simserve", "--help"]
try:
    main()
except SystemExit as exit:
    assert not exit.code, exit.code
"""
    assert not loaded_by(code) & (HEAVY | {"numpy", "simpy"})


def test_a_run_loads_nothing_that_its_configuration_does_not_use() -> None:
    code = """
import sys
from simserve import run
run({"model": "llama-3-8b", "workload": {"synthetic": {"num_requests": 1}}})
others = ("config.build_real", "config.build_decoding", "cost.sampling_file", "workload.sessions")
assert not {f"simserve.{name}" for name in others} & sys.modules.keys()
"""
    assert not loaded_by(code) & {"torch", "matplotlib", "rich"}


def test_no_module_loads_anything_heavy() -> None:
    names = modules()
    assert "simserve.errors" in names
    assert not loaded_by("\n".join(f"import {name}" for name in names)) & HEAVY


@pytest.mark.parametrize("name", modules())
def test_all_names_what_there_is(name: str) -> None:
    module = __import__(name, fromlist=["_"])
    public = getattr(module, "__all__", [])
    assert len(public) == len(set(public))
    assert not [entry for entry in public if not hasattr(module, entry)]


def test_listing_public_names_needs_no_import() -> None:
    assert simserve.__all__ == ["RunResult", "__version__", "run"]
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        simserve.rum  # noqa: B018


def test_kernels_package_imports_without_torch() -> None:
    assert not loaded_by("import simserve_kernels") & (HEAVY | {"simserve"})


def test_packages_are_typed(repo_root: Path) -> None:
    for package in ("simserve", "kernels/simserve_kernels"):
        assert (repo_root / package / "py.typed").is_file()
