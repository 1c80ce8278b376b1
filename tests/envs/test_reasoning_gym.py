"""reasoning-gym's datasets as environments, with the real library."""

import asyncio
import json
import math
from functools import partial
from typing import Any

import pytest

from impala_llm.config import load
from impala_llm.envs import contract, make_suite, reasoning_gym
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.envs.reasoning_gym import EVALUATED
from impala_llm.envs.scoring_process import ScoringProcess

pytestmark = pytest.mark.system

SLOW = {"knight_swap", "zebra_puzzles", "futoshiki"}
NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Datasets whose items have no answer: there are many, and the scorer knows a right one."""
COMPOSITE = "{datasets: [{name: gcd, weight: 1, config: {}}, {name: lcm, weight: 1, config: {}}]}"


@pytest.fixture(scope="module", autouse=True)
def factory() -> Any:
    """Not of this module's imports: it takes seconds, in every run of the tests."""
    return pytest.importorskip("reasoning_gym.factory", reason="reasoning-gym is not installed")


def suite(*words: str) -> Any:
    return make_suite(load(["model=scratch", "env=reasoning_gym", "env.args.num_train=4", *words]).env)


def play(suite: Any, task_id: int, answer: str) -> tuple[str, dict[str, Any]]:
    """The question, and what is said at the end."""

    async def episode() -> tuple[str, dict[str, Any]]:
        session = suite.session(training=True)
        question = await contract.reset(session, task_id, suite.name)
        *_, terminated, truncated, info = await contract.step(session, answer, suite.name)
        assert (terminated, truncated) == (True, False)
        return question, info

    return asyncio.run(episode())


def check_dataset(name: str) -> None:
    gym = suite(f"env.args.task={name}")
    item = gym.entry(1)
    question, info = play(gym, 1, "" if item["answer"] is None else str(item["answer"]))
    assert question == item["question"]
    assert name in NO_ORACLE or (info["score"], info["success"], info["stats"]["scoring_errors"]) == (1.0, True, 0.0)
    assert 0.0 <= play(gym, 1, "no idea")[1]["score"] <= 1.0


@pytest.mark.parametrize("quarter", range(4))
def test_every_dataset_shows_its_question_and_scores_its_answer(quarter: int, factory: Any) -> None:
    failed = {}
    names = sorted(set(factory.DATASETS) - SLOW - (EVALUATED - NO_ORACLE))
    assert len(names) > 80
    for name in names[quarter::4]:
        try:
            check_dataset(name)
        except Exception as error:
            failed[name] = repr(error)
    assert failed == {}


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("coin_flip", "1e999999999"),
        ("propositional_logic", " ∨ ".join(f"p{k}" for k in range(40))),
        ("rubiks_cube", "R99999999"),
        ("rush_hour", "A+999999999"),
    ],
)
def test_an_answer_that_takes_hours_or_all_memory_to_score_is_given_up_and_blocks_no_other(
    name: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasoning_gym, "ScoringProcess", partial(ScoringProcess, timeout_s=2.0))
    gym = suite(f"env.args.task={name}")

    async def episode() -> tuple[int, dict[str, Any]]:
        session = gym.session(training=True)
        await contract.reset(session, 1, gym.name)
        stepping = asyncio.ensure_future(contract.step(session, answer, gym.name))
        pending = (await asyncio.wait([stepping], timeout=0.1))[1]
        return len(pending), (await stepping)[-1]

    num_pending, info = asyncio.run(episode())
    assert num_pending == 1, "the event loop goes on meanwhile"
    assert info["score"] < 0.1 and not info["success"]


@pytest.mark.system
@pytest.mark.parametrize("name", ["countdown", "n_queens", "composite"])
def test_scorers_that_run_the_answer_do_so_elsewhere(name: str) -> None:
    gym = suite(f"env.args.task={name}", *([f"env.args.config={COMPOSITE}"] if name == "composite" else []))
    assert play(gym, 1, gym.entry(1)["answer"])[1] == {"score": 1.0, "success": True, "stats": {"scoring_errors": 0.0}}
    for answer in ("exit()", "__import__('os')._exit(3)", "x" * 10**6):
        assert play(gym, 1, answer)[1]["score"] < 0.1
    assert play(gym, 1, gym.entry(1)["answer"])[1]["success"], "the next answer is scored again"


@pytest.mark.system
@pytest.mark.parametrize("name", ["arc_agi", "rearc"])
def test_a_part_of_a_composite_whose_scorer_tells_tuples_from_lists_scores_its_answer(name: str) -> None:
    gym = suite("env.args.task=composite", f"env.args.config={{datasets: [{{name: {name}, weight: 1, config: {{}}}}]}}")
    assert play(gym, 1, gym.entry(1)["answer"])[1]["score"] == 1.0


