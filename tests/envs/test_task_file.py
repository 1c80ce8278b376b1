"""A file of tasks with a verifier as an environment."""

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from impala_llm.config import ConfigError, load
from impala_llm.envs import contract, make_suite
from impala_llm.envs.answers import exact, maths, number
from impala_llm.envs.base import SPLITS
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.envs.scoring_process import ScoringError, ScoringProcess
from impala_llm.envs.single_turn import SingleTurnSession
from impala_llm.processes.limited_warnings import RateLimitedWarnings
from impala_llm.settings import PACKAGE
from tests.helpers import write_namesakes

VERIFIERS = """
import asyncio, os, sys, time

def longer(answer, task, least=0):
    print("this is no reply")
    return len(answer) > len(task["answer"]) + least

async def waiting(answer, task):
    await asyncio.sleep(0)
    return 0.5

class Constant:
    async def __call__(self, answer, task):
        return 0.25

constant = Constant()

def odd(answer, task):
    if answer == "raise":
        raise KeyError(answer)
    if answer == "exit":
        sys.exit(3)
    if answer == "die":
        os._exit(3)
    if answer == "hang":
        open("pid", "w").write(f"{os.getpid()};")
        time.sleep(600)
    if answer == "hang with a child":
        os.fork()
        time.sleep(600)
    if answer == "fork":
        if os.fork():
            os.wait()  # the child has gone on as this process would
        return -1.0
    return float("nan") if answer == "nan" else 7.0

no_function = 3
"""
THREE = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in "abc"]


