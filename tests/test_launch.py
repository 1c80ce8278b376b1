"""The processes that a run would start, their shares of the cores, and messages on dead actors. Starts
no process."""

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from impala_llm import cli, launch
from impala_llm.config import ConfigError, load, threads_per_process
from impala_llm.gpus import deal_gpus
from impala_llm.launch import child_environment
from impala_llm.pipeline.network.keys import make_keys
from impala_llm.pipeline.shm.actor_claims import claimed_servers
from impala_llm.pipeline.shm.run_directory import RunDirectory, remove_run_dir
from impala_llm.processes import cgroups, child_processes
from impala_llm.processes.child_processes import FAMILY, MAX_RESTARTS, Child, exit_reason, keep_alive
from impala_llm.processes.supervised import HUGE_PAGES

OVERRIDES = ["experiment=toy", "actor.num_actors=3", "learner.num_ranks=2"]


class PlayedClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class PlayedChild(Child):
    """A child whose process is a number: its exit code, None while it runs."""

    def __init__(self, code: int | None, clock: PlayedClock | None = None) -> None:
        super().__init__("actor 7", [], None, {FAMILY: "x"}, clock=clock or PlayedClock())
        self.code = code
        self.worked = False
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def has_worked(self) -> bool:
        return self.worked

    def poll(self) -> int | None:
        return self.code


def test_a_run_is_a_learner_and_its_actors() -> None:
    config = load(OVERRIDES)
    learner, *actors = launch.plan(config, OVERRIDES)
    assert learner.command == [sys.executable, str(launch.PACKAGE / "learner.py"), *OVERRIDES]
    assert learner.num_ranks == 2
    assert [child.name for child in actors] == ["actor 0", "actor 1", "actor 2"]
    for index, actor in enumerate(actors):
        assert actor.command == [
            sys.executable,
            str(launch.PACKAGE / "actor.py"),
            "--index",
            str(index),
            *OVERRIDES,
        ]
        assert actor.log == Path(config.run.dir) / "logs" / f"actor-{index}.log"


def test_actors_beside_those_of_another_supervisor_have_names_and_logs_of_their_own() -> None:
    config = load(["experiment=toy", "actor.num_actors=2"])
    actors = launch.plan_actors(config, [], deal_gpus(config, []), [3, 5])
    assert [actor.name for actor in actors] == ["actor 3", "actor 5"]
    assert [actor.command[3] for actor in actors] == ["3", "5"]
    assert actors[1].log == Path(config.run.dir) / "logs" / "actor-5.log"


def have_cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have so many cores, also where the tests run in a container with a limit, and no limit of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(number)), raising=False)
    monkeypatch.setattr(cgroups, "ROOT", Path("/nowhere"))


