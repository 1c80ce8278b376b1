"""Names of methods in other frameworks: the settings that an error names in their place give the same method."""

from pathlib import Path

import pytest

from impala_llm.checks.familiar_names import FAMILIAR_CHOICES
from impala_llm.config import ConfigError, load
from impala_llm.settings import AlgorithmConfig


def named_for(word: str) -> AlgorithmConfig:
    """The algorithm of the words that the refusal of a word names."""
    with pytest.raises(ConfigError) as caught:
        load(["model=scratch", word])
    _, _, words = str(caught.value).partition("here it is ")
    return load(["model=scratch", *words.split()]).algorithm


@pytest.mark.parametrize(
    ("method", "divides", "loss", "aggregate", "bounds"),
    [
        ("grpo", True, "ppo_clip", "sequence_mean_token_mean", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
        (
            "dr_grpo",
            False,
            "ppo_clip",
            "sequence_mean_token_sum",
            {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
        ),
        ("gspo", True, "gspo", "sequence_mean_token_mean", {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}),
        ("cispo", True, "cispo", "token_mean", {}),
        ("tis", False, "truncated_is", "token_mean", {"cap": 1.0}),
    ],
)
def test_a_method_on_groups_is_that_of_its_paper(
    method: str, divides: bool, loss: str, aggregate: str, bounds: dict[str, float | None]
) -> None:
    named = named_for(f"algorithm={method}")
    assert (named.credit.name, named.credit.normalize_std) == ("group_relative", divides)  # type: ignore[attr-defined]
    assert (named.loss.name, named.aggregate) == (loss, aggregate)
    assert {key: getattr(named.loss, key) for key in bounds} == bounds
    assert named.uses_reference == (method == "grpo"), "the KL term of its objective"


def test_dapo_has_a_higher_upper_clip_and_replaces_groups_without_variance() -> None:
    named = named_for("algorithm=dapo")
    assert (named.credit.name, named.loss.name, named.aggregate) == ("group_relative", "ppo_clip", "token_mean")
    assert (named.loss.clip_low, named.loss.clip_high) == (0.2, 0.28)  # type: ignore[attr-defined]
    assert named.refill > 0 and not named.uses_reference


@pytest.mark.parametrize("word", [word for word in FAMILIAR_CHOICES if word.startswith("algorithm=")])
def test_the_page_of_algorithms_has_the_settings_of_a_method(word: str) -> None:
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    assert word == "algorithm=tis" or f"`algorithm={FAMILIAR_CHOICES[word]}`" in page


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("learner.max_steps=10", "learner.total_updates"),
        ("env.webshop.steps=10", "learner.total_updates"),
        ("learner.max_updates=10", "learner.total_updates"),
        ("trainer.total_training_steps=10", "learner.total_updates"),
        ("engine.max_tokens=64", "engine.max_new_tokens"),
        ("learner.micro_batch_size=4", "learner.token_budget"),
        ("run.output_dir=x", "run.dir"),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours(word: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}"):
        load(["model=scratch", word])


def test_rloo_is_reinforce_on_whole_episodes() -> None:
    named = named_for("algorithm=rloo")
    assert (named.credit.name, named.loss.name) == ("rloo", "reinforce")
    assert named.aggregate == "sequence_mean_token_sum"


def test_impala_truncates_where_the_preset_clips() -> None:
    named = named_for("algorithm=impala")
    assert (named.credit.name, named.loss.name) == ("vtrace", "truncated_is")


def test_areal_recomputes_its_proximal_policy() -> None:
    named = named_for("algorithm=areal")
    assert (named.loss.name, named.loss.proximal) == ("decoupled_ppo", "recomputed")  # type: ignore[attr-defined]
    assert (named.loss.clip_low, named.loss.clip_high, named.loss.dual_clip) == (0.2, 0.2, None)  # type: ignore[attr-defined]
