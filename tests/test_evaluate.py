"""Intervals from their definitions, and evaluation with an engine whose score is known without playing."""

import asyncio
import io
import json
import math
import os
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from impala_llm import evaluate as evaluation
from impala_llm.config import ConfigError, load
from impala_llm.engines.base import Generation, SamplingParams
from impala_llm.envs import make_suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.envs.toy import ParrotSession
from impala_llm.evaluate import Example, Result, difference, evaluate, results_json, show
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.observability.intervals import change_interval, mean_interval, score_interval, wilson_interval
from impala_llm.observability.writers import MetricWriter
from impala_llm.pipeline.shm.actor_claims import claimed_servers
from impala_llm.rollout import Turn
from impala_llm.settings import Config
from tests.engines.sglang.fake_server import FakeServer
from tests.helpers import events_of


@pytest.mark.parametrize(("successes", "trials"), [(1, 7), (10, 20), (499, 500), (3, 3)])
def test_wilson_bounds_are_the_proportions_that_the_sample_just_does_not_reject(successes: int, trials: int) -> None:
    share = successes / trials
    for bound in wilson_interval(successes, trials):
        assert abs(share - bound) == pytest.approx(
            1.959963984540054 * math.sqrt(bound * (1 - bound) / trials), abs=1e-9
        )


def test_wilson_by_hand() -> None:
    # z² = 3.84146; centre 0.5; z·sqrt(0.25 / 20 + z² / 1600) / (1 + z² / 20) = 1.95996 · 0.122069 / 1.192073
    assert wilson_interval(10, 20) == pytest.approx((0.5 - 0.200701, 0.5 + 0.200701), abs=1e-5)
    # z² / (n + z²)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.277533), abs=1e-5)


def test_mean_interval_by_hand() -> None:
    # sample standard deviation sqrt(1 / 3), standard error half of it; Student's quantile of 3 degrees is 3.18245
    assert mean_interval([0.0, 1.0, 1.0, 0.0]) == pytest.approx((0.5 - 0.918694, 0.5 + 0.918694), abs=2e-4)
    assert mean_interval([0.25]) == (0.25, 0.25)
    assert mean_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


