"""`impala-llm new-env NAME`: writes an environment to begin with, and its test, into the current directory."""

import importlib.util
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from impala_llm.processes.programs import program

ENVIRONMENT = '''\
"""Environment {name}: {hint}"""

import random


class Suite:
    name, system_prompt = "{name}", ""

    def __init__(self, num_letters: int = 4, num_tasks: int = 1000) -> None:  # settings: env.args.num_letters=...
        self.letters, self.tenth = "abcdefghijklmnopqrstuvwxyz"[:num_letters], max(1, num_tasks // 10)

    def tasks(self, split):  # no task is in two splits
        first, last = {{"train": (0, 8), "validation": (8, 9), "test": (9, 10)}}[split]
        return range(first * self.tenth, last * self.tenth)

    def session(self, training):
        return Episode(self.letters)

    def signature(self, task_id):
        return "letter"


class Episode:
    def __init__(self, letters):
        self.letters = letters

    def reset(self, task_id):  # a task id alone decides what is shown: (observation, info)
        self.wanted = random.Random(task_id).choice(self.letters)
        return f"say {{self.wanted}}", {{}}

    def step(self, action):  # (observation, reward, terminated, truncated, info); both may be `async def`
        score = float(action.strip()[:1] == self.wanted)
        return "", score, True, False, {{"score": score, "success": score == 1.0}}
'''
TEST = """\
import {name}


def test_an_episode():
    session = {name}.Suite().session(training=True)
    observation, _ = session.reset(7)
    assert observation == session.reset(7)[0]
    _, reward, terminated, _, info = session.step(observation[-1])
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    session.reset(7)
    assert session.step("?")[1] == 0.0


def test_the_splits():
    splits = [set({name}.Suite().tasks(split)) for split in ("train", "validation", "test")]
    assert all(splits) and sum(map(len, splits)) == len(set.union(*splits))
"""
HINT = "shows a letter and wants it back. Replace both by what your agent has to learn."


def main(words: Sequence[str]) -> int:
    """Write both files, or none. Returns the exit code: 2 if the name is not valid, a file exists, or the disk
    refuses one."""
    if len(words) != 1 or words[0].startswith("-"):
        print("impala-llm new-env NAME: writes NAME.py and test_NAME.py into this directory", file=sys.stderr)
        return 0 if words and words[0] in ("-h", "--help") else 2
    [name] = words
    if not name.isidentifier() or keyword.iskeyword(name):
        rule = "a keyword of Python" if keyword.iskeyword(name) else "not letters, digits and _ with a letter first"
        print(f"impala-llm new-env {name}: no name of a module ({rule}): choose one such as my_env", file=sys.stderr)
        return 2
    is_pythons = name in (*sys.stdlib_module_names, "__main__")  # which has no specification to be found
    if is_pythons or importlib.util.find_spec(name) is not None:
        there = "Python has" if is_pythons else "there is"
        print(
            f"impala-llm new-env {name}: {there} a package or module {name} already, which would hide it, or be "
            "hidden: choose another name",
            file=sys.stderr,
        )
        return 2
    files = {Path(f"{name}.py"): ENVIRONMENT, Path(f"test_{name}.py"): TEST}
    made: list[Path] = []
    for path, text in files.items():
        try:
            with path.open("x") as file:
                made.append(path)
                file.write(text.format(name=name, hint=HINT))
        except OSError as error:
            for other in made:
                other.unlink(missing_ok=True)
            fault = (
                "is there already: choose another name"
                if isinstance(error, FileExistsError)
                else f"cannot be written ({error.strerror}): go to another directory, or put that right"
            )
            print(f"impala-llm new-env {name}: {path} {fault}", file=sys.stderr)
            return 2
    print(
        f"{name}.py and test_{name}.py are written. Try them:\n"
        f"  {program('python')} -m pytest test_{name}.py\n"
        f"  {program('impala-llm')} train model=scratch env={name}:Suite run.name={name} engine.max_new_tokens=2 "
        "engine.max_length=64"
    )
    return 0
