"""Evaluation inside of a run: when it is due, the results that are reported, and the policy that is kept."""

import errno
import json
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from impala_llm.config import ConfigError, load
from impala_llm.evaluation import in_run as in_run_evaluation
from impala_llm.evaluation.in_run import EvaluationRounds, InRunEvaluation
from impala_llm.evaluation.schedule import EvaluationSchedule
from impala_llm.gateway.tasks import suite_of
from impala_llm.learner import Learner
from impala_llm.learning.checkpoints.files import best_of
from impala_llm.learning.checkpoints.folder_owner import FolderTaken
from impala_llm.learning.checkpoints.kept_settings import keep_settings
from impala_llm.learning.checkpoints.resume import Start, how_to_start
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.observability.intervals import score_interval, wilson_interval
from impala_llm.observability.metrics import METRICS, MetricLog
from impala_llm.pipeline.transport.evaluation_tasks import Evaluation
from impala_llm.pipeline.transport.messages import EvaluationResult
from impala_llm.settings import EvaluationConfig
from tests.two_ranks import Meeting


def evaluation(
    scores: Sequence[float], version: int = 0, num_tasks: int | None = None, last_version: int | None = None
) -> Evaluation:
    last = version if last_version is None else last_version
    results = [EvaluationResult(7, i, s, s == 1.0, 20 + i, 2, version, last) for i, s in enumerate(scores)]
    return Evaluation(version, len(scores) if num_tasks is None else num_tasks, tuple(results), 3.0)


def schedule(update: int = 0, **settings: Any) -> EvaluationSchedule:
    return EvaluationSchedule(EvaluationConfig(**settings), update)


def test_it_is_due_at_the_start_and_then_after_so_many_updates() -> None:
    due = schedule(every_updates=10)
    assert due.is_due(0, 0.0)
    due.begun(0, 0.0)
    assert [update for update in range(25) if due.is_due(update, 1e9)] == list(range(10, 25))
    due.begun(12, 0.0)  # one was under way at 10
    assert not due.is_due(21, 0.0) and due.is_due(22, 0.0)
    assert due.is_new(12)
    due.observe(evaluation([0.5], 12), 14, 14)
    assert due.is_new(13) and not due.is_new(12)


def test_it_is_due_after_so_many_minutes_or_whichever_comes_first() -> None:
    due = schedule(every_minutes=2.0)
    due.begun(0, 30.0)
    assert not due.is_due(10**6, 149.9) and due.is_due(1, 150.0)
    both = schedule(every_minutes=2.0, every_updates=10)
    both.begun(0, 30.0)
    assert both.is_due(1, 150.0) and both.is_due(10, 31.0) and not both.is_due(9, 149.0)


def test_a_learner_that_goes_on_does_not_evaluate_at_once() -> None:
    due = schedule(update=7, every_updates=10)
    assert not due.is_due(16, 0.0) and due.is_due(17, 0.0)


def test_one_that_goes_on_without_a_checkpoint_counts_minutes_from_its_start() -> None:
    due = schedule(update=7, every_minutes=2.0)
    assert not due.is_due(7, 500.0)
    assert not due.is_due(8, 619.0) and due.is_due(9, 620.0)


def test_what_was_found_has_means_intervals_and_the_span_of_versions() -> None:
    scores = [1.0, 0.0, 0.5, 1.0]
    found = schedule(every_updates=1).observe(evaluation(scores, version=20, last_version=23), version=40, update=25)
    expected = {
        "evaluation/score": 0.625,
        "evaluation/success_rate": 0.5,
        "evaluation/episodes": 4.0,
        "evaluation/turns": 2.0,
        "evaluation/length_tokens": 21.5,
        "evaluation/version": 20.0,
        "evaluation/update": 5.0,
        "evaluation/last_version": 23.0,
        "evaluation/seconds": 3.0,
        "evaluation/best_score": 0.625,
        "evaluation/best_version": 20.0,
        "evaluation/best_update": 5.0,
        "evaluation/without_gain": 0.0,
    }
    assert {name: found.metrics[name] for name in expected} == expected
    assert (found.metrics["evaluation/score_low"], found.metrics["evaluation/score_high"]) == score_interval(scores)
    assert (found.metrics["evaluation/success_low"], found.metrics["evaluation/success_high"]) == wilson_interval(2, 4)
    assert set(found.metrics) <= set(METRICS)
    for part in ("update 5 (played by 5 to 8)", "score 0.625 [", "success 50.0% [", "4 of 4", "greedy", "best so"):
        assert part in found.text
    assert found.is_best


