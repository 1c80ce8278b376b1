"""Metrics reach metrics.jsonl and every writer that is named, one of the user's own included."""

import errno
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from impala_llm.config import ConfigError, load
from impala_llm.evaluate import Result, write_comparison
from impala_llm.observability.metrics import MetricError
from impala_llm.observability.writers import METRICS_FILE, MetricWriter, last_metrics
from impala_llm.processes.stop_signals import ToldToStop
from tests.helpers import events_of


def read_lines(directory: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]


def test_both_files_hold_the_same_numbers(tmp_path: Path) -> None:
    steps = {1: {"rollout/score": 0.25, "loss/policy": -0.5}, 2: {"rollout/score": 0.5, "env/invalid_actions": 2.0}}
    with MetricWriter(tmp_path / "run") as writer:
        for step, metrics in steps.items():
            writer.write(step, metrics)
    events = events_of(tmp_path / "run")
    assert set(events.Tags()["scalars"]) == {"rollout/score", "loss/policy", "env/invalid_actions"}
    assert [(event.step, event.value) for event in events.Scalars("rollout/score")] == [(1, 0.25), (2, 0.5)]
    lines = read_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    for line, metrics in zip(lines, steps.values(), strict=True):
        assert {name: value for name, value in line.items() if "/" in name} == metrics


def test_a_step_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"rollout/score": 1.0})
        assert read_lines(tmp_path)[0]["rollout/score"] == 1.0


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with MetricWriter(tmp_path) as writer:
            writer.write(step, {"rollout/score": 0.0})
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2]


def test_what_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"loss/policy": math.nan, "ratio/max": math.inf})
    line = read_lines(tmp_path)[0]
    assert line["loss/policy"] is None
    assert line["ratio/max"] is None


def test_the_last_step_of_training_is_found_whatever_lies_behind_it(tmp_path: Path) -> None:
    assert last_metrics(tmp_path / "none") == {}
    with MetricWriter(tmp_path, []) as writer:
        for step in range(1, 2000):
            writer.write(step, {"learner/version": step, "progress/tokens": 10.0 * step, "loss/policy": math.nan})
        writer.write(1999, {"evaluation/score": 0.5})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('not JSON\n{"learner/version": 5000, "progr')
    found = last_metrics(tmp_path)
    assert (found["step"], found["progress/tokens"]) == (1999, 19990.0) and "loss/policy" not in found


def test_a_line_that_a_full_disk_has_cut_just_before_its_end_is_removed(tmp_path: Path) -> None:
    """Else the next line would be appended to it, and neither could be read."""
    with MetricWriter(tmp_path, []) as writer:
        for step in (1, 2):
            writer.write(step, {"rollout/score": 0.5})
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with MetricWriter(tmp_path, [], after=2) as writer:
        writer.write(3, {"rollout/score": 0.5})
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 3]


def test_a_text_reaches_the_writers_that_take_texts(tmp_path: Path) -> None:
    with MetricWriter(tmp_path) as writer:
        writer.write_text("settings", "learner:\n  batch_size: 64")
        writer.write(1, {"rollout/score": 0.5})
    events = events_of(tmp_path)
    [event] = events.Tensors("settings/text_summary")
    [text] = event.tensor_proto.string_val
    assert text.decode().splitlines() == ["    learner:", "      batch_size: 64"]
    assert [line["step"] for line in read_lines(tmp_path)] == [1]


def test_an_undeclared_name_writes_nothing(tmp_path: Path) -> None:
    with MetricWriter(tmp_path) as writer:
        with pytest.raises(MetricError, match="unknown metric 'rollout/happiness'"):
            writer.write(1, {"rollout/score": 1.0, "rollout/happiness": 1.0})
        assert read_lines(tmp_path) == []