def test_cores_are_divided_among_all_processes_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    have_cores(monkeypatch, 16)
    config = load(OVERRIDES)
    assert threads_per_process(config) == 3  # 16 cores, 2 ranks and 3 actors
    children = launch.plan(config, OVERRIDES)
    assert {child.environment["OMP_NUM_THREADS"] for child in children} == {"3"}
    assert {child.environment["MKL_NUM_THREADS"] for child in children} == {"3"}
    assert launch.plan_actors(config, OVERRIDES, deal_gpus(config, []))[0].environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("limit", "expected"), [("1", "1"), (" 2", "2"), ("8", "3"), ("", "3"), ("0", "3"), ("2,1", "2")]
)
def test_processes_have_no_more_threads_than_the_environment_says(
    limit: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_cores(monkeypatch, 16)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    children = launch.plan(load(OVERRIDES), OVERRIDES)
    assert {child.environment["OMP_NUM_THREADS"] for child in children} == {expected}


def test_the_limit_that_torchrun_sets_for_several_ranks_is_none_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    have_cores(monkeypatch, 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert threads_per_process(load(OVERRIDES)) == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # for one rank it sets none
    assert threads_per_process(load(OVERRIDES)) == 1


def test_ranks_that_the_supervisor_starts_obey_the_users_limit_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    have_cores(monkeypatch, 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = load(OVERRIDES)
    [learner] = [child for child in launch.plan(config, OVERRIDES) if child.num_ranks is not None]
    for name, value in (learner.environment | learner.rank_environment(0, "token")).items():
        monkeypatch.setenv(name, value)
    assert threads_per_process(config) == 1


def test_the_learners_ranks_take_no_cores_of_a_host_of_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_keys(tmp_path / "keys")
    have_cores(monkeypatch, 32)
    words = ["experiment=toy", "learner.num_ranks=4", f"pipeline.keys={tmp_path / 'keys'}"]
    connect, bind = "pipeline.connect=tcp://127.0.0.1:7400", "pipeline.bind=tcp://127.0.0.1:7400"
    assert threads_per_process(load([*words, connect, "actor.num_actors=1"])) == 32
    assert threads_per_process(load([*words, connect, "actor.num_actors=0"])) == 32
    assert threads_per_process(load([*words, connect, bind, "actor.num_actors=1"])) == 6


def test_each_process_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    children = launch.plan(load(OVERRIDES), OVERRIDES)
    assert [child.environment["CUDA_VISIBLE_DEVICES"] for child in children] == ["4,5", "6", "7", "6"]


@pytest.mark.parametrize("engine", ["engine=torch", "engine=sglang"])
@pytest.mark.parametrize("gpus", ["", "4,5"])
def test_a_learner_alone_is_a_run(engine: str, gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    words = ["experiment=toy", "actor.num_actors=0", engine]
    [learner] = launch.plan(load(words), words)
    assert learner.name == "learner"


def test_a_learner_alone_says_how_actors_join_it() -> None:
    config = load(["experiment=toy", "actor.num_actors=0"])
    assert "impala-llm actors --config outputs/toy/config.yaml --num-actors N`" in launch.how_to_join(config)
    config.pipeline.bind = "tcp://0.0.0.0:7411"
    assert "pipeline.connect=tcp://LEARNER_HOST:7411" in launch.how_to_join(config)
    config.run.dir = "/runs of jürgen (2)/toy"
    assert "actors --config '/runs of jürgen (2)/toy/config.yaml' --num-actors N" in launch.how_to_join(config)


def test_actors_that_connect_to_a_learner_of_their_own_host_are_told_to_leave_that_out(tmp_path: Path) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    words = ["experiment=toy", f"run.name={name}", f"run.dir={tmp_path}", "run.terminal=false"]
    make_keys(tmp_path / "keys")
    words += ["pipeline.connect=tcp://127.0.0.1:7411", f"pipeline.keys={tmp_path}/keys"]
    with RunDirectory.create(name), pytest.raises(ConfigError, match="connect=tcp://127.0.0.1:7411 .*: leave it out"):
        launch.supervise_actors(load(words), words)


def test_actors_remove_nothing_that_a_learner_has_left_on_their_host(tmp_path: Path) -> None:
    name = f"test-{uuid.uuid4().hex[:12]}"
    words = ["experiment=toy", f"run.name={name}", f"run.dir={tmp_path}", "run.terminal=false"]
    make_keys(tmp_path / "keys")
    words += ["pipeline.connect=tcp://127.0.0.1:7411", f"pipeline.keys={tmp_path}/keys"]
    with RunDirectory.create(name, output=tmp_path / "other") as run:
        run.keep()
    try:
        with pytest.raises(ConfigError, match=f"run.name={name}: .*run.dir={tmp_path}/other .*remove that folder"):
            launch.supervise_actors(load(words), words)
        assert run.path.is_dir()
    finally:
        remove_run_dir(name)


def test_each_process_of_each_run_is_a_family_of_its_own() -> None:
    """Processes that one has left are killed before it starts again, and the others play on."""
    config = load(OVERRIDES)
    families = [child.environment[FAMILY] for _ in range(2) for child in launch.plan(config, OVERRIDES)]
    assert len(set(families)) == 8
    assert FAMILY not in os.environ


def test_processes_find_the_package_wherever_they_start() -> None:
    for child in launch.plan(load(OVERRIDES), OVERRIDES):
        assert child.environment["PYTHONPATH"].split(os.pathsep)[0] == str(launch.PACKAGE.parent)


def test_a_dry_run_names_all_processes_and_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    text = launch.dry_run(load(OVERRIDES), OVERRIDES)
    for word in ("# learner, 2 ranks: ", "# actor 0: ", "# actor 2: ", "num_actors: 3", "# threads a process: "):
        assert word in text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (1, "exit code 1"),
        (-signal.SIGKILL, "killed by SIGKILL"),
        (-6, "killed by SIGABRT"),
        (-35, "killed by signal 35"),
    ],
)
def test_exit_reasons_are_for_people(code: int, expected: str) -> None:
    assert exit_reason(code) == expected


def test_a_dead_actor_is_reported_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    child = Child("actor 0", [], tmp_path / "actor-0.log", {})
    assert child.last_log_line() == ""
    (tmp_path / "actor-0.log").write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(20)))
    assert child.last_log_line() == f": line 19 (more in {tmp_path / 'actor-0.log'})"


