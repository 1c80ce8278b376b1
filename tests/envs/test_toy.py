"""Toy suites: their scores at the optimum, at chance and without memory, from the rules written out here again."""

import itertools

import pytest

from impala_llm.config import ConfigError, load
from impala_llm.envs.toy import CorridorSuite, ParrotSuite, spoken


def play(suite, task_id, policy):
    session = suite.session(training=True)
    observation, info = session.reset(task_id)
    history, rewards = [observation], []
    while True:
        observation, reward, terminated, truncated, info = session.step(policy(history))
        rewards.append(reward)
        if terminated or truncated:
            return info, rewards
        history.append(observation)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def right_answer(history):
    sign, letter = history[-1]
    return letter if sign == "+" else history[-2][1]


def test_parrot_optimum_is_to_repeat_the_letter():
    suite = ParrotSuite(ParrotSuite.Options(num_words=5))
    for task_id in suite.tasks("test"):
        info, rewards = play(suite, task_id, lambda history: history[-1].split()[-1])
        assert (info["score"], info["success"], rewards) == (1.0, True, [1.0])


def test_parrot_constant_answer_scores_chance():
    suite = ParrotSuite(ParrotSuite.Options(num_words=4))
    assert mean(play(suite, task, lambda history: "c")[0]["score"] for task in suite.tasks("train")) == pytest.approx(
        0.25
    )


def test_corridor_optimum_uses_the_earlier_observation():
    suite = CorridorSuite(CorridorSuite.Options(num_words=4, num_turns=4))
    for task_id in suite.tasks("validation"):
        info, rewards = play(suite, task_id, right_answer)
        assert info["score"] == 1.0 and info["success"]
        assert rewards == [0.0, 0.0, 0.0, 1.0]
        assert info["stats"] == {"right_turns": 4.0}


def test_corridor_chance_and_memoryless_scores():
    suite = CorridorSuite(CorridorSuite.Options(num_words=4, num_turns=3, num_tasks=5000))
    tasks = suite.tasks("train")
    assert mean(play(suite, task, lambda history: "a")[0]["score"] for task in tasks) == pytest.approx(0.25, abs=0.02)
    # the first door is surely right, each of the two others is "+" (right) or "-" (one in four)
    memoryless = (1 + 2 * (0.5 + 0.5 * 0.25)) / 3
    repeat = mean(play(suite, task, lambda history: history[-1][1])[0]["score"] for task in tasks)
    assert repeat == pytest.approx(memoryless, abs=0.02)


def test_corridor_gives_partial_credit_and_says_nothing_before_the_end():
    suite = CorridorSuite(CorridorSuite.Options(num_words=4, num_turns=3))
    task_id = suite.tasks("train")[0]
    answers = iter(["?", "", suite.answers(task_id)[2]])
    info, rewards = play(suite, task_id, lambda history: next(answers))
    assert info["score"] == pytest.approx(1 / 3) and not info["success"]
    assert rewards == [0.0, 0.0, pytest.approx(1 / 3)]


@pytest.mark.parametrize("suite", [ParrotSuite(), CorridorSuite()])
def test_splits_are_disjoint_and_episodes_repeat(suite):
    splits = [suite.tasks(split) for split in ("train", "validation", "test")]
    assert all(len(tasks) > 0 for tasks in splits)
    for one, other in itertools.combinations(splits, 2):
        assert not set(one) & set(other)
    first, second = suite.session(training=True), suite.session(training=False)
    for task_id in splits[2][:20]:
        assert first.reset(task_id) == second.reset(task_id)


def test_every_split_asks_for_every_kind_of_task():
    suite = CorridorSuite(CorridorSuite.Options(num_words=2, num_turns=3))
    for split in ("train", "validation", "test"):
        assert {suite.signature(task_id) for task_id in suite.tasks(split)} == {"+++", "++-", "+-+", "+--"}


@pytest.mark.parametrize(("action", "letter"), [("b", "b"), ("  b rest", "b"), ("\nba", "b"), ("", ""), ("   ", "")])
def test_spoken(action, letter):
    assert spoken(action) == letter


@pytest.mark.parametrize(
    "suite", [ParrotSuite(ParrotSuite.Options(num_tasks=10)), CorridorSuite(CorridorSuite.Options(num_tasks=10))]
)
def test_unknown_tasks_and_steps_out_of_turn_are_refused(suite):
    session = suite.session(training=False)
    with pytest.raises(RuntimeError, match="reset"):
        session.step("a")
    for task_id in (-1, 10):
        with pytest.raises(ValueError, match=f"task_id is {task_id}"):
            session.reset(task_id)
    play(suite, 3, lambda history: "a")
    session.reset(3)
    for _ in range(getattr(suite, "num_turns", 1)):
        session.step("a")
    with pytest.raises(RuntimeError, match="reset"):
        session.step("a")


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ("parrot", "num_words=1"),
        ("corridor", "num_words=27"),
        ("corridor", "num_turns=1"),
        ("parrot", "num_tasks=4"),
    ],
)
def test_sizes_out_of_range_are_refused_with_the_settings(env, word):
    with pytest.raises(ConfigError, match=rf"env\.args\.{word} is out of range: set it to "):
        load(["model=scratch", f"env={env}", f"env.args.{word}"])
