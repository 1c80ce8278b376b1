"""The wheel has in it what an installed package needs, and nothing else."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import impala_llm

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Content of every file of a wheel built from this checkout, by its path in the wheel."""
    target = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = target.glob("*.whl")
    assert wheel.name.startswith(f"impala_llm-{impala_llm.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_configs_are_shipped_inside_the_package(wheel_files: dict[str, bytes]) -> None:
    configs = sorted((ROOT / "configs").rglob("*.yaml"))
    assert configs
    for path in configs:
        assert wheel_files[f"impala_llm/{path.relative_to(ROOT)}"] == path.read_bytes()


def test_assets_and_modules_are_shipped(wheel_files: dict[str, bytes]) -> None:
    package = ROOT / "impala_llm"
    assets = [path for path in (package / "assets").rglob("*") if path.is_file()]
    for path in [*assets, *package.rglob("*.py")]:
        assert wheel_files[str(path.relative_to(ROOT))] == path.read_bytes()


def test_nothing_else_is_shipped(wheel_files: dict[str, bytes]) -> None:
    folders = {name.split("/")[0] for name in wheel_files}
    assert folders == {"impala_llm", f"impala_llm-{impala_llm.__version__}.dist-info"}
    assert not [name for name in wheel_files if name.endswith(".pyc")]


def test_the_command_and_the_licence_are_in_the_metadata(wheel_files: dict[str, bytes]) -> None:
    metadata = f"impala_llm-{impala_llm.__version__}.dist-info"
    assert b"impala-llm = impala_llm.cli:main" in wheel_files[f"{metadata}/entry_points.txt"]
    assert b"License-Expression: Apache-2.0" in wheel_files[f"{metadata}/METADATA"]
    assert b"Apache License" in wheel_files[f"{metadata}/licenses/LICENSE"]


def test_the_source_archive_has_the_files_that_its_tests_read() -> None:
    """Pages, deployment files, data of results: all that is not the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shipped = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"])
    assert {"tests", "tools", "docs", "deploy", "configs", "Dockerfile", "constraints.txt"} <= shipped
    assert all((ROOT / path).exists() for path in shipped)


def test_every_direct_dependency_is_pinned_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = [normalised(line.split("==")[0]) for line in lines]
    assert all("==" in line and "+" not in line for line in lines)
    assert len(pinned) == len(set(pinned))
    extras = project["optional-dependencies"]
    # SGLang has its own machine and its own pins.
    wanted = [*project["dependencies"], *extras["dev"], *extras["envs"], *extras["bench"]]
    for requirement in wanted:
        name = normalised(requirement.split(">")[0].split("=")[0].split("<")[0].split("[")[0])
        assert name in pinned, f"{requirement}: add {name} to constraints.txt"


def normalised(name: str) -> str:
    return name.strip().lower().replace("_", "-")