def test_a_dead_actor_starts_again_after_a_moment(capfd: pytest.CaptureFixture[str]) -> None:
    clock = PlayedClock()
    actor = PlayedChild(-9, clock)
    assert keep_alive(actor, final=(0,))
    said = capfd.readouterr().err
    assert "actor 7" in said and "SIGKILL" in said
    assert actor.starts == 0
    clock.now += 0.9
    assert keep_alive(actor, final=(0,)) and actor.starts == 0
    clock.now += 0.2
    assert keep_alive(actor, final=(0,)) and actor.starts == 1
    actor.code = None
    assert keep_alive(actor, final=(0,)) and actor.starts == 1


def test_one_that_keeps_dying_waits_longer_and_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    clock = PlayedClock()
    actor = PlayedChild(1, clock)
    waits = []
    while keep_alive(actor, final=(0,)):
        died = clock.now
        clock.now = actor.restart_at
        keep_alive(actor, final=(0,))
        waits.append(clock.now - died)
    assert waits == [min(30.0, 2.0**n) for n in range(MAX_RESTARTS)]
    assert actor.starts == MAX_RESTARTS
    said = "".join(capfd.readouterr())
    assert said.count(" died (") == MAX_RESTARTS + 1 and said.count("and is not started again") == 1


@pytest.mark.parametrize("most", [launch.MAX_LEARNER_RESTARTS, MAX_RESTARTS])
def test_a_long_life_without_progress_is_no_excuse(most: int) -> None:
    clock = PlayedClock()
    child = PlayedChild(1, clock)
    for _ in range(2 * most):
        clock.now += 61
        if not keep_alive(child, final=(0,), most=most):
            break
        clock.now = max(clock.now, child.restart_at)
        keep_alive(child, final=(0,), most=most)
    assert child.starts == most


def test_one_that_has_made_progress_starts_quickly_again() -> None:
    clock = PlayedClock()
    actor = PlayedChild(1, clock)
    actor.restarts = MAX_RESTARTS
    actor.worked = True
    assert keep_alive(actor, final=(0,))
    assert actor.restart_at == clock.now + 1.0


def test_settings_with_which_an_actor_has_played_are_known_to_work() -> None:
    """An environment that is away for a minute ends the actor that has met it, and not the run."""
    clock = PlayedClock()
    unfit, actor = PlayedChild(2, clock), PlayedChild(2, clock)
    assert not keep_alive(unfit, final=(0, 2), unless_worked=(2,))
    actor.worked = True
    for _ in range(3):  # also where the next attempts play nothing
        assert keep_alive(actor, final=(0, 2), unless_worked=(2,))
        actor.worked = False
        clock.now = actor.restart_at
        assert keep_alive(actor, final=(0, 2), unless_worked=(2,))
    assert actor.starts == 3