def test_no_weights_are_newer_than_the_learner_whatever_an_actor_says() -> None:
    found = schedule(every_updates=1).observe(evaluation([1.0], version=3, last_version=2**62), 9, 9)
    assert found.metrics["evaluation/last_version"] == 9.0


def test_the_best_is_the_highest_and_of_equals_the_first_and_patience_counts_the_others() -> None:
    due = schedule(every_updates=1, patience=2)
    outcomes = []
    for version, score in enumerate([0.2, 0.5, 0.5, 0.6, 0.1, 0.3]):
        assert not due.is_over
        found = due.observe(evaluation([score] * 4, version), version, version)
        outcomes.append((found.is_best, found.metrics["evaluation/without_gain"]))
    assert outcomes == [(True, 0), (True, 0), (False, 1), (True, 0), (False, 1), (False, 2)]
    assert due.best == (3, 0.6, 3) and due.is_over
    assert "the best is that of update 3 with 0.600" in found.text


def test_patience_counts_from_the_first_evaluation_of_a_policy_that_has_learned(tmp_path: Path) -> None:
    """Weights stay as they are up to the last update of the value head alone, and so do scores."""
    words = ["experiment=toy", "algorithm=ppo", "learner.value_warmup_updates=20", "learner.total_updates=100"]
    words += ["evaluation.every_updates=10", "evaluation.patience=2", f"run.dir={tmp_path}", "run.terminal=false"]
    config = load([*words, f"run.name=test-{uuid.uuid4().hex[:12]}"])
    with ExitStack() as stack:
        learner = Learner(config, Ranks("cpu"), stack, Start(), Mock(number=0))
        inside = learner.make_evaluation(suite_of(config), Mock(checkpoint=None), stack)
        assert inside is not None
        due, counted = inside.schedule, []
        for update in (0, 10, 20, 30, 40):
            assert not due.is_over
            found = due.observe(evaluation([0.5] * 4, version=update), update, update)
            counted.append(found.metrics["evaluation/without_gain"])
        assert counted == [0, 0, 0, 1, 2] and due.is_over
        # After a restart without a checkpoint the value head begins to learn again, and with a checkpoint it does not.
        learner.update = 60
        for origin, expected in ((Mock(checkpoint=None), [0, 0, 0, 1]), (Mock(), [0, 1, 2, 3])):
            inside = learner.make_evaluation(suite_of(config), origin, stack)
            assert inside is not None
            found = [
                inside.schedule.observe(evaluation([0.5] * 4, version=update), update, update).metrics
                for update in (60, 70, 80, 90)
            ]
            assert [each["evaluation/without_gain"] for each in found] == expected


def test_an_evaluation_without_the_slow_tasks_neither_makes_the_best_nor_ends_the_run() -> None:
    """19 tasks of 20 suffice."""
    due = schedule(every_updates=1, patience=1)
    assert due.observe(evaluation([0.5] * 20, 1), 1, 1).is_best
    few = due.observe(evaluation([1.0] * 18, 2, num_tasks=20), 2, 2)
    assert not few.is_best and "too few" in few.text and few.metrics["evaluation/score"] == 1.0
    due.observe(evaluation([0.4] * 18, 2, num_tasks=20), 2, 2)
    none = due.observe(evaluation([], 3, num_tasks=20), 3, 3)
    assert none.metrics == {"evaluation/episodes": 0.0, "evaluation/version": 3.0, "evaluation/update": 3.0}
    assert not none.is_best and "0 of 20" in none.text and not due.is_over
    due.observe(evaluation([0.4] * 19, 4, num_tasks=20), 4, 4)
    assert due.is_over