def test_items_whose_scorers_run_elsewhere_are_of_plain_values() -> None:
    for name in EVALUATED - NO_ORACLE - {"composite"}:
        gym = suite(f"env.args.task={name}")
        sent = json.loads(json.dumps(gym.entry(1)))
        assert gym.score(sent["answer"], sent) == 1.0


def scripted(gym: Any, noise: float, num_tasks: int) -> float:
    """Mean score of the suite's script over training tasks."""

    async def episode(task_id: int) -> float:
        session, script = gym.session(training=True), gym.script(noise, seed=task_id)
        question, info = session.reset(task_id)
        *_, end = await contract.step(session, script.act(question, info), gym.name)
        return float(end["score"])

    return sum(asyncio.run(episode(task)) for task in range(num_tasks)) / num_tasks


def test_its_script_gives_the_reference_answer_in_the_form_that_is_scored() -> None:
    for words in (["env.args.answer_tags=true"], ["env.args.system_prompt=default", "env.args.answer_tags=true"], []):
        gym = suite("env.args.num_train=100", *words)
        assert scripted(gym, 0.0, 20) == 1.0
        assert scripted(gym, 1.0, 20) < 0.2, "another task's answer"
    assert 0.2 < scripted(suite("env.args.num_train=100"), 0.5, 100) < 0.8


def test_thoughts_are_no_part_of_an_answer() -> None:
    gym = suite("env.args.num_train=100")
    item = gym.entry(3)
    assert gym.score(f"<think>perhaps <answer>0</answer></think>\n\n{item['answer']}", item) == 1.0


def test_a_task_without_a_reference_answer_has_no_script() -> None:
    gym = suite("env.args.task=rush_hour")
    with pytest.raises(ValueError, match="no reference answer: set demonstrations.player=policy or person"):
        scripted(gym, 0.0, 1)


def test_splits_are_disjoint_and_the_same_in_every_process() -> None:
    first, second = suite("env.args.num_test=3"), suite("env.args.num_test=3")
    splits = [list(first.tasks(split)) for split in ("train", "validation", "test")]
    assert [len(each) for each in splits] == [4, 500, 3]
    assert len(set.union(*map(set, splits))) == 507
    assert first.entry(506) == second.entry(506)
    assert first.entry(0) != suite("env.args.seed=1").entry(0)
    with pytest.raises(EnvironmentFault, match="the tasks 0 to 506"):
        play(first, 507, "")


@pytest.mark.parametrize(("seed", "task", "warned"), [(None, "ransom_note", True), ("0", "ransom_note", False),
                                                      (None, "gcd", False)])  # fmt: skip
def test_items_that_differ_from_process_to_process_are_warned_of(
    seed: str | None, task: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    suite(f"env.args.task={task}")
    assert ("set PYTHONHASHSEED=0" in caplog.text) == warned


def test_its_configuration_and_prompts() -> None:
    words = ("env.args.config.min_terms=3", "env.args.config.max_terms=3", "env.args.system_prompt=direct")
    gym = suite(*words, "env.args.answer_tags=true")
    item = gym.entry(0)
    assert item["metadata"]["num_terms"] == 3 and "<answer>" in gym.system_prompt
    assert play(gym, 0, f"it is <answer> {item['answer']} </answer>")[1]["success"]
    assert play(gym, 0, item["answer"])[1]["score"] == 0.0
    assert play(suite(*words), 0, f"\n{item['answer']}\n")[1]["success"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.args.task=chess"], "env.args.task=chess is no dataset of reasoning-gym"),
        (["env.args.config.num_terms=3"], "num_terms"),
        (["env.args.config.max_terms=1"], "max_terms must be >= min_terms"),
        (["env.args.config.seed=1"], "use env.args.seed"),
    ],
)
def test_what_the_library_does_not_have_is_named(words: list[str], said: str) -> None:
    with pytest.raises(EnvironmentFault, match=said):
        suite(*words)


def test_without_the_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(EnvironmentFault, match=r"reasoning_gym.*pip install 'impala-llm\[reasoning-gym\]'"):
        suite()


def test_an_answer_that_breaks_a_scorer_scores_nothing() -> None:
    info = play(suite("env.args.task=prime_factorization"), 0, "no idea")[1]
    assert (info["score"], info["stats"]["scoring_errors"]) == (0.0, 1.0) and not math.isnan(info["score"])