def rows(number: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{k} + 1 =", "answer": str(k + 1)} for k in range(number)]


def write(rows: list[Any], name: str = "tasks.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def suite(*words: str) -> Any:
    return make_suite(load(["model=scratch", "env=tasks", *words]).env)


def score(suite: Any, task_id: int, answer: str) -> tuple[float, float]:
    """Score, and number of scoring errors."""

    async def episode() -> tuple[float, float]:
        session = suite.session(training=True)
        await contract.reset(session, task_id, suite.name)
        *_, info = await contract.step(session, answer, suite.name)
        return info["score"], info["stats"]["scoring_errors"]

    return asyncio.run(episode())


@pytest.fixture
def folder(user_folder: Path) -> Iterator[Path]:
    (user_folder / "mine.py").write_text(VERIFIERS)
    yield user_folder


def test_its_prompts_and_kinds_come_from_the_file(folder: Path) -> None:
    path = write([*rows(4), {"prompt": "say b", "answer": "b", "kind": "echo"}])
    tasks = suite(f"env.args.file={path}", "env.args.system_prompt=Answer.")
    assert tasks.session(training=True).reset(4) == ("say b", {"reference": "b"}) and tasks.system_prompt == "Answer."
    assert [tasks.signature(k) for k in (3, 4)] == ["task", "echo"]
    other = [{"question": f"q{k}", "group": "g", "answer": 1} for k in range(3)]
    named = suite(f"env.args.file={write(other)}", "env.args.prompt_field=question", "env.args.kind_field=group")
    assert named.session(training=False).reset(1)[0] == "q1" and named.signature(1) == "g"


def test_its_script_gives_the_answers_of_the_file(folder: Path) -> None:
    tasks = suite(
        f"env.args.file={write([*rows(9), {'prompt': 'free', 'kind': 'open'}])}", "env.args.verifier=mine:odd"
    )
    for task_id in range(9):
        question, info = tasks.session(training=True).reset(task_id)
        assert tasks.script(0.0, seed=0).act(question, info) == str(task_id + 1)
    assert len({tasks.script(1.0, seed).act(question, info) for seed in (1, 2, 3, 4)} - {"9"}) > 1
    with pytest.raises(ValueError, match="no reference answer"):
        tasks.script(0.0, seed=0).act(*tasks.session(training=True).reset(9))


def test_its_splits_are_disjoint_and_keep_their_prompts_when_the_file_changes(folder: Path) -> None:
    def prompts(lines: list[dict[str, Any]]) -> dict[str, set[str]]:
        tasks = suite(f"env.args.file={write(lines)}")
        found = {split: set(tasks.tasks(split)) for split in ("train", "validation", "test")}
        assert set.union(*found.values()) == set(range(len(lines))), "every line is in a split"
        return {split: {lines[k]["prompt"] for k in ids} for split, ids in found.items()}

    before, after = prompts(rows(1000)), prompts(list(reversed([*rows(1100), *rows(300)])))
    assert sum(map(len, before.values())) == 1000, "no prompt is in two splits"
    assert all(before[split] <= after[split] for split in before)
    assert 20 < len(before["validation"]) < 90 and 20 < len(before["test"]) < 90
    assert [len(each) for each in prompts(rows(3)).values()] == [1, 1, 1]


def test_the_file_may_say_the_splits(folder: Path) -> None:
    names = ["test", "train", "validation", "train"]
    path = write([row | {"split": split} for row, split in zip(rows(4), names, strict=True)])
    tasks = suite(f"env.args.file={path}")
    assert [list(tasks.tasks(split)) for split in ("train", "validation", "test")] == [[1, 3], [2], [0]]


def test_lines_of_a_file_may_have_all_that_json_may(folder: Path) -> None:
    text = '{"prompt": "a\u2028b\x85c", "answer": "1"}'
    Path("tasks.jsonl").write_text("\ufeff" + "\r\n".join([text, *THREE]) + "\n\n", encoding="utf-8", newline="")
    tasks = suite("env.args.file=tasks.jsonl")
    assert sorted(k for split in SPLITS for k in tasks.tasks(split)) == [0, 1, 2, 3]
    assert tasks.session(True).reset(0)[0] == "a\u2028b\x85c"


def test_the_reason_why_an_answer_cannot_be_scored_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RateLimitedWarnings(interval_s=30.0)  # its own: another test may have had the first one

    async def broken(answer: str, task: Any) -> float:
        raise KeyError("wanted")

    async def episode() -> None:
        session = SingleTurnSession(lambda task_id: ("q", None), broken, warnings=warnings)
        session.reset(0)
        await session.step("a")

    for _ in range(3):
        asyncio.run(episode())
    assert [record.getMessage() for record in caplog.records] == [
        "an answer cannot be scored, and scores 0: KeyError: 'wanted'"
    ]


def test_a_score_beyond_its_range_is_logged_and_counts_as_the_nearest_in_it(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RateLimitedWarnings(interval_s=30.0)

    async def episode(given: float) -> float:
        session = SingleTurnSession(lambda task_id: ("q", None), lambda answer, task: given, warnings=warnings)
        session.reset(0)
        *_, info = await session.step("a")
        return float(info["score"])

    assert [asyncio.run(episode(given)) for given in (0.0, 1.0, 1.0 + 1e-9)] == [0.0, 1.0, 1.0]
    assert not caplog.records
    assert [asyncio.run(episode(given)) for given in (7.0, -1.0)] == [1.0, 0.0]
    assert [record.getMessage() for record in caplog.records] == [
        "a score outside of 0 to 1 counts as the nearer of them: 7: let the verifier return 0 to 1"
    ]


@pytest.mark.parametrize(("given", "score"), [(sum([0.1] * 10), 1.0), (0.1 + 0.2 - 0.3, 0.0), (0.999, 0.999)])
def test_a_score_that_only_rounding_parts_from_1_or_0_is_that(given: float, score: float) -> None:
    assert given not in (0.0, 1.0)

    async def info() -> dict[str, Any]:
        session = SingleTurnSession(lambda task_id: ("q", None), lambda answer, task: given)
        session.reset(0)
        return (await session.step("a"))[-1]

    found = asyncio.run(info())
    assert (found["score"], found["success"]) == (score, score == 1.0)


def test_a_parquet_file_is_read_too(folder: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows(5)), "tasks.parquet")
    same = suite("env.args.file=tasks.parquet"), suite(f"env.args.file={write(rows(5))}")
    assert same[0].session(True).reset(3) == same[1].session(True).reset(3) == ("3 + 1 =", {"reference": "4"})
    assert same[0].tasks("test") == same[1].tasks("test")
    gaps = [{"prompt": "why?", "answer": "so", "kind": "reason"}, *rows(5)]
    parquet.write_table(arrow.Table.from_pylist(gaps), "gaps.parquet")
    assert [suite("env.args.file=gaps.parquet").signature(task) for task in (0, 1)] == ["reason", "task"]


@pytest.mark.parametrize(
    ("lines", "words", "said"),
    [
        (["{"], [], "line 1: this is not JSON"),
        ([*THREE, '{"prompt": "a \\ud83d", "answer": "b"}'], [], "line 4: prompt: .* is half of a surrogate pair"),
        (['{"prompt": "a"}', "[1]"], [], "line 2: each line must be a JSON object"),
        (['{"prompt": "a"}', '{"question": "b"}'], [], "line 2: it has no text 'prompt'"),
        (['{"prompt": "a", "split": "train"}', '{"prompt": "b"}'], [], "line 2: split is None"),
        (['{"prompt": "a"}'] * 9, [], "1 different prompts: at least 3 are needed"),
        ([], [], "has no tasks"),
        (['{"prompt": "a"}', "", '{"question": "b"}'], [], "line 3: it has no text 'prompt'"),
        (['{"prompt": "a", "split": "train"}', "", '{"prompt": "b"}'], [], "line 3: split is None"),
        ([*THREE, "", '{"prompt": "d"}'], [], "line 5: it has no 'answer'"),
        ([*THREE, '{"prompt": "d"}'], [], "line 4: it has no 'answer'"),
        ([*THREE, '{"prompt": "d", "answer": "#### 4"}'], ["env.args.verifier=number"], "answer '#### 4' is no num"),
        ([*THREE, '{"prompt": "d", "answer": "3,5"}'], ["env.args.verifier=number"], "line 4: answer '3,5' is no num"),
        ([*THREE, '{"prompt": "d", "answer": "1_000"}'], ["env.args.verifier=number"], "answer '1_000' is no number"),
        (THREE, ["env.args.verifier_args.least=1"], "verifier=exact cannot be called: .*'least'.*verifier_args"),
        (THREE, ["env.args.verifier=mine:longer", "env.args.verifier_args.lest=1"], "longer cannot be called: .*lest"),
        (THREE, ["env.args.verifier=reward_model"], "reward_model cannot be called: .*'path'"),
        (THREE, ["env.args.verifier=reward_model", "env.args.verifier_args.path=nowhere"], "path=nowhere has no"),
        (['{"prompt": "a"}'], ["env.args.file=other.jsonl"], "FileNotFoundError"),
        (THREE, ["env.args.verifier=exakt"], "did you mean exact"),
        (THREE, ["env.args.verifier=mine:no_function"], "name a class or a fun"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_as_it_should_be_is_named(
    folder: Path, lines: list[str], words: list[str], said: str
) -> None:
    Path("tasks.jsonl").write_text("\n".join(lines))
    with pytest.raises(EnvironmentFault, match=said):
        suite("env.args.file=tasks.jsonl", *words)


def test_it_needs_a_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.args\.file is not set"):
        suite()


@pytest.mark.system
def test_verifiers_score_where_they_can_harm_nobody(folder: Path) -> None:
    path = write(rows(5))
    with_args = suite(f"env.args.file={path}", "env.args.verifier=mine:longer", "env.args.verifier_args.least=2")
    assert [score(with_args, 1, answer) for answer in ("222", "2222")] == [(0.0, 0.0), (1.0, 0.0)]
    assert score(suite(f"env.args.file={path}", "env.args.verifier=mine:waiting"), 1, "") == (0.5, 0.0)
    assert score(suite(f"env.args.file={path}", "env.args.verifier=mine:constant"), 1, "") == (0.25, 0.0)
    odd = suite(f"env.args.file={path}", "env.args.verifier=mine:odd", "env.args.timeout_s=2")
    assert [score(odd, 1, answer)[0] for answer in ("fork", "fine", "fork")] == [0.0, 1.0, 0.0], "each has its own"
    for answer in ("raise", "exit", "die", "nan", "hang", "hang with a child"):
        assert score(odd, 1, answer) == (0.0, 1.0), answer
        assert score(odd, 1, "fine") == (1.0, 0.0), f"scores go on after {answer}, and 7 counts as 1"


SLOW_IMPORT = """
import os, time

def verify(answer, task):
    global imported
    if task.get("has to be answered") and not answer:
        os._exit(3)
    if "imported" not in globals():
        begin = time.process_time()
        while "busy" in task and time.process_time() < begin + task["busy"]:
            pass
        time.sleep(1.5)
        imported = True
    return 1.0
"""


@pytest.mark.system
def test_an_answer_need_not_wait_for_the_imports_of_the_verifier(folder: Path) -> None:
    (folder / "slow.py").write_text(SLOW_IMPORT)
    scoring = ScoringProcess("slow:verify", timeout_s=0.5, example=({}, {}))
    assert asyncio.run(scoring.score("a", {})) == 1.0
    scoring.close()
    busy = ScoringProcess("slow:verify", timeout_s=0.5, example=({"busy": 4.0}, {}))
    assert asyncio.run(busy.score("a", {})) == 1.0, "nor for a model that takes seconds of a core to load"
    busy.close()
    other = ScoringProcess("slow:verify", timeout_s=60, example=({"has to be answered": True}, {}))
    assert asyncio.run(other.score("a", {})) == 1.0, "an example that ends the process is left out"
    other.close()


READER = """
import subprocess, sys

def verify(answer, task):
    reads = [sys.executable, "-c", "import sys; print(sys.stdin.read(), end='.')"]
    return subprocess.run(reads, timeout=10, stdout=subprocess.PIPE).stdout == b"." and sys.stdin.read() == ""
"""


@pytest.mark.system
def test_what_a_verifier_and_its_processes_read_is_no_request(folder: Path) -> None:
    (folder / "reader.py").write_text(READER)
    scoring = ScoringProcess("reader:verify", timeout_s=60.0)
    assert [asyncio.run(scoring.score("a", {})) for _ in range(2)] == [1.0, 1.0]
    scoring.close()


@pytest.mark.system
def test_what_the_interpreter_prints_at_its_start_is_no_reply(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sitecustomize.py").write_text("print('hello from the site')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    scoring = ScoringProcess("mine:longer", timeout_s=60.0)
    assert asyncio.run(scoring.score("abc", {"answer": "a"}, {"least": 1})) == 1.0
    scoring.close()


RUNNER = """
def verify(answer, task):
    names = {}
    exec(answer, names)
    return names["score"]
"""
FORGE = """
import os, sys, threading

def forge(line):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, line)
        except OSError:
            pass

def later(act):
    def wait():
        with open("later"):
            act()
    threading.Thread(target=wait).start()
"""
HONEST = "import sys; getattr(sys, 'left', print)(); score = 0.25"


@pytest.fixture
def runner(folder: Path) -> Iterator[ScoringProcess]:
    (folder / "runner.py").write_text(RUNNER)
    scoring = ScoringProcess("runner:verify", timeout_s=60.0)
    yield scoring
    scoring.close()


@pytest.mark.system
@pytest.mark.parametrize("line", [b"[1.0, null]", b'["", 1.0, null]', b"1.0", b"[" * 50_000], ids=range(4))
def test_a_line_that_an_answer_writes_in_the_place_of_its_reply_is_no_score(
    runner: ScoringProcess, line: bytes
) -> None:
    with pytest.raises(ScoringError, match="in the place of the reply"):
        asyncio.run(runner.score(f"{FORGE}\nforge({line!r} + b'\\n'); threading.Event().wait()", {}))
    assert asyncio.run(runner.score(HONEST, {})) == 0.25


@pytest.mark.system
def test_what_an_answer_leaves_behind_costs_the_next_ones_nothing(folder: Path, runner: ScoringProcess) -> None:
    os.mkfifo("later")
    for act in (r"forge(b'[1.0, null]\n')", "os._exit(3)"):
        assert asyncio.run(runner.score(f"{FORGE}\nlater(lambda: {act}); score = 0.0", {})) == 0.0
        of_runner = [p.pid for p in psutil.Process().children() if "runner:verify" in p.cmdline()]
        with open("later", "wb", buffering=0) as pipe:
            done = select.poll()
            done.register(pipe, 0)
            done.poll()  # it has closed its end
        if "exit" in act:  # it closes one file after the other
            for pid in of_runner:
                ended = select.poll()
                ended.register(os.pidfd_open(pid), select.POLLIN)
                ended.poll()
        assert asyncio.run(runner.score(HONEST, {})) == 0.25, act
    leave = FORGE + r"sys.left = lambda: forge(b'[1.0, null]\n'); score = 0.0"
    assert asyncio.run(runner.score(leave, {})) == 0.0
    assert [asyncio.run(runner.score(HONEST, {})) for _ in range(2)] == [0.25, 0.25]


@pytest.mark.system
def test_answers_that_are_given_up_are_not_scored(folder: Path) -> None:
    (folder / "counted.py").write_text(
        "import time\ndef verify(answer, task):\n    open('calls', 'a').write(';')\n    time.sleep(600)\n"
    )
    scoring = ScoringProcess("counted:verify", timeout_s=1.0)

    async def give_up() -> None:
        waiting = [asyncio.create_task(scoring.score("a", {})) for _ in range(16)]
        while not (folder / "calls").exists():
            await asyncio.sleep(0.01)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(give_up())  # its end waits for the threads
    assert (folder / "calls").read_text() == ";"
    scoring.close()


def test_a_verifier_that_waits_ends_with_its_actor(folder: Path) -> None:
    program = """import asyncio
from impala_llm.envs.scoring_process import ScoringProcess
asyncio.run(ScoringProcess("mine:odd", timeout_s=600).score("hang", {}))"""
    actor = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 120

    def wait_for(done: Callable[[], bool]) -> None:
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    wait_for(lambda: (folder / "pid").is_file() and (folder / "pid").read_text().endswith(";"))
    actor.kill()
    actor.wait()
    scoring = Path("/proc") / (folder / "pid").read_text().rstrip(";") / "cmdline"
    wait_for(lambda: not scoring.exists() or not scoring.read_text())


HANGING = """
import asyncio
from impala_llm.envs.scoring_process import ScoringProcess

async def main():
    scoring = asyncio.create_task(ScoringProcess("mine:odd", timeout_s=600).score("hang", {}))
    while True:
        try:
            if open("pid").read().endswith(";"):
                break
        except FileNotFoundError:
            pass
        await asyncio.sleep(0.01)
    scoring.cancel()

asyncio.run(main())
"""


@pytest.mark.system
def test_a_process_ends_while_its_verifier_hangs(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60)


@pytest.mark.system
def test_a_file_beside_a_verifier_hides_no_module_of_pythons_and_the_verifier_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_namesakes(folder)
    (folder / "beside.py").write_text("SCORE = 0.5")
    (folder / "hidden.py").write_text("import beside\n\ndef verify(answer, task):\n    return beside.SCORE\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    scoring = ScoringProcess("hidden:verify", timeout_s=60.0)
    try:
        assert asyncio.run(scoring.score("a", {})) == 0.5
    finally:
        scoring.close()


@pytest.mark.system
def test_a_scoring_process_finds_the_package_where_it_is_not_installed(folder: Path) -> None:
    (folder / "paths.py").write_text(
        "import os\n\ndef verify(answer, task):\n    return answer in os.environ['PYTHONPATH'].split(os.pathsep)\n"
    )
    scoring = ScoringProcess("paths:verify", timeout_s=60.0)
    try:
        assert asyncio.run(scoring.score(str(PACKAGE.parent), {})) == 1.0
    finally:
        scoring.close()


@pytest.mark.system
def test_a_scoring_process_that_does_not_start_is_a_fault_and_no_score(folder: Path) -> None:
    tasks = suite(f"env.args.file={write(rows(5))}", "env.args.verifier=mine:odd")
    (folder / "mine.py").write_text("import os\nos._exit(3)\n")
    for _ in range(2):
        with pytest.raises(EnvironmentFault, match="mine:odd did not start"):
            score(tasks, 1, "fine")
    (folder / "mine.py").write_text(VERIFIERS)
    assert score(tasks, 1, "fine") == (1.0, 0.0)


@pytest.mark.system
def test_a_verifier_that_cannot_be_loaded_is_named(folder: Path) -> None:
    scoring = ScoringProcess("nowhere:verify")
    with pytest.raises(ScoringError, match="nowhere"):
        asyncio.run(scoring.score("a", {}))
    scoring.close()


@pytest.mark.parametrize(
    ("verify", "right", "answers", "others"),
    [
        (
            exact,
            "b",
            ["b", " b\n", "so <answer> b </answer>.", "<think>a or c?</think>\n\nb", "<answer>a</answer></think> b"],
            ["so b", "B", "", "<answer>b</answer><answer></answer>"],
        ),
        (number, 1234, ["1234", "it is 1,234.0", "3 and 1.234e3"], ["1234 or 5", "", "none", "-1234", "−1234"]),
        (number, "−5", ["-5", "so x = −5.", "<answer>−5.0</answer>"], ["5", "3 − 5"]),
    ],
)
def test_packaged_verifiers(verify: Any, right: Any, answers: list[str], others: list[str]) -> None:
    assert [verify(answer, {"answer": right}) for answer in answers] == [1.0] * len(answers)
    assert [verify(answer, {"answer": right}) for answer in others] == [0.0] * len(others)


@pytest.mark.parametrize(
    ("right", "answers", "others"),
    [
        ("1/2", ["0.5", r"so it is $\frac{1}{2}$", r"\boxed{\frac{2}{4}}", "<answer>1/2</answer>"], ["2", "", "half"]),
        (r"\frac{\sqrt{3}}{2}", [r"$\sqrt{3}/2$", r"\boxed{\sqrt{\frac{3}{4}}}"], [r"$\sqrt{3}$"]),
        ("x^2 + 2x + 1", ["$(x+1)^2$"], ["$(x-1)^2$"]),
    ],
)
def test_maths_answers_are_compared_by_meaning(right: str, answers: list[str], others: list[str]) -> None:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    assert [maths(answer, {"answer": right}) for answer in answers] == [1.0] * len(answers)
    assert [maths(answer, {"answer": right}) for answer in others] == [0.0] * len(others)
