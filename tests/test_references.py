"""A setting that refers to another one has the value that words give to that one; a reference that fails is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from impala_llm.config import ConfigError, load
from impala_llm.settings import Config

PARTS = """
algorithm: {loss: {name: ppo_clip, clip_low: 0.2, clip_high: 0.3}}
env: {name: corridor, args: {num_words: 5}}
"""
Read = Callable[..., Config]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Loads a file with these settings, and words after it."""

    def read_file(text: str, *words: str) -> Config:
        (tmp_path / "f.yaml").write_text(text)
        return load(["model=scratch", f"experiment={tmp_path}/f.yaml", *words])

    return read_file


@pytest.mark.parametrize("reference", ["${algorithm.loss.clip_low}", "${.clip_low}"])
def test_a_word_refers_to_an_option_as_another_word_has_it(read: Read, reference: str) -> None:
    changed = ["algorithm.loss.clip_low=0.1", f"algorithm.loss.clip_high='{reference}'"]
    for words in (changed, changed[::-1]):
        assert read(PARTS, *words).algorithm.loss.clip_high == 0.1  # type: ignore[attr-defined]
    assert read(PARTS, changed[1]).algorithm.loss.clip_high == 0.2  # type: ignore[attr-defined]


def test_words_and_files_refer_to_an_option_of_the_environment_as_a_word_has_it(read: Read) -> None:
    words = ["env.args.num_words=4", "env.args.num_turns='${env.args.num_words}'"]
    config = read(PARTS, *words, "learner.batch_size='${env.args.num_turns}'")
    assert (config.env.args.num_turns, config.learner.batch_size) == (4, 4)
    assert read(PARTS + "learner: {batch_size: '${env.args.num_words}'}", words[0]).learner.batch_size == 4


def test_a_name_may_be_a_reference(read: Read) -> None:
    words = ["run.name=reinforce", "algorithm.loss='${run.name}'"]
    assert read(PARTS, *words).algorithm.loss.name == "reinforce"


@pytest.mark.parametrize("file", ["ppo_clip", "'${run.name}'"])
@pytest.mark.parametrize("word", ["ppo_clip", "'${run.name}'"])
def test_a_part_that_a_reference_names_keeps_the_options_of_the_file(read: Read, file: str, word: str) -> None:
    text = f"algorithm: {{loss: {{name: {file}, clip_low: 0.15}}}}"
    config = read(text, "run.name=ppo_clip", f"algorithm.loss={word}")
    assert (config.algorithm.loss.name, config.algorithm.loss.clip_low) == ("ppo_clip", 0.15)  # type: ignore[attr-defined]
    assert read(PARTS, "run.name=corridor", "env.name='${run.name}'").env.args.num_words == 5
    preset = f"defaults: [{{override /algorithm: icepop}}]\n{text}".replace("ppo_clip", "decoupled_ppo")
    assert read(preset, "run.name=decoupled_ppo").algorithm.loss.proximal == "recomputed"  # type: ignore[attr-defined]


FINE = "learner.batch_size='${run.seed}'"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [FINE, "algorithm.loss.clip_high='${'"],
            "algorithm.loss.clip_high='${' cannot be resolved (it is no reference)",
        ),
        ([FINE, "learner.epochs='${'"], "learner.epochs='${' cannot be resolved (it is no reference)"),
        ([FINE, "env.args={num_words: '${'}"], "env.args={num_words: '${'} cannot be resolved (it is no reference)"),
        ([FINE, "env.args.num_words='${nope}'"], "env.args.num_words=${nope} cannot be resolved ("),
        ([FINE, "algorithm.loss.dual_clip='${.nope}'"], "algorithm.loss.dual_clip=${.nope} cannot be resolved ("),
        (
            ["learner.batch_size='${learner.epochs}'", "learner.epochs='${nope}'"],
            "learner.epochs=${nope} cannot be resolved (what it refers to does not exist, or is not set: ",
        ),
        (
            ["env.args.num_words='${env.args.num_turns}'", "env.args.num_turns='${env.args.num_words}'"],
            "env.args.num_words=${env.args.num_turns} cannot be resolved (Recursive ",
        ),
        (
            ["learner.batch_size='${env.name}'"],
            "learner.batch_size='${env.name}' has the wrong type: a whole number is",
        ),
        (["env.args.num_words=???"], "env.args.num_words=??? needs a value: set it"),
    ],
)
def test_the_word_whose_reference_fails_is_named(read: Read, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(PARTS, *words)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("word", [FINE, "learner.batch_size='${learner.epochs}'", "env.args.num_turns='${run.seed}'"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learner: {epochs: '${batch_siz}'}", "learner.epochs=${batch_siz} "),
        ("algorithm: {loss: {name: ppo_clip, clip_low: '${nope}'}}", "algorithm.loss.clip_low=${nope} "),
        ("env: {name: corridor, args: {num_words: '${nope}'}}", "env.args.num_words=${nope} "),
    ],
)
def test_a_reference_in_the_file_is_not_put_down_to_a_word(
    read: Read, tmp_path: Path, text: str, said: str, word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, "env.name=corridor", word)
    assert str(caught.value).startswith(f"settings file {tmp_path}/f.yaml: {said}")
