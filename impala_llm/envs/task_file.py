"""Tasks from a file, one turn each: a prompt, an answer, a verifier that scores it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from impala_llm.envs import contract
from impala_llm.envs.answers import is_number
from impala_llm.envs.base import SPLITS, Split
from impala_llm.envs.extras import needed
from impala_llm.envs.json_lines import read_json_lines
from impala_llm.envs.scoring_process import ScoringProcess
from impala_llm.envs.single_turn import ReferenceScript, SingleTurnSession
from impala_llm.part_signatures import is_async
from impala_llm.plugs import VERIFIERS, check_call, load
from impala_llm.settings import bounded

_VALIDATION, _TEST = 5, 5
"""Percent of the prompts."""


class TaskFileSuite:
    """The tasks of a file. A task id is the number of the task, from 0: blank lines have none.

    The splits are those of the field `split`, in all lines or in none. Without it a hash of the prompt decides, 5 %
    each for validation and test: a prompt is in one split however often it is there, and stays there when lines are
    added or their order changes, unless a split would be empty: then the hash only gives the order.

    A verifier that is a coroutine function runs in the event loop of the actor; a plain function in a process of its
    own, where it may take its time, or break.
    """

    @dataclass
    class Options:
        """Settings env.args.*"""

        file: str
        """A file of JSON lines, or of Parquet where its name ends in .parquet: a mapping for each task."""
        verifier: str = "exact"
        """exact | number | maths (Math-Verify) | reward_model | your own as module:function, called with the answer
        and the task: it returns a score between 0 and 1, or a bool."""
        verifier_args: dict[str, Any] = field(default_factory=dict)
        """Further arguments of the verifier, by name."""
        prompt_field: str = "prompt"
        """Field with the text that is shown."""
        kind_field: str = "kind"
        """Field with the kind of the task, where lines have it: what replay and curriculum count by."""
        system_prompt: str = ""
        """Text before the prompt."""
        timeout_s: float = bounded(20.0, least=0.001)
        """Longest time for scoring one answer in the verifier's process; then the answer scores 0."""

    def __init__(self, options: Options) -> None:
        """
        Raises:
            OSError: the file cannot be read.
            ValueError: it is not as it should be, or the verifier cannot be used. The message names the line.
        """
        self.name = f"tasks-{Path(options.file).stem}"
        self.system_prompt = options.system_prompt
        self._options = options
        rows = _rows(Path(options.file).expanduser())
        self._rows = list(rows.values())
        self._prompts = [self._prompt(number, row) for number, row in rows.items()]
        self._splits = _splits(rows, self._prompts, options.file)
        self._verify = load(VERIFIERS, options.verifier)
        check_call(VERIFIERS, options.verifier, self._verify, "", {}, **options.verifier_args)
        self._check_answers(rows)
        self._scoring: ScoringProcess | None = None
        if not is_async(self._verify):
            example = self._begin(0)[1], options.verifier_args
            self._scoring = ScoringProcess(options.verifier, options.timeout_s, example=example)

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> SingleTurnSession:
        return SingleTurnSession(self._begin, self._score, self._reference)

    def signature(self, task_id: int) -> str:
        """The field `kind`."""
        kind = self._rows[task_id].get(self._options.kind_field)  # null where a column of Parquet has gaps
        return "task" if kind is None else str(kind)

    def script(self, noise: float, seed: int) -> ReferenceScript:
        """The field `answer`, for verifiers that have it as a right answer."""
        return ReferenceScript(noise, seed, lambda rng, info: self._reference(rng.choice(self._rows)))

    def _reference(self, task: Mapping[str, Any]) -> str | None:
        return None if task.get("answer") is None else str(task["answer"])

    def _begin(self, task_id: int) -> tuple[str, dict[str, Any]]:
        if not 0 <= task_id < len(self._rows):
            raise ValueError(f"task_id is {task_id}: {self._options.file} has the tasks 0 to {len(self._rows) - 1}")
        prompt = self._prompts[task_id]
        return prompt, {**self._rows[task_id], "prompt": prompt}

    async def _score(self, answer: str, task: dict[str, Any]) -> float:
        if self._scoring is None:
            return float(await self._verify(answer, task, **self._options.verifier_args))
        return await self._scoring.score(answer, task, self._options.verifier_args)

    def _check_answers(self, rows: Mapping[int, dict[str, Any]]) -> None:
        """Raise ValueError where a packaged verifier could score no answer."""
        file, verifier, path = self._options.file, self._options.verifier, self._options.verifier_args.get("path")
        if verifier == "maths":
            needed("math_verify", "maths")
        if verifier == "reward_model" and not (Path(str(path)).expanduser() / "config.json").is_file():
            raise ValueError(
                f"env.args.verifier_args.path={path} has no config.json: give the directory of a sequence classifier"
            )
        for number, row in rows.items() if verifier in ("exact", "number", "maths") else ():
            if row.get("answer") is None:
                raise ValueError(
                    f"{file}, line {number}: it has no 'answer', which env.args.verifier={verifier} needs: add it, or "
                    "name a verifier of your own"
                )
            if verifier == "number" and not is_number(row["answer"]):
                raise ValueError(
                    f"{file}, line {number}: answer {row['answer']!r} is no number, which env.args.verifier=number "
                    "needs: correct it, or choose another verifier"
                )

    def _prompt(self, number: int, row: dict[str, Any]) -> str:
        prompt = row.get(self._options.prompt_field)
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(
                f"{self._options.file}, line {number}: it has no text {self._options.prompt_field!r}: add it, or set "
                "env.args.prompt_field"
            )
        if problem := contract.text_problem(prompt):
            raise ValueError(f"{self._options.file}, line {number}: {self._options.prompt_field}: {problem}")
        return prompt


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    """The tasks of a file, by the number of their line, from 1."""
    if path.suffix == ".parquet":
        found = dict(enumerate(needed("pyarrow.parquet", "parquet").read_table(path).to_pylist(), 1))
    else:
        found = read_json_lines(path)
    if not found:
        raise ValueError(f"{path} has no tasks")
    return found


