"""Challenges of TextWorld, with a library in its place whose challenges read the same settings."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from impala_llm.config import load
from impala_llm.envs import make_suite
from tests.helpers import write_namesakes

pytestmark = pytest.mark.system

LIBRARY = {
    "__init__.py": """
class EnvInfos:
    def __init__(self, **names): pass

class GameOptions:
    seeds, path = None, None
""",
    "challenges.py": """
def by(*names):
    return ("", lambda settings, options: [settings[name] for name in names], None)

CHALLENGES = {
    "tw-coin_collector": by("level"),
    "tw-treasure_hunter": by("level"),
    "tw-simple": by("rewards", "goal", "test"),
    "tw-cooking": by("recipe_seed", "split"),
}
""",
    "generator.py": """
from pathlib import Path

def compile_game(game, options):
    for ending in (".json", ".ni", ".z8"):
        Path(options.path).with_suffix(ending).write_text(repr(game))
    return options.path
""",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "library" / "textworld"
    folder.mkdir(parents=True)
    for name, text in LIBRARY.items():
        (folder / name).write_text(text)

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == "textworld"]

    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield
    for name in loaded():
        del sys.modules[name]


def test_a_file_in_the_current_directory_hides_no_module_of_pythons(
    tmp_path: Path, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_namesakes(tmp_path)
    monkeypatch.chdir(tmp_path)
    suite = make_suite(load(["model=scratch", "env=textworld", f"env.args.folder={tmp_path}"]).env)
    assert suite.game(suite.tasks("train")[0]).read_text() == "[1]"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("challenge", "words", "made"),
    [
        ("tw-coin_collector", [], "[1]"),
        ("tw-treasure_hunter", ["env.args.settings.level=7"], "[7]"),
        ("tw-simple", [], "['dense', 'detailed', False]"),
        ("tw-simple", ["env.args.settings.rewards=sparse"], "['sparse', 'detailed', False]"),
        ("tw-cooking", [], "[0, None]"),
        ("tw-cooking", ["env.args.settings.split=train", "env.args.settings.recipe_seed=3"], "[3, 'train']"),
    ],
)
def test_a_challenge_that_is_named_alone_makes_games(
    tmp_path: Path, library: None, challenge: str, words: list[str], made: str
) -> None:
    named = ["model=scratch", "env=textworld", f"env.args.challenge={challenge}", f"env.args.folder={tmp_path}"]
    suite = make_suite(load([*named, *words]).env)
    assert suite.game(suite.tasks("train")[0]).read_text() == made  # type: ignore[attr-defined]