OWN = """
class Scores:
    def __init__(self, directory):
        self.file = open(directory / "scores.txt", "a")

    def write(self, step, metrics, time_s):
        print(step, metrics.get("rollout/score"), file=self.file, flush=True)

    def close(self):
        print("closed", file=self.file)
        self.file.close()

class Named:
    def __init__(self, directory):
        self.file = open(directory / "names.txt", "a")

    def write(self, step, metrics, time_s):
        print(step, metrics["evaluation/before_score"], metrics["evaluation/after_score"], file=self.file)

    def close(self):
        self.file.close()

class Full(Scores):
    def write(self, step, metrics, time_s):
        raise OSError("no space")

class NoRoom(Scores):
    def write(self, step, metrics, time_s):
        raise OSError(28, "No space left on device")

class NoRoomAtAll(Scores):
    def __init__(self, directory):
        raise OSError(28, "No space left on device")

class LoggedOut(Scores):
    def __init__(self, directory):
        raise RuntimeError("log in first")

class InPercent(Named):
    def write(self, step, metrics, time_s):
        metrics["rollout/score"] *= 100

class Buffered(Scores):
    def __init__(self, directory):
        self.file = open(directory / "scores.txt", "a")

    def write(self, step, metrics, time_s):
        print(step, file=self.file)
        if step == 2:
            raise ValueError("no number")

class Exiting(Scores):
    def write(self, step, metrics, time_s):
        raise SystemExit(3)

class ExitingAtItsEnd(Scores):
    def close(self):
        raise SystemExit(3)

class ExitingAtAText(Scores):
    def write_text(self, name, text):
        raise SystemExit(3)

class ExitingAtOnce(Scores):
    def __init__(self, directory):
        raise SystemExit("no key")

class Stopped(Scores):
    def write(self, step, metrics, time_s):
        from impala_llm.processes.stop_signals import ToldToStop
        raise ToldToStop(15)

class Interrupted(Scores):
    def write(self, step, metrics, time_s):
        raise KeyboardInterrupt

class Empty(Buffered):
    def __len__(self):
        return 0

class Timeless(Scores):
    def write(self, step, metrics):
        pass
"""


RESULTS = (("before", 0.25), ("after", 0.5))


@pytest.fixture
def own(user_folder: Path) -> Path:
    """The current directory, with writers of the user's own in it."""
    (user_folder / "my_writers.py").write_text(OWN)
    return user_folder


def test_a_writer_of_the_users_own_gets_the_same_numbers(own: Path) -> None:
    with MetricWriter(own / "run", ["my_writers:Scores"]) as writer:
        writer.write(7, {"rollout/score": 0.5})
    assert (own / "run" / "scores.txt").read_text() == "7 0.5\nclosed\n"
    assert read_lines(own / "run")[0]["rollout/score"] == 0.5
    assert not list((own / "run").glob("events.*"))


def test_a_writer_that_changes_what_it_gets_changes_it_for_itself(own: Path) -> None:
    metrics = {"rollout/score": 0.5}
    with MetricWriter(own / "run", ["my_writers:InPercent", "my_writers:Scores"]) as writer:
        writer.write(7, metrics)
    assert (own / "run" / "scores.txt").read_text() == "7 0.5\nclosed\n"
    assert metrics == {"rollout/score": 0.5}


def test_the_comparison_at_the_end_of_a_run_reaches_every_writer(own: Path) -> None:
    words = ["experiment=toy", f"run.dir={own / 'run'}", "run.metric_writers=[tensorboard,my_writers:Named]"]
    folder = own / "run" / "tensorboard"
    with MetricWriter(folder, []) as writer:
        writer.write(3, {"learner/version": 3.0})
    before, after = (
        Result(name, "toy", 2, score, (0, 1), 0.0, (0, 1), 1.0, 5.0, (score,) * 2, (0, 0), (0, 1))
        for name, score in RESULTS
    )
    write_comparison(load(words), before, after, "better")
    assert (folder / "names.txt").read_text() == "3 0.25 0.5\n"
    assert events_of(folder).Scalars("evaluation/after_score")[0].value == 0.5
    assert [line["step"] for line in read_lines(folder)] == [3], "evaluation.json has it"