def given_splits(rows: Mapping[int, dict[str, Any]], file: str) -> dict[Split, list[int]] | None:
    """The task ids of each split by the field `split`, which all lines must have or none; None: no line has it.

    Args:
        rows: by the number of their line.
    """
    given = [row.get("split") for row in rows.values()]
    if all(split is None for split in given):
        return None
    for number, split in zip(rows, given, strict=True):
        if split not in SPLITS:
            raise ValueError(f"{file}, line {number}: split is {split!r}: write one of {', '.join(SPLITS)}")
    return {split: [k for k, each in enumerate(given) if each == split] for split in SPLITS}


def _splits(rows: Mapping[int, dict[str, Any]], prompts: Sequence[str], file: str) -> dict[Split, list[int]]:
    """The task ids of each split."""
    if (given := given_splits(rows, file)) is not None:
        return given
    buckets = {prompt: _bucket(prompt) for prompt in prompts}
    if len(buckets) < 3:
        raise ValueError(f"{file} has {len(buckets)} different prompts: at least 3 are needed, one for each split")
    chosen: dict[str, Split] = {
        prompt: "validation" if bucket < _VALIDATION else "test" if bucket < _VALIDATION + _TEST else "train"
        for prompt, bucket in buckets.items()
    }
    if len(set(chosen.values())) < 3:
        ordered = sorted(buckets, key=lambda prompt: buckets[prompt])
        chosen = {prompt: "train" for prompt in ordered}
        chosen[ordered[0]], chosen[ordered[1]] = "validation", "test"
    return {split: [k for k, prompt in enumerate(prompts) if chosen[prompt] == split] for split in SPLITS}


def _bucket(prompt: str) -> float:
    """A number from 0 to 100 that is the prompt's own."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * 100
