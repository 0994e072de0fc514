"""What a build ships: two packages, their data, one command, and no torch unless asked for."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

import simserve


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, repo_root: Path) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=repo_root, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> dict[str, str]:
    """Name and text of every file in the wheel that is text."""
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode(errors="replace") for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(wheel: dict[str, str]) -> Message:
    return Parser().parsestr(wheel[f"simserve-{simserve.__version__}.dist-info/METADATA"])


def test_wheel_installs_the_two_packages_and_nothing_else(wheel: dict[str, str]) -> None:
    top_levels = {PurePosixPath(name).parts[0] for name in wheel}
    assert top_levels == {
        "simserve",
        "simserve_kernels",
        f"simserve-{simserve.__version__}.dist-info",
    }


def test_wheel_ships_types_and_every_data_file(wheel: dict[str, str], repo_root: Path) -> None:
    presets = (repo_root / "simserve" / "presets").rglob("*.*")
    data = {str(path.relative_to(repo_root)) for path in presets if path.suffix != ".pyc"}
    assert {"simserve/py.typed", "simserve_kernels/py.typed", *data} <= wheel.keys()


def test_wheel_has_one_command(wheel: dict[str, str]) -> None:
    entry_points = wheel[f"simserve-{simserve.__version__}.dist-info/entry_points.txt"]
    assert entry_points.split("\n\n")[0].splitlines() == [
        "[console_scripts]",
        "simserve = simserve.cli.entry:main",
    ]


def test_torch_comes_with_two_extras_only(metadata: Message) -> None:
    wanting = [line for line in metadata.get_all("Requires-Dist", []) if line.startswith("torch")]
    extras = sorted(line.partition("extra == ")[2] for line in wanting)
    assert extras == ["'gpu'", "'test-torch'"]


def test_licence_is_in_the_wheel(wheel: dict[str, str], metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    licence = wheel[f"simserve-{simserve.__version__}.dist-info/licenses/LICENSE"]
    assert "Apache License" in licence


def test_sdist_holds_what_building_and_testing_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()}
    wanted = [
        "pyproject.toml",
        "Makefile",
        "README.md",
        "LICENSE",
        "tests/conftest.py",
        "simserve/errors.py",
        "kernels/simserve_kernels/__init__.py",
    ]
    assert {PurePosixPath(name) for name in wanted} <= names
    assert not [name for name in names if ".venv" in name.parts]


def test_the_import_name_kernels_stays_free(repo_root: Path) -> None:
    """PyPI has a package `kernels`; a `kernels/__init__.py` here would stand before it."""
    assert not (repo_root / "kernels" / "__init__.py").exists()