def test_the_state_goes_on_where_it_was() -> None:
    first = schedule(every_updates=10, patience=2)
    first.begun(10, 60.0)
    first.observe(evaluation([0.5, 0.7], 10), 12, 12)
    first.observe(evaluation([0.5, 0.6], 12), 14, 14)
    second = schedule(update=14, every_updates=10, patience=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.best == first.best == (10, 0.6, 10)
    assert not second.is_due(19, 0.0) and second.is_due(20, 0.0)
    second.observe(evaluation([0.5, 0.6], 16), 18, 18)
    assert second.is_over


class FakeReceiver:
    """Ends an evaluation when the test says so."""

    def __init__(self) -> None:
        self.published = 0
        self.is_evaluating = False
        self.num_actors = 1
        self.ended: Evaluation | None = None
        self.begun: list[tuple[list[int], float, float]] = []

    def begin_evaluation(self, task_ids: Sequence[int], temperature: float, timeout_s: float) -> int:
        self.is_evaluating = True
        self.begun.append((list(task_ids), temperature, timeout_s))
        return self.published

    def evaluation(self) -> Evaluation | None:
        ended, self.ended = self.ended, None
        if ended is not None:
            self.is_evaluating = False
        return ended


def make(tmp_path: Path, version: int = 0, **settings: Any) -> tuple[InRunEvaluation, FakeReceiver]:
    receiver: Any = FakeReceiver()
    receiver.published = version
    config = EvaluationConfig(**{"every_updates": 5, **settings})
    return InRunEvaluation(config, receiver, range(100), tmp_path, version), receiver


def save(inside: InRunEvaluation, version: int) -> None:
    inside.candidate.mkdir()
    (inside.candidate / "version").write_text(str(version))


def kept(tmp_path: Path) -> tuple[int, dict[str, float]]:
    folder = tmp_path / "policy-best"
    return int((folder / "version").read_text()), json.loads((folder / "evaluation.json").read_text())


def test_an_evaluation_is_of_a_published_version_and_one_at_a_time(tmp_path: Path) -> None:
    inside, receiver = make(tmp_path, run_tasks=3, run_temperature=0.5, run_timeout_s=9.0)
    assert inside.begin(0, 0, 0.0)
    assert receiver.begun == [([0, 1, 2], 0.5, 9.0)]
    receiver.published = 5
    assert not inside.begin(5, 5, 1.0), "one is under way"
    receiver.ended = evaluation([0.5] * 3, 0)
    inside.collect(5, 5)
    assert not inside.begin(6, 6, 1.0), "6 was not published"
    receiver.published = 7
    assert inside.begin(7, 7, 1.0) and not inside.begin(7, 7, 1.0, at_the_end=True)
    receiver.ended = evaluation([0.5] * 3, 7)
    inside.collect(8, 8)
    assert not inside.begin(7, 7, 1.0, at_the_end=True), "it was evaluated"
    receiver.published = 8
    assert inside.begin(8, 8, 1.0, at_the_end=True)


def test_versions_that_are_ahead_after_a_lost_host_make_no_evaluation_due(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is due by updates, and the user is told updates."""
    inside, receiver = make(tmp_path)
    assert inside.begin(0, 0, 0.0)
    save(inside, 0)
    receiver.ended = evaluation([0.5] * 4, 0)
    inside.collect(0, 0)
    later, receiver = make(tmp_path, version=3)
    later.load_state_dict(inside.state_dict())
    for update in (3, 4):
        receiver.published = update + 256
        assert not later.begin(update + 256, update, 0.0)
    receiver.published = 261
    assert later.begin(261, 5, 0.0)
    save(later, 261)
    receiver.ended = evaluation([0.6] * 4, 261)
    found = later.collect(262, 6)
    assert (found["evaluation/version"], found["evaluation/update"]) == (261, 5)
    assert (found["evaluation/best_version"], found["evaluation/best_update"]) == (261, 5)
    assert "evaluation of update 5:" in capsys.readouterr().out


def test_the_policy_of_the_best_evaluation_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside, receiver = make(tmp_path)
    for version, score in ((0, 0.2), (5, 0.6), (10, 0.4)):
        receiver.published = version
        assert inside.begin(version, version, 0.0)
        save(inside, version)
        receiver.ended = evaluation([score] * 4, version)
        assert inside.collect(version + 1, version + 1)["evaluation/score"] == pytest.approx(score)
        assert inside.collect(version + 1, version + 1) == {}
    found, metrics = kept(tmp_path)
    assert found == metrics["evaluation/version"] == 5 and metrics["evaluation/score"] == pytest.approx(0.6)
    assert (metrics["run_tasks"], metrics["run_temperature"]) == (64, 0.0)
    assert capsys.readouterr().out.count("learner: evaluation of update") == 3
    inside.close()
    assert [path.name for path in tmp_path.iterdir()] == ["policy-best"]


@pytest.mark.parametrize("when", ["saved", "kept"])
def test_a_policy_that_could_not_be_kept_is_neither_taken_for_another_nor_in_the_way_of_one(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, receiver = make(tmp_path)
    for version, score, best in ((0, 0.5, 0), (5, 0.4, 0), (10, 0.9, 0), (15, 0.8, 15)):
        receiver.published = version
        assert inside.begin(version, version, 0.0)
        if version != 10 or when == "kept":
            save(inside, version)
        receiver.ended = evaluation([score] * 4, version)
        with monkeypatch.context() as full:
            if version == 10:
                full.setattr(in_run_evaluation, "replace_folder", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
            found = inside.collect(version, version)
        assert kept(tmp_path)[0] == best and inside.schedule.best is not None
        assert inside.schedule.best.version == best == found.get("evaluation/best_version", 0)


def test_a_learner_that_goes_on_keeps_the_best_of_the_one_before_unless_it_finds_a_better_one(tmp_path: Path) -> None:
    inside, receiver = make(tmp_path)
    inside.begin(0, 0, 0.0)
    save(inside, 0)
    receiver.ended = evaluation([0.5] * 4, 0)
    inside.collect(1, 1)
    later, receiver = make(tmp_path, version=20)
    for version, score, best in ((25, 0.4, 0), (30, 0.6, 30)):
        receiver.published = version
        assert later.begin(version, version, 0.0)
        save(later, version)
        receiver.ended = evaluation([score] * 4, version)
        later.collect(version, version)
        assert kept(tmp_path)[0] == best


@pytest.mark.parametrize(
    "content",
    ["[]", "null", '{"evaluation/version": null, "evaluation/score": null}', '{"evaluation/version": Infinity}'],
)
def test_figures_of_the_best_policy_that_are_damaged_end_no_learner(tmp_path: Path, content: str) -> None:
    (tmp_path / "policy-best").mkdir()
    (tmp_path / "policy-best" / "evaluation.json").write_text(content)
    inside, _ = make(tmp_path, version=20)
    assert inside.schedule.best is None


def test_the_last_evaluation_is_begun_again_by_a_learner_that_goes_on_amid_it(tmp_path: Path) -> None:
    inside, receiver = make(tmp_path, version=99)
    receiver.published = 100
    assert inside.begin(100, 100, 0.0, at_the_end=True)
    later, receiver = make(tmp_path, version=100)
    later.load_state_dict(json.loads(json.dumps(inside.state_dict())))
    assert later.begin(100, 100, 0.0, at_the_end=True)
    receiver.ended = evaluation([0.5] * 4, 100)
    later.collect(100, 100)
    last, _ = make(tmp_path, version=100)
    last.load_state_dict(json.loads(json.dumps(later.state_dict())))
    assert not last.begin(100, 100, 0.0, at_the_end=True)


def test_a_saved_state_does_not_forget_a_better_policy_that_was_kept_since(tmp_path: Path) -> None:
    inside, receiver = make(tmp_path, patience=2)
    states = []
    for version, score in ((0, 0.5), (5, 0.7)):
        receiver.published = version
        inside.begin(version, version, 0.0)
        save(inside, version)
        receiver.ended = evaluation([score] * 4, version)
        inside.collect(version, version)
        states.append(json.loads(json.dumps(inside.state_dict())))
    later, receiver = make(tmp_path, version=3, patience=2)
    later.load_state_dict(states[0] | {"without_gain": 1})  # counted against an older best one
    receiver.published = 5
    assert later.begin(5, 5, 0.0)
    save(later, 50)
    receiver.ended = evaluation([0.6] * 4, 5)
    later.collect(5, 5)
    assert kept(tmp_path)[0] == 5 and later.schedule.best == (5, pytest.approx(0.7), 5)
    assert later.schedule.best == (5, pytest.approx(0.7), 5) and not later.is_over, "one evaluation since the best"
    (tmp_path / "policy-best" / "evaluation.json").write_text("not JSON")
    anew, _ = make(tmp_path, version=9)
    assert anew.schedule.best is None


@pytest.mark.parametrize("other", [{"run_tasks": 5}, {"run_temperature": 0.5}], ids=str)
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_evaluations_of_other_tasks_or_temperature_are_not_compared(
    has_checkpoint: bool, other: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, receiver = make(tmp_path, patience=2)
    for version, score in ((0, 0.9), (5, 0.8)):
        receiver.published = version
        assert inside.begin(version, version, 0.0)
        save(inside, version)
        receiver.ended = evaluation([score] * 4, version)
        inside.collect(version, version)
    for settings, score, without_gain in (({}, 0.7, 2 if has_checkpoint else 1), (other, 0.6, 0)):
        later, receiver = make(tmp_path, version=5, patience=2, **settings)
        if has_checkpoint:
            later.load_state_dict(json.loads(json.dumps(inside.state_dict())))
        receiver.published = 10
        assert later.begin(10, 10, 0.0)
        save(later, 10)
        receiver.ended = evaluation([score] * 4, 10)
        assert later.collect(10, 10)["evaluation/without_gain"] == without_gain
    assert kept(tmp_path)[0] == 10
    assert capsys.readouterr().out.count("is of other evaluation.run_tasks or evaluation.run_temperature") == 1


def test_a_best_policy_of_these_tasks_outlives_a_checkpoint_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learner that found it was killed before it had written one of its own."""
    inside, receiver = make(tmp_path, run_tasks=4)
    checkpoint = json.loads(json.dumps(inside.state_dict()))
    for version, score in ((10, 0.9), (15, 0.2)):
        later, receiver = make(tmp_path, version=version, run_tasks=5)
        later.load_state_dict(checkpoint)
        assert later.begin(version, version, 0.0)
        save(later, version)
        receiver.ended = evaluation([score] * 5, version)
        later.collect(version, version)
    assert kept(tmp_path)[0] == 10 and "is of other evaluation.run_tasks" not in capsys.readouterr().out


def test_patience_ends_a_run_whose_best_policy_cannot_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk: a policy that is worse than one that could not be kept is no gain, and one that is better is."""
    inside, receiver = make(tmp_path, patience=2)
    counted = []
    for version, score in ((0, 0.8), (5, 0.7), (10, 0.9), (15, 0.8), (20, 0.7)):
        receiver.published = version
        assert inside.begin(version, version, 0.0), "the candidate is never saved"
        receiver.ended = evaluation([score] * 4, version)
        counted.append(inside.collect(version, version)["evaluation/without_gain"])
        saved, (inside, receiver) = inside.state_dict(), make(tmp_path, version=version, patience=2)
        inside.load_state_dict(json.loads(json.dumps(saved)))
    assert counted == [0, 1, 0, 1, 2] and inside.is_over
    assert "evaluation.patience=2: no evaluation since that of update 10 was better" in capsys.readouterr().out


def test_patience_ends_the_run_and_begins_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inside, receiver = make(tmp_path, patience=1)
    for version in (0, 5):
        receiver.published = version
        assert inside.begin(version, version, 0.0) and not inside.is_over
        save(inside, version)
        receiver.ended = evaluation([0.5] * 4, version)
        inside.collect(version, version)
    assert inside.is_over and "evaluation.patience=1" in capsys.readouterr().out
    receiver.published = 10
    assert not inside.begin(10, 10, 0.0) and not inside.begin(10, 10, 0.0, at_the_end=True)


def test_a_learner_of_a_run_that_patience_has_ended_trains_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a policy that could not be saved, or with less patience: it says why, and the next start is refused."""
    words = ["experiment=toy", "evaluation.every_updates=3", f"run.dir={tmp_path}", "run.terminal=false"]
    words.append(f"run.name=test-{uuid.uuid4().hex[:12]}")
    found = [0, 0.5, 0]
    state = {"last": [3, 1.0], "observed": 3, "best": found, "highest": found, "without_gain": 2}
    with monkeypatch.context() as ended, ExitStack() as stack:
        ended.setattr(EvaluationSchedule, "state_dict", lambda _schedule: state)
        learner = Learner(load(words), Ranks("cpu"), stack, Start(), Mock(number=0))
        learner.update = learner.version = 4
    for patience, share in ((2, 1.0), (3, 4 / 100)):
        config = load([*words, f"evaluation.patience={patience}", "learner.total_updates=100"])
        keep_settings(config)
        with ExitStack() as stack:
            learner = Learner(
                config, Ranks("cpu"), stack, Start(run_id=learner.endpoint.run_dir.run_id), Mock(number=0)
            )
            assert (learner.progress, learner.update_end().patience) == (share, 2 if share == 1 else 0)
        assert ("learner: the run ends early, by evaluation.patience=2" in capsys.readouterr().out) == (share == 1)
        if share == 1:
            with pytest.raises(ConfigError, match="has finished at update 4: raise evaluation.patience=2"):
                how_to_start(config)
        else:
            assert how_to_start(config).run_id is not None
    assert best_of(tmp_path) == "update-000004", "the first learner did not mark it"


@pytest.mark.parametrize("score", [0.2, 0.9])
def test_patience_that_the_last_evaluation_exhausts_is_noted(tmp_path: Path, score: float) -> None:
    inside, receiver = make(tmp_path, patience=1)
    receiver.published = 100
    found = rounds(inside, OneRank())
    for result in (0.5, score):
        inside.begin(100, 100, 0.0, at_the_end=True)
        receiver.ended = evaluation([result] * 4, 100)
        assert not found.is_over
        found.finish(101, 101, 0.0, lambda: False, *DO_NOTHING)
    assert found.is_over == (score < 0.5)


def test_an_evaluation_of_a_learner_whose_run_another_has_gone_on_with_leaves_the_policies_alone(
    tmp_path: Path,
) -> None:
    words = ["experiment=toy", "evaluation.every_updates=3", f"run.dir={tmp_path}", "run.terminal=false"]
    config = load([*words, f"run.name=test-{uuid.uuid4().hex[:12]}"])
    other = {"id": "other", "host": "node-7", "space": "another boot", "pid": 12, "started": 1.0, "beats": 0}
    with pytest.raises(FolderTaken), ExitStack() as stack:
        learner = Learner(config, Ranks("cpu"), stack, Start(), Mock(number=0))
        (tmp_path / "owner.json").write_text(json.dumps(other))
        assert learner.owner.is_taken()
        learner.finish_evaluation()
    assert (tmp_path / "policy-candidate").is_dir(), "it is the other learner's"


DO_NOTHING: tuple[Callable[[], None], Callable[[], None]] = (lambda: None, lambda: None)
"""In place of publishing the last version, and of writing metrics."""


class TwoProcesses:
    """One of two processes of a rank, in threads: a sum that the other never joins is an error."""

    is_sharded = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank
        self.num_sums = 0

    def sum(self, numbers: Sequence[float], of_processes: bool = False) -> list[float]:
        self.num_sums += 1
        mine = list(numbers) if of_processes or self.rank == 0 else [0.0] * len(numbers)
        return [float(sum(pair)) for pair in zip(*self.meeting.exchange(self.rank, mine), strict=True)]


def rounds(inside: InRunEvaluation | None, ranks: Any) -> EvaluationRounds:
    return EvaluationRounds(
        EvaluationConfig(every_updates=5), ranks, inside, MetricLog(), lambda _target: None, lambda *_best: None
    )


@pytest.mark.parametrize("told", [0, 1])
def test_all_ranks_leave_the_wait_for_the_last_evaluation_together(tmp_path: Path, told: int) -> None:
    """Though only one process is told to stop, when it has waited for a while."""
    inside, _ = make(tmp_path)
    assert inside.begin(0, 0, 0.0)
    meeting = Meeting()
    ranks = [TwoProcesses(meeting, rank) for rank in (0, 1)]

    def finish(rank: int) -> bool:
        def stop() -> bool:
            return rank == told and ranks[rank].num_sums >= 2

        return rounds(inside if rank == 0 else None, ranks[rank]).finish(0, 0, 0.0, stop, *DO_NOTHING)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(finish, (0, 1))) == [True, True]
    assert ranks[0].num_sums == ranks[1].num_sums == 3


class OneRank:
    is_sharded = False

    def sum(self, numbers: list[float], of_processes: bool = False) -> list[float]:
        return numbers


class Clock:
    """Time that goes on while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[float], object] = lambda _now: None) -> None:
        self.now, self.then = 0.0, then
        monkeypatch.setattr("impala_llm.evaluation.in_run.time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then(self.now)


@pytest.mark.parametrize(("num_actors", "waited_s"), [(0, 10.0), (1, 610.0)], ids=["all lost", "none takes a task"])
def test_an_evaluation_that_nobody_plays_is_awaited_once_and_no_other_is_begun(
    tmp_path: Path, num_actors: int, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 s for the evaluation and 10 s for an actor."""
    inside, receiver = make(tmp_path)
    assert inside.begin(0, 0, 0.0)
    receiver.published, receiver.num_actors = 7, num_actors
    clock = Clock(monkeypatch)
    assert not rounds(inside, OneRank()).finish(7, 7, 0.0, lambda: False, *DO_NOTHING)
    assert clock.now == pytest.approx(waited_s, abs=0.3) and len(receiver.begun) == 1


def test_an_actor_that_is_started_again_plays_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, receiver = make(tmp_path)
    assert inside.begin(0, 0, 0.0)
    receiver.num_actors = 0

    def then(now: float) -> None:
        receiver.num_actors = int(now > 5)
        if now > 30:
            receiver.ended = evaluation([0.5] * 4, receiver.published if len(receiver.begun) == 2 else 0)

    Clock(monkeypatch, then)
    receiver.published = 7
    assert not rounds(inside, OneRank()).finish(7, 7, 0.0, lambda: False, *DO_NOTHING)
    assert len(receiver.begun) == 2 and not receiver.is_evaluating


def test_a_last_version_that_was_not_due_is_published_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of 7 updates with learner.sync_interval=5; an evaluation that is under way ends before."""
    inside, receiver = make(tmp_path)
    assert inside.begin(0, 0, 0.0)
    receiver.published = 5

    def then(_now: float) -> None:
        receiver.ended = evaluation([0.5] * 4, receiver.published if len(receiver.begun) == 2 else 0)

    def publish() -> None:
        assert not receiver.is_evaluating
        receiver.published = 7

    Clock(monkeypatch, then)
    assert not rounds(inside, OneRank()).finish(7, 7, 0.0, lambda: False, publish, lambda: None)
    assert len(receiver.begun) == 2 and not inside.schedule.is_new(7)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["evaluation.patience=3"], "without evaluations inside of the run: set evaluation.every_updates=50"),
        (
            ["evaluation.every_minutes=3", "learner.sync_interval=null", "algorithm.max_staleness=null"],
            "evaluation.every_minutes=3.0 cannot go with learner.sync_interval=null",
        ),
        (["evaluation.every_updates=0"], "evaluation.every_updates=0 is out of range"),
        (["evaluation.run_share=1.5"], "evaluation.run_share=1.5 is out of range"),
    ],
)
def test_settings_that_cannot_work_are_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(["experiment=toy", *words])