def test_no_signal_goes_to_the_number_of_a_process_that_ended_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of another program by then."""
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda number, _signal: signalled.append(number))
    children = [
        Child(name, [sys.executable, "-c", f"exit({code})"], None, dict(os.environ) | {FAMILY: name})
        for name, code in (("has ended", 0), ("dies", 1))
    ]
    for child in children:
        child.start()
        child.processes[0].wait()
    ended, dying = (child.processes[0].pid for child in children)
    for _ in range(3):
        assert not any([keep_alive(child, final=(0,), most=0) for child in children])
    child_processes.end(children, polite=False)
    assert signalled.count(ended) == 0 and signalled.count(dying) <= 1, "at once, for what is left of its group"


def test_a_process_whose_log_cannot_be_written_starts_without_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").touch()  # a file, where the folder should be
    log = tmp_path / "logs" / "actor-0.log"
    child = Child("actor 0", [sys.executable, "-c", "print('said'); exit(7)"], log, dict(os.environ) | {FAMILY: "x"})
    child.start()
    assert child.processes[0].wait() == 7
    out, said = capfd.readouterr()
    assert f"{log} cannot be written (Not a directory): what actor 0 prints is lost" in said and "said" not in out


def test_who_was_told_to_end_stays_ended() -> None:
    for code in (0, 3):
        actor = PlayedChild(code)
        assert not keep_alive(actor, final=(0, 3))
        assert actor.restart_at == 0.0


def test_actors_do_not_take_the_servers_of_others(tmp_path: Path) -> None:
    """Two commands with the same settings, which deal the same servers to their actors."""
    url = f"http://{uuid.uuid4().hex}:30000"
    words = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex}", f"run.dir={tmp_path / 'run'}"]
    words += ["engine=sglang", f"engine.urls=[{url}]", "actor.num_actors=1"]
    with claimed_servers([url]), pytest.raises(ConfigError, match=f"engine.urls has {url}, which another command on"):
        launch.supervise_actors(load(words), words)
    assert not (tmp_path / "run").exists()


def test_actors_alone_refuse_bad_settings(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert launch.main(["experiment=toy", "actor.num_actors=0"]) == 2
    assert "actor.num_actors=0" in capfd.readouterr().err


def test_huge_pages_are_asked_for_where_memory_is_given_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    every, none = ([f"learner.activation_checkpointing={n}"] for n in (1, 0))
    assert child_environment(load(every), ())[HUGE_PAGES] == "1" and HUGE_PAGES not in child_environment(load(none), ())


def test_what_actors_say_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = PlayedChild(None)

    class Actor(PlayedChild):
        def receive(self) -> list[dict[str, Any]]:
            learner.code = self.code = launch.STOPPED  # which ends the loop
            return [{"say": "a server is waited for"}]

    monkeypatch.setattr(launch, "plan", lambda *_: [learner, Actor(None)])
    monkeypatch.setattr(launch, "plan_actors", lambda *_: [Actor(None)])
    words = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex}", f"run.dir={tmp_path / 'run'}"]
    for supervise in (launch.supervise, launch.supervise_actors):
        assert supervise(load(words), words) == 0
        assert "a server is waited for" in capsys.readouterr().out.splitlines()


def test_what_other_code_writes_into_the_pipe_of_a_process_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A JSON object with the right names and values of other types."""

    class Learner(PlayedChild):
        def receive(self) -> list[dict[str, Any]]:
            return [
                *({"update": [1, 2, 3]}, {"update": ["1", {}, None]}, {"update": [1, {}, "x"]}),
                *({"compute": ["a", "b", "c"]}, {"wait": 3}),
                {"update": [7, {"rollout/window_score": "x", "progress/seconds": None, "actor/connected": 5}, 0.5]},
            ]

    monkeypatch.setattr(launch, "plan", lambda *_: [Learner(launch.STOPPED)])
    words = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex}", f"run.dir={tmp_path / 'run'}"]
    assert launch.supervise(load(words), words) == 0
    assert re.search(r"update 7 \(50%\).* actors 5 .* score - ", capsys.readouterr().out)


def test_standard_output_on_a_full_disk_ends_no_run_and_leaves_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Learner(PlayedChild):
        def receive(self) -> list[dict[str, Any]]:
            return [{"say": "learner: the policy could not be saved"}]

    monkeypatch.setattr(launch, "plan", lambda *_: [Learner(launch.NOT_SAVED)])
    words = ["experiment=toy", f"run.name=test-{uuid.uuid4().hex}", f"run.dir={tmp_path / 'run'}"]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["train", *words]) == launch.NOT_SAVED