def test_a_writer_that_fails_is_named_and_left_out(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with MetricWriter(own, ["my_writers:Full", "tensorboard"]) as writer:
        writer.write(1, {"loss/policy": 0.5})
        writer.write(2, {"rollout/score": 0.5})
    said = "".join(capfd.readouterr())
    assert said.count("metric writer my_writers:Full failed at step 1") == 1 and "no space" in said
    assert [line["step"] for line in read_lines(own)] == [1, 2]
    assert (own / "scores.txt").read_text() == "closed\n"
    events = events_of(own)
    assert set(events.Tags()["scalars"]) == {"loss/policy", "rollout/score"}


@pytest.mark.parametrize("name", ["Buffered", "Empty"])
def test_a_writer_that_is_left_out_is_closed_once_with_the_lines_that_it_has(own: Path, name: str) -> None:
    with MetricWriter(own, [f"my_writers:{name}"]) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"rollout/score": 0.5})
    assert (own / "scores.txt").read_text() == "1\n2\nclosed\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Exiting", "failed at step 1 and is left out: SystemExit: 3"),
        ("ExitingAtAText", "failed at the text 'settings' and is left out: SystemExit: 3"),
        ("ExitingAtItsEnd", "could not be closed: SystemExit: 3"),
    ],
)
def test_a_writer_that_exits_ends_no_training(
    own: Path, capfd: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    with MetricWriter(own, [f"my_writers:{name}", "my_writers:Named"]) as writer:
        writer.write_text("settings", "learner: {}")
        writer.write(1, {"evaluation/before_score": 0.5, "evaluation/after_score": 0.5})
    assert f"metric writer my_writers:{name} {said}" in "".join(capfd.readouterr())
    assert (own / "names.txt").read_text() == "1 0.5 0.5\n" and len(read_lines(own)) == 1


@pytest.mark.parametrize(("name", "signal"), [("Stopped", ToldToStop), ("Interrupted", KeyboardInterrupt)])
def test_a_signal_while_a_writer_writes_comes_through(own: Path, name: str, signal: type[BaseException]) -> None:
    with MetricWriter(own, [f"my_writers:{name}"]) as writer, pytest.raises(signal):
        writer.write(1, {"rollout/score": 0.5})


def test_a_full_disk_is_named_once_and_stops_no_training(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    full = own / "run"
    full.mkdir()
    (full / METRICS_FILE).symlink_to("/dev/full")
    with MetricWriter(full, ["my_writers:NoRoom", "my_writers:NoRoomAtAll", "my_writers:Scores"]) as writer:
        writer.write(1, {"rollout/score": 0.5})
        writer.write(2, {"rollout/score": 1.0})
    said = "".join(capfd.readouterr())
    assert len(said.splitlines()) == 1 and f"the disk of {full} is full" in said
    assert (full / "scores.txt").read_text().endswith("1 0.5\n2 1.0\nclosed\n")


@pytest.mark.parametrize("name", [METRICS_FILE, "tensorboard"])
def test_a_disk_that_was_full_costs_the_steps_until_there_is_room(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each writer, of which the other is on a disk with room."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with MetricWriter(tmp_path, retry_s=0.0) as writer:
        writer.write(1, {"rollout/score": 0.1})
        with monkeypatch.context() as patch:
            patch.setattr(*((math, "isfinite") if name == METRICS_FILE else (SummaryWriter, "add_scalar")), fail)
            writer.write(2, {"rollout/score": 0.2})
        if name == METRICS_FILE:
            with (tmp_path / METRICS_FILE).open("a") as file:
                file.write('{"step": 2, "rollout/sc')
        for step in (3, 4):
            writer.write(step, {"rollout/score": step / 10})
    written = {
        METRICS_FILE: [line["step"] for line in read_lines(tmp_path)],
        "tensorboard": [event.step for event in events_of(tmp_path).Scalars("rollout/score")],
    }
    assert written.pop(name) == [1, 3, 4]
    assert list(written.values()) == [[1, 2, 3, 4]]
    said = "".join(capfd.readouterr())
    assert "is full" in said and f"metric writer {name} writes again, from step 3 on" in said


def test_a_disk_that_stays_full_is_named_once_and_again_when_it_fills_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with MetricWriter(tmp_path, [], retry_s=0.0) as writer:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(math, "isfinite", fail)
                for step in (1, 2, 3):
                    writer.write(step, {"rollout/score": 0.1})
            writer.write(4, {"rollout/score": 0.4})
    said = "".join(capfd.readouterr())
    assert said.count("is full") == said.count("writes again, from step 4 on") == said.count("writes again") == 2


def test_a_writer_that_cannot_be_made_is_named(own: Path) -> None:
    with pytest.raises(ConfigError, match="my_writers:LoggedOut cannot be made: RuntimeError: log in first"):
        MetricWriter(own, ["my_writers:LoggedOut"])
    with pytest.raises(ConfigError, match="my_writers:ExitingAtOnce cannot be made: SystemExit: no key"):
        MetricWriter(own, ["my_writers:ExitingAtOnce"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("[tensorbord]", ["run.metric_writers=tensorbord is not known", "did you mean tensorboard?", "module:Class"]),
        ("[tensorboard,nowhere:Writer]", ["run.metric_writers=nowhere:Writer", "PYTHONPATH"]),
        ("['my_writers:Timeless']", ["its write takes (step, metrics), and is called with (step, metrics, time_s)"]),
        ("['my_writers:Full','my_writers:Full']", ["names the writer my_writers:Full twice", "name it once"]),
        (
            "[tensorboard,'impala_llm.observability.tensorboard:TensorBoardWriter']",
            ["names the writer impala_llm.observability.tensorboard:TensorBoardWriter twice"],
        ),
        ("['my_writers:Score']", ["run.metric_writers=my_writers:Score", "my_writers has no Score"]),
    ],
)
def test_a_writer_that_does_not_exist_is_refused(own: Path, names: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["experiment=toy", f"run.metric_writers={names}"])
    for word in said:
        assert word in str(caught.value)


ON_A_FULL_DISK = """
import sys
from pathlib import Path
from impala_llm.learning.ranks.parallel import exit_process
from impala_llm.observability.terminal import TerminalView
from impala_llm.observability.writers import MetricWriter

with MetricWriter(Path("."), ["my_writers:Full", "my_writers:NoRoom"]) as writer, TerminalView(2, sys.stdout) as view:
    view.status("no batch yet")
    for step in (1, 2):
        writer.write(step, {"rollout/score": 0.5})
        view.update(step, {"rollout/score": 0.5})
exit_process(4)
"""


@pytest.mark.system
def test_standard_output_on_a_full_disk_ends_no_training_and_leaves_its_exit_code(own: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", ON_A_FULL_DISK], cwd=own, stdout=full, stderr=full)
    assert ended.returncode == 4
    assert [line["step"] for line in read_lines(own)] == [1, 2]


def test_what_a_resumed_run_makes_again_replaces_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetricWriter(tmp_path) as writer:
        for step in range(1, 7):
            writer.write(step, {"rollout/score": step / 10})
    # TensorBoard reads files in the order of their names: by second, and within one as text, the 10th before the 9th.
    resumed_at = time.time() + 1
    monkeypatch.setattr(time, "time", lambda: resumed_at)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 7, "rollout/sc')
    with MetricWriter(tmp_path, after=4) as writer:
        assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4]
        for step in (5, 6, 7):
            writer.write(step, {"rollout/score": step / 100})
    scores = [0.1, 0.2, 0.3, 0.4, 0.05, 0.06, 0.07]
    assert [line["rollout/score"] for line in read_lines(tmp_path)] == scores
    events = events_of(tmp_path)
    assert [event.step for event in events.Scalars("rollout/score")] == list(range(1, 8))
    assert [event.value for event in events.Scalars("rollout/score")] == pytest.approx(scores)
