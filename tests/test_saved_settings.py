"""The settings of a run as YAML become the same settings when they are read again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impala_llm.config import load, to_yaml
from impala_llm.learning.checkpoints.kept_settings import for_other_runs
from impala_llm.settings import Config

OWN = """
from dataclasses import dataclass, field
from impala_llm.algorithms.losses import Reinforce

@dataclass
class Weighing(Reinforce):
    m: dict[str, float] = field(default_factory=dict)

class Suite:
    name, system_prompt = "own", ""
    def __init__(self, prices: dict = {}, pattern: str = "", **others):
        self.prices, self.pattern, self.others = prices, pattern, others
    def tasks(self, split): return range(9)
    def session(self, training): return None
    def signature(self, task_id): return ""
"""
SUITE = ["model=scratch", "env=own_parts:Suite"]
TAUGHT = ["model=scratch", "algorithm=group_relative", "algorithm.credit=distillation"]
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\x85\u2028\u2029")
"""Characters that PyYAML writes and reads as they are."""
TEXTS = st.lists(st.sampled_from(["${", "\\", "$", "{", "}", "'", '"', "a", " ", ":", "."]) | CHARACTERS).map("".join)
"""Texts have any characters, and often those that have a meaning of their own in settings."""


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """Reads the settings that it is given from a file, and words after it."""
    file = tmp_path_factory.mktemp("run") / "config.yaml"

    def read_again(config: Config, *words: str) -> Config:
        file.write_text(to_yaml(config))
        return load([f"experiment={file}", *words])

    return read_again


@pytest.fixture
def own(user_folder: Path) -> None:
    """The current directory, with parts of the user's own in it."""
    (user_folder / "own_parts.py").write_text(OWN)


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ([*TAUGHT, "algorithm.credit.teacher_context='a \\${b} c'"], "algorithm.credit.teacher_context", "a ${b} c"),
        ([*SUITE, "env.args.pattern='\\${x}'"], "env.args.pattern", "${x}"),
        ([*SUITE, "env.args.any='\\${x}'"], "env.args.any", "${x}"),
        ([*SUITE, "env.args.prices={1: 2}"], "env.args.prices", {1: 2}),
        ([*SUITE, "env.args.prices={a.b: {c: '\\${x}'}}"], "env.args.prices", {"a.b": {"c": "${x}"}}),
        (
            ["model=scratch", "algorithm.loss=own_parts:Weighing", "algorithm.loss.m={a: 1, b.c: 2}"],
            "algorithm.loss.m",
            {"a": 1.0, "b.c": 2.0},
        ),
    ],
)
def test_a_value_of_a_part_is_read_again_as_it_was(
    own: None, again: Callable[..., Config], words: list[str], key: str, value: object
) -> None:
    config = load(words)
    found: Any = config
    for name in key.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value
    assert again(config) == config
    assert again(config, "replay=prioritised") == load([*words, "replay=prioritised"]), "beside a preset too"
    assert again(again(config)) == config


@pytest.mark.system
@settings(max_examples=8, deadline=None)
@given(texts=st.lists(TEXTS, min_size=30, max_size=30))
def test_every_text_is_read_again_as_it_was(again: Callable[..., Config], texts: list[str]) -> None:
    """In a setting of ours, and in an option of a credit. OmegaConf takes "???" for a value that is missing."""
    texts = [text for text in texts if text != "???"]
    config = load([*TAUGHT, "algorithm.credit.teacher_context=hint"])
    credit = replace(config.algorithm.credit, teacher_context=f"x{''.join(texts)}")  # type: ignore[call-arg]
    config = replace(config, algorithm=replace(config.algorithm, credit=credit), sft=replace(config.sft, data=texts))
    assert again(config) == config


def test_a_folder_that_follows_the_name_of_a_run_does_so_still(again: Callable[..., Config]) -> None:
    kept = for_other_runs(load(["experiment=toy"]))
    assert again(kept, "run.name=other").run.dir == "outputs/other"
    assert again(kept).sft.dir == "outputs/toy-sft"


def test_a_reference_in_a_word_or_file_is_resolved(own: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HINT", "a ${b}")
    (tmp_path / "mine.yaml").write_text(
        "env: {name: 'own_parts:Suite', args: {pattern: '${run.name}', any: '${env.name}'}}"
    )
    args = load(["model=scratch", f"experiment={tmp_path}/mine.yaml", "env.args.word=${oc.env:HINT}"]).env.args
    assert args == {"prices": {}, "pattern": "impala", "any": "own_parts:Suite", "word": "a ${b}"}