@pytest.mark.parametrize(("num_values", "tolerance"), [*((n, 2e-4) for n in range(2, 32)), (32, 0.01), (500, 1e-3)])
def test_the_interval_of_a_mean_holds_95_percent_of_student_s_distribution(num_values: int, tolerance: float) -> None:
    values = [0.0] * (num_values - 1) + [1.0]
    quantile = (mean_interval(values)[1] - np.mean(values)) / (np.std(values, ddof=1) / math.sqrt(num_values))
    degrees = num_values - 1
    t = np.linspace(-quantile, quantile, 10_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    inside = np.trapezoid(scale * (1 + t**2 / degrees) ** (-(degrees + 1) / 2), t)
    assert inside == pytest.approx(0.95, abs=tolerance)


def test_scores_of_0_and_1_are_a_proportion() -> None:
    assert score_interval([0.0] * 10) == pytest.approx((0.0, 0.277533), abs=1e-5)  # z² / (n + z²)
    assert score_interval([1.0] * 10) == pytest.approx((1.0 - 0.277533, 1.0), abs=1e-5)
    assert score_interval([0.2, 0.3, 0.25]) == mean_interval([0.2, 0.3, 0.25])


def test_scores_lie_between_0_and_1_and_so_do_their_intervals() -> None:
    assert mean_interval([0.0, 1.0, 0.5])[0] < 0.0 and mean_interval([0.0, 1.0, 0.5])[1] > 1.0
    assert score_interval([0.0, 1.0, 0.5]) == (0.0, 1.0)
    for trials in range(1, 1001):
        low, high = wilson_interval(0, trials)[0], wilson_interval(trials, trials)[1]
        assert low == 0.0 and high == 1.0


class ScriptedEngine:
    """Says one letter and stops: a fixed one, or None: the one that the newest observation shows."""

    version = 0
    vocab_size = 1000

    def __init__(self, letter: int | None) -> None:
        self.letter = letter
        self.released: list[str] = []
        self.params: list[SamplingParams] = []
        self.closed = False

    async def generate(self, session_id: str, prompt: Sequence[int], params: SamplingParams) -> Generation:
        self.params.append(params)
        answer = prompt[-2] if self.letter is None else self.letter  # the last token of a prompt is <|act|>
        tokens = np.array([answer, params.stop_token_ids[0]], np.int32)
        return Generation(tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")

    def release(self, session_id: str) -> None:
        self.released.append(session_id)

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random policy that a run of experiment=toy begins with. Read only."""
    return resolve_policy(load(["experiment=toy", f"run.dir={tmp_path_factory.mktemp('scratch')}"]))


@pytest.fixture
def config(tmp_path: Path, scratch: Path) -> Config:
    shutil.copytree(scratch, tmp_path / scratch.name)
    return load(["experiment=toy", "evaluation.num_tasks=40", f"run.dir={tmp_path}"])


def letter_id(config: Config, letter: str) -> int:
    from transformers import AutoTokenizer

    [token] = AutoTokenizer.from_pretrained(resolve_policy(config)).encode(letter)
    return token


def play(config: Config, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, num_examples: int = 0):
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: engine)
    return evaluate(config, resolve_policy(config), make_suite(config.env), "scripted", "parrot", num_examples)


def test_who_repeats_the_letter_is_a_perfect_parrot(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(None)
    result, examples = play(config, engine, monkeypatch, num_examples=2)
    assert (result.label, result.tasks, result.num_tasks) == ("scripted", "parrot", 40)
    assert (result.score, result.score_interval) == (1.0, pytest.approx(wilson_interval(40, 40)))
    assert (result.success, result.success_interval) == (1.0, pytest.approx(wilson_interval(40, 40)))
    assert (result.turns, result.tokens) == (1.0, len("say b") + 3)  # <|act|>, the letter, <|end|>
    first = list(make_suite(config.env).tasks("test"))[:2]
    assert [example.task_id for example in examples] == first
    for example in examples:
        [turn] = example.turns
        assert turn.observation == f"say {turn.action}" and turn.reward == 1.0
    assert all(params.greedy for params in engine.params)
    assert len(set(engine.released)) == 40 and engine.closed


def test_who_says_one_letter_is_right_for_one_word_in_four(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    result, examples = play(config, ScriptedEngine(letter_id(config, "a")), monkeypatch)
    assert (result.score, result.success) == (0.25, 0.25)  # 40 tasks ask for each of 4 words 10 times
    assert result.success_interval == pytest.approx(wilson_interval(10, 40))
    assert examples == []


def test_servers_of_others_play_the_policy_that_is_evaluated(tmp_path: Path) -> None:
    """Whatever weights they have: after a run, those that it has published last."""
    fake = FakeServer()
    before, after = (make_scratch_policy(tmp_path / name, hidden_size=16, seed=n) for n, name in enumerate("ab"))
    with asyncio.Runner() as runner:
        runner.run(fake.server.start_server(shutdown_timeout=0.1))
        words = ["experiment=toy", "engine=sglang", f"engine.urls=[{fake.url}]", "actor.num_actors=1"]
        config = load([*words, "evaluation.num_tasks=4", f"run.dir={tmp_path}"])
        for number, policy in enumerate((before, after), 1):
            result, _ = evaluate(config, policy, make_suite(config.env), "scripted", "parrot", run=runner.run)
            assert (result.num_tasks, len(fake.requests)) == (4, 4 * number)
            assert fake.loaded == [before, after][:number]
        runner.run(fake.server.close())


def test_servers_that_another_command_uses_are_not_evaluated_on(tmp_path: Path) -> None:
    url = f"http://{uuid.uuid4().hex}:30000"
    config = load(["experiment=toy", "engine=sglang", f"engine.urls=[{url}]", "actor.num_actors=1"])
    with claimed_servers([url]), pytest.raises(ConfigError, match=f"engine.urls has {url}, which another command on"):
        evaluation.evaluate_policies(config, {})


AGENT = """
async def agent(task, client):
    messages = [{"role": "user", "content": "say b"}]
    for _ in range(2):
        said = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
        messages += [said, {"role": "user", "content": "again"}]
    return 0.5
"""


@pytest.mark.system
def test_an_agent_plays_its_own_tasks_alone_and_its_turns_can_be_read(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "evaluated_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    engine = ScriptedEngine(letter_id(config, "a"))
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: engine)
    settings = ["env=webshop", "evaluation.num_tasks=2", "evaluation.num_examples=1"]
    own = ["agent.name=evaluated_agent:agent", "agent.processes=1", "model=scratch", f"run.dir={tmp_path}"]
    loaded = load([*settings, *own])
    loaded.evaluation.unseen_seed = 7  # as in the file of a run without an agent
    results, [example] = evaluation.evaluate_policies(loaded, {"policy": resolve_policy(config)})
    assert [(result.num_tasks, result.score) for result in results] == [(2, 0.5)]
    assert [turn.action for turn in example.turns] == ["a", "a"]
    assert [turn.observation.strip() for turn in example.turns] == ["say b", "again"]


@pytest.mark.system
def test_an_agent_that_cannot_be_imported_is_a_sentence(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "unlicensed_agent.py").write_text("async def agent(task, client): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: ScriptedEngine(None))
    own = ["agent.name=unlicensed_agent:agent", "agent.processes=1", "model=scratch", f"run.dir={tmp_path}"]
    settings = load([*own, "evaluation.num_tasks=2"])
    (tmp_path / "unlicensed_agent.py").write_text("raise ImportError('no licence')\n")
    with pytest.raises(EnvironmentFault, match="cannot be imported .*no licence"):
        evaluation.evaluate_policies(settings, {"policy": resolve_policy(config)})


def test_an_environment_that_blocks_the_evaluation_is_named(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    reset = ParrotSession.reset

    def blocking(session: ParrotSession, task_id: int) -> tuple[str, dict]:
        deadline = time.monotonic() + 60
        while "a call has blocked" not in "".join(seen) and time.monotonic() < deadline:
            time.sleep(0.01)
            seen.append(capsys.readouterr().err)
        return reset(session, task_id)

    config.pipeline.actor_timeout_s = 0.1
    config.evaluation.num_tasks = 2
    monkeypatch.setattr(ParrotSession, "reset", blocking)
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: ScriptedEngine(None))
    evaluation.evaluate_policies(config, {"one": resolve_policy(config)})
    assert f"has blocked all episodes of this process for 1 s, in {__file__}:" in "".join(seen)


def test_before_and_after_are_shown_and_kept(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines = iter([ScriptedEngine(letter_id(config, "a")), ScriptedEngine(None)])
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: next(engines))
    played = []
    monkeypatch.setattr(evaluation, "evaluate_policies", lambda c, policies: played.append(policies) or _two(c))

    def _two(config: Config) -> tuple[list[Result], list]:
        suite = make_suite(config.env)
        return [evaluate(config, resolve_policy(config), suite, name, "toy")[0] for name in ("before", "after")], []

    with MetricWriter(tmp_path / "tensorboard", []) as writer:
        writer.write(120, {"learner/version": 120.0})
    results = evaluation.compare(config)
    assert [(r.label, r.score) for r in results] == [("before", 0.25), ("after", 1.0)]
    assert played == [{"before": resolve_policy(config), "after": tmp_path / "policy"}]
    kept = json.loads((tmp_path / "evaluation.json").read_text())
    assert [(r["label"], r["score"], r["num_tasks"]) for r in kept] == [("before", 0.25, 40), ("after", 1.0, 40)]
    assert kept[1]["difference"]["score"] == 0.75
    events = events_of(tmp_path / "tensorboard")
    for name, value in (("before_score", 0.25), ("after_score", 1.0), ("after_success_rate", 1.0)):
        assert [(event.step, event.value) for event in events.Scalars(f"evaluation/{name}")] == [(120, value)]
    [event] = events.Tensors("before and after/text_summary")
    assert b"score 0.250 to 1.000" in event.tensor_proto.string_val[0]


def test_a_comparison_without_room_for_its_file_is_shown_and_logged_all_the_same(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """/dev/full takes nothing, as a disk that is full."""
    for name in ("evaluation.json", "evaluation.json.new"):
        (tmp_path / name).symlink_to("/dev/full")
    suite = make_suite(config.env)
    engines = iter([ScriptedEngine(letter_id(config, "a")), ScriptedEngine(None)])
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: next(engines))
    played = [evaluate(config, resolve_policy(config), suite, name, "toy")[0] for name in ("before", "after")]
    monkeypatch.setattr(evaluation, "evaluate_policies", lambda *_: (played, []))
    assert evaluation.compare(config) == played
    said = capsys.readouterr().out
    assert f"{tmp_path}/evaluation.json cannot be written (No space left on device)" in said
    assert [event.value for event in events_of(tmp_path / "tensorboard").Scalars("evaluation/after_score")] == [1.0]


def test_a_table_names_policies_numbers_and_intervals() -> None:
    result = Result(
        "after", "toy, split test", 40, 0.5, (0.4, 0.6), 0.25, (0.14, 0.4), 3.0, 17.4, (0.5,) * 40, (0,) * 40, (7,) * 40
    )
    console = Console(file=io.StringIO(), width=200)
    show([result], [], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("after", "toy, split test", "40", "0.500  [0.400, 0.600]", "0.250  [0.140, 0.400]", "3.0", "17"):
        assert word in printed
    [read] = json.loads(results_json([result]))
    assert read["success_interval"] == [0.14, 0.4]


def test_episodes_in_a_file_have_lines_as_they_were_read_and_empty_answers_are_named() -> None:
    console = Console(file=io.StringIO(), width=80)
    read = " ".join(["word"] * 50)
    show([], [Example(3, 0.5, [Turn(read, "", 0.0), Turn("say a", " \n", 0.5)])], console)
    first, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first == "Example 1 · task 3 · score 0.50"
    assert lines == [f"  {read}", "  > (empty)", "  say a", "  > (empty)"]


def test_how_many_of_the_tasks_are_played_is_said_with_its_key(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = len(make_suite(config.env).tasks("test"))
    for wanted, said in ((40, f"40 of {there} tasks"), (10**6, f"all {there} tasks")):
        config.evaluation.num_tasks = wanted
        monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: ScriptedEngine(None))
        evaluation.evaluate_policies(config, {"scripted": resolve_policy(config)})
        printed = capsys.readouterr().err
        assert said in printed and f"evaluation.num_tasks={wanted}" in printed


def test_the_difference_is_paired_task_by_task() -> None:
    def result(label: str, scores: list[float]) -> Result:
        mean, tasks = float(np.mean(scores)), tuple(range(len(scores)))
        successes = tuple(int(score == 1.0) for score in scores)
        share = sum(successes) / len(scores)
        fields = (label, "toy", len(scores), mean, (0.0, 0.0), share, (0.0, 0.0), 1.0, 1.0, tuple(scores), successes)
        return Result(*fields, tasks)

    # Differences 0, 1, 1, 0: see test_mean_interval_by_hand. Each alone the two score alike: 0, 1, 0, 1 and 0, 2, 1, 1.
    said = difference(result("before", [0.0, 1.0, 0.0, 1.0]), result("after", [0.0, 2.0, 1.0, 1.0]))
    assert "score 0.500 to 1.000, +0.500 [-0.419, +1.419], " in said
    # One succeeds in 2 and 4, the other in 3 and 4. Of six tasks, with one that rose and one that fell more (Bonett
    # and Price), two rose and two fell: 1.96·√((2/6 + 2/6 - 0²) / 6).
    assert "after - before over 4 tasks: success 0.500 to 0.500, +0.000 [-0.653, +0.653]; " in said
    assert difference(result("before", [0.0, 0.5] * 3), result("after", [0.1, 0.6] * 3)).endswith(", better")
    assert difference(result("before", [0.1, 0.6] * 3), result("after", [0.0, 0.5] * 3)).endswith(", worse")
    # Without any difference five tasks all rise, or all fall, by chance in 2 of 2⁵ cases: more than 5 %.
    for scores in ([0.1], [0.5, 0.3], [0.5, 0.3] * 2 + [0.1]):
        said = difference(result("before", scores), result("after", [score + 0.02 for score in scores]))
        assert said.endswith(", fewer than 6 tasks cannot tell policies apart: raise evaluation.num_tasks")
    # Scores that are all 0 or 1: few tasks of which none has changed, or both have, say little.
    for scores, verdict in (([0.0] * 6, "within noise"), ([1.0] * 6, "within noise"), ([0.0] * 300, "the same, by")):
        assert verdict in difference(result("before", scores), result("after", scores))
    said = difference(result("before", [0.0] * 2), result("after", [1.0] * 2))  # 3/4 of 4 tasks rose, 1/4 fell
    assert "+1.000 [-0.349, +1.000], " in said and " over 2 tasks: " in said
    assert difference(result("before", [0.0] * 9), result("after", [1.0] * 9)).endswith(", better")
    # A difference of 0.004 in each task is sure, and no success.
    said = difference(result("before", [0.0, 0.1] * 3), result("after", [0.004, 0.104] * 3))
    assert said.endswith("score 0.050 to 0.054, +0.004 [+0.004, +0.004], practically the same, by less than 0.01")


def test_a_table_of_80_columns_names_a_run_in_one_line() -> None:
    label = "runs/of/a/long/name/outputs/a_run_of_mine/policy"
    result = Result(
        label,
        "toy, split test",
        500,
        0.5,
        (0.4, 0.6),
        0.25,
        (0.14, 0.4),
        3.0,
        1234.4,
        (0.5,) * 500,
        (0,) * 500,
        (7,) * 500,
    )
    console = Console(file=io.StringIO(), width=80)
    show([result], [], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert len([line for line in printed.splitlines() if "a_run_of_mine" in line]) == 1
    assert json.loads(results_json([result]))[0]["label"] == label


class SaysOneLetter:
    """A script."""

    def act(self, observation: str, info: dict[str, object]) -> str:
        return "a"


class SaysWhatItReads:
    """A script."""

    def act(self, observation: str, info: dict[str, object]) -> str:
        return observation[-1]


def parrots_with_baselines(config: Config) -> object:
    suite = make_suite(config.env)
    suite.baselines = lambda: {"one letter": SaysOneLetter, "reader": SaysWhatItReads}  # type: ignore[attr-defined]
    return suite


def test_baselines_of_the_environment_play_the_same_tasks(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "make_suite", lambda env: parrots_with_baselines(config))
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: ScriptedEngine(None))
    results, _ = evaluation.evaluate_policies(config, {"policy": resolve_policy(config)})
    # 40 tasks ask for each of 4 words 10 times, and have one turn.
    assert [(r.label, r.score, r.turns, r.num_tasks) for r in results] == [
        ("one letter", 0.25, 1.0, 40),
        ("reader", 1.0, 1.0, 40),
        ("policy", 1.0, 1.0, 40),
    ]
    assert results[0].success_interval == pytest.approx(wilson_interval(10, 40)) and results[0].tokens is None
    console = Console(file=io.StringIO(), width=120)
    show(results, [], console)
    assert "one letter" in console.file.getvalue()  # type: ignore[attr-defined]
    assert [row["tokens"] for row in json.loads(results_json(results))[:2]] == [None, None]
    config.evaluation.baselines = False
    results, _ = evaluation.evaluate_policies(config, {"policy": resolve_policy(config)})
    assert [r.label for r in results] == ["policy"]


def test_each_of_several_policies_has_its_score_said_when_it_has_played(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def make_engine(config: Config, policy: Path, version: int) -> ScriptedEngine:
        said.append(capsys.readouterr().err)  # before this policy plays
        return ScriptedEngine(None)

    monkeypatch.setattr(evaluation, "make_suite", lambda env: parrots_with_baselines(config))
    monkeypatch.setattr(evaluation, "make_engine", make_engine)
    evaluation.evaluate_policies(config, dict.fromkeys(("before", "after"), resolve_policy(config)))
    assert "1 of 2, before: score 1.000, success 1.000" in said[1] and "score" not in said[0]
    assert "2 of 2, after: score 1.000, success 1.000" in capsys.readouterr().err


class Letters:
    """An environment of somebody else. Everything that it does may go wrong."""

    name, system_prompt = "letters", ""
    broken = ""

    def __init__(self) -> None:
        self.num_closed = 0

    def tasks(self, split: str) -> Any:
        return np.arange(4)

    def signature(self, task_id: int) -> Any:
        return 7 if self.broken == "signature" else "letter"

    def session(self, training: bool) -> Any:
        if self.broken == "session":
            raise RuntimeError("no place")
        return LetterSession(self)

    def baselines(self) -> Any:
        if self.broken == "baselines":
            raise RuntimeError("no script")
        return {"reader": SaysNothing if self.broken == "act" else SaysWhatItReads}


class SaysNothing:
    def act(self, observation: str, info: dict[str, object]) -> Any:
        return None


class LetterSession:
    def __init__(self, suite: Letters) -> None:
        self.suite = suite

    def reset(self, task_id: int) -> Any:
        self.task_id = task_id
        return ("say a", {}) if self.suite.broken != "reset" else "say a"

    def step(self, action: str) -> Any:
        if self.suite.broken == "hangs":
            return asyncio.Event().wait()
        if self.suite.broken == "step" and self.task_id == 2:
            raise KeyError(action)
        return "", 1.0, True, False, {"score": 1.0, "success": True}

    async def close(self) -> None:
        await asyncio.sleep(0.01)
        self.suite.num_closed += 1


def play_letters(config: Config, monkeypatch: pytest.MonkeyPatch, broken: str = "") -> tuple[Letters, list[Result]]:
    suite = Letters()
    suite.broken = broken
    monkeypatch.setattr(evaluation, "make_suite", lambda env: suite)
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: ScriptedEngine(None))
    return suite, evaluation.evaluate_policies(config, {"policy": resolve_policy(config)})[0]


def test_task_ids_may_be_those_of_numpy(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    _, results = play_letters(config, monkeypatch)
    assert [(r.label, r.score, r.num_tasks) for r in results] == [("reader", 1.0, 4), ("policy", 1.0, 4)]


def test_all_sessions_are_closed_when_it_is_over(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play_letters(config, monkeypatch)[0].num_closed == 8


def test_all_sessions_are_closed_after_a_fault_too(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Letters()
    suite.broken = "step"
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: ScriptedEngine(None))
    with pytest.raises(EnvironmentFault, match="env letters: step raised KeyError"):
        evaluate(config, resolve_policy(config), suite, "scripted", "letters")
    assert suite.num_closed == 4


@pytest.mark.parametrize("baselines", [True, False])
def test_a_session_that_hangs_ends_it(config: Config, monkeypatch: pytest.MonkeyPatch, baselines: bool) -> None:
    config.actor.episode_timeout_s, config.evaluation.baselines = 0.05, baselines
    with pytest.raises(EnvironmentFault, match="step raised TimeoutError: not done in actor.episode_timeout_s=0.05"):
        play_letters(config, monkeypatch, "hangs")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("signature", r"signature\(0\) returned 7: a str is expected"),
        ("session", "session raised RuntimeError: no place"),
        ("baselines", "baselines raised RuntimeError: no script"),
        ("act", "act of its script returned None: a str is expected"),
        ("reset", r"reset\(0\) returned 'say a': \(observation str, info\) expected"),
    ],
)
def test_faults_of_the_environment_are_named(
    config: Config, monkeypatch: pytest.MonkeyPatch, broken: str, said: str
) -> None:
    with pytest.raises(EnvironmentFault, match=f"env letters: {said}"):
        play_letters(config, monkeypatch, broken)


def test_an_observation_that_leaves_no_room_for_a_completion_is_a_sentence(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LetterSession, "reset", lambda self, task_id: ("a" * 10_000 if task_id == 2 else "say a", {}))
    config.evaluation.baselines = False
    with pytest.raises(ConfigError, match=r"task 2: its first observation has .* tokens .*engine.max_length"):
        play_letters(config, monkeypatch)


class Client:
    """One that belongs to the event loop in which it was first used, as those of network libraries do."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    async def score(self) -> float:
        self.loop = self.loop or asyncio.get_running_loop()
        ready = self.loop.create_future()  # whoever awaits one of another loop gets a RuntimeError
        self.loop.call_soon(ready.set_result, 1.0)
        return float(await ready)


def test_all_that_is_played_shares_an_event_loop_and_what_belongs_to_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client()

    async def step(self: LetterSession, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        score = await client.score()
        return "", score, True, False, {"score": score, "success": True}

    suite = Letters()
    monkeypatch.setattr(LetterSession, "step", step)
    monkeypatch.setattr(suite, "baselines", lambda: {"one": SaysWhatItReads, "other": SaysWhatItReads}, raising=False)
    monkeypatch.setattr(evaluation, "make_suite", lambda env: suite)
    monkeypatch.setattr(evaluation, "make_engine", lambda config, policy, version: ScriptedEngine(None))
    policies = dict.fromkeys(("before", "after"), resolve_policy(config))
    results, _ = evaluation.evaluate_policies(config, policies)
    assert [(r.label, r.score) for r in results] == [("one", 1.0), ("other", 1.0), ("before", 1.0), ("after", 1.0)]


def test_a_start_is_played_too_and_the_difference_is_said(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scratch = resolve_policy(config)
    start = tmp_path / "start"
    scratch.rename(start)
    scripted = {start: ScriptedEngine(letter_id(config, "a"))}
    monkeypatch.setattr(
        evaluation, "make_engine", lambda config, policy, version: scripted.get(policy, ScriptedEngine(None))
    )
    monkeypatch.setattr(evaluation, "make_suite", lambda env: parrots_with_baselines(config))
    config.evaluation.start = str(start)
    assert evaluation.main(config, as_json=True) == 0
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert (
        "score 0.250 to 1.000, +0.750 [+0." in said
        and said.rstrip().endswith("], better")
        and " over 40 tasks: " in said
    )
    rows = json.loads(printed.out)
    assert [row["label"] for row in rows] == ["one letter", "reader", "before", "after"]
    for row in rows:
        assert row["task_ids"] == list(make_suite(config.env).tasks("test"))[:40] and len(row["scores"]) == 40
    assert [row["difference"] for row in rows[:3]] == [None] * 3
    change = rows[-1]["difference"]
    assert (change["to"], change["score"]) == ("before", 0.75)
    assert change["success"] == rows[3]["success"] - rows[2]["success"]
    assert change["success_interval"] == pytest.approx(change_interval(rows[2]["successes"], rows[3]["successes"]))
    assert [sum(row["successes"]) for row in rows] == [round(40 * row["success"]) for row in rows]
    assert change["score_interval"] == pytest.approx(change_interval(rows[2]["scores"], rows[3]["scores"]))
    config.evaluation.start = "no_such_policy"
    with pytest.raises(ConfigError, match="evaluation.start=no_such_policy"):
        evaluation.main(config)


def test_a_hard_catalogue_is_named(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env.webshop.catalogue=hard", "env.webshop.catalogue_seed=5", "evaluation.num_tasks=3"]
    results, _ = evaluation.evaluate_policies(load([*words, f"run.dir={config.run.dir}"]), {})
    assert {r.tasks for r in results} == {"webshop, hard catalogue 5, split test"} and len(results) == 3
    assert "webshop, hard catalogue 5, split test: 3 of" in capsys.readouterr().err
    results, _ = evaluation.evaluate_policies(load([words[-1], "agent.command=cat", f"run.dir={config.run.dir}"]), {})
    assert "agent, split test: 3 of" in capsys.readouterr().err and not any("hard" in r.tasks for r in results)


def test_the_unseen_catalogue_is_a_synthetic_one_where_there_are_data_files(config: Config) -> None:
    data = Path(__file__).parent / "fixtures" / "webshop" / "data"
    files = {"items": "items_shuffle", "attributes": "items_ins_v2", "human": "items_human_ins", "nouns": "nouns"}
    words = [
        "evaluation.num_tasks=20",
        "evaluation.split=train",
        "env.webshop.num_products=40",
        f"run.dir={config.run.dir}",
    ]
    of_files = [f"env.webshop.{key}={data / name}.json" for key, name in files.items()]
    unseen = ["env.webshop.goals=human", "evaluation.unseen_seed=7"]
    both, _ = evaluation.evaluate_policies(load([*words, *of_files, *unseen]), {})
    alone, _ = evaluation.evaluate_policies(load([*words, "env.webshop.catalogue_seed=7"]), {})
    found = [r for r in both if r.tasks.startswith("webshop, unseen catalogue 7, ")]
    assert [(r.label, r.turns, r.scores) for r in found] == [(r.label, r.turns, r.scores) for r in alone] and found
    same = ["env.webshop.catalogue_seed=7", "evaluation.unseen_seed=7"]
    once, _ = evaluation.evaluate_policies(load([*words, *same]), {})
    assert [r.scores for r in once] == [r.scores for r in alone], "the catalogue of the tasks is not played twice"
