"""The tasks of reasoning-gym (extra `reasoning-gym`), each question with the library's own generator and scorer.

Invariant: a task id is the index of an item of one dataset, which seed and configuration fix; splits are stretches of
indices, so that no item is in two of them.
"""

import functools
import json
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from impala_llm.envs.answers import after_thoughts
from impala_llm.envs.base import Split
from impala_llm.envs.extras import needed
from impala_llm.envs.scoring_process import ScoringProcess
from impala_llm.envs.single_turn import ReferenceScript, SingleTurnSession, check_task, split_sizes
from impala_llm.settings import bounded

EVALUATED = frozenset(
    {
        *("binary_matrix", "composite", "countdown", "intermediate_integration", "n_queens"),
        *("polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
        *("coin_flip", "propositional_logic", "rubiks_cube", "rush_hour"),
    }
)
"""Datasets whose scorers run the answer as Python, by `eval` or sympy's `parse_expr`: an answer such as `exit()`, or
`9**9**9**9`, would end or stop its actor. They are scored in a process of their own. So are those whose scorers take
hours, or all memory, for a short answer: coin_flip makes a fraction of it (1e999999999 is one of a milliard digits),
propositional_logic a table of all values of its names, of which lower-case ones are not checked, rubiks_cube a list of
all turns (R99999999), and rush_hour takes each step of a move (A+999999999)."""

FROM_SETS = frozenset(
    {
        *("isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note"),
        "word_ladder",
    }
)
"""Datasets whose items depend on the order of sets, which Python changes unless PYTHONHASHSEED is set."""
_PAIRS, _TUPLE = "pairs", "tuple"
_log = logging.getLogger(__name__)


class ReasoningGymSuite:
    """One dataset of reasoning-gym."""

    @dataclass
    class Options:
        """Settings env.args.*"""

        task: str = "chain_sum"
        """Name of a dataset, such as chain_sum, countdown or sudoku; docs/environments.md lists them."""
        config: dict[str, Any] = field(default_factory=dict)
        """Configuration of the dataset, such as env.args.config.max_terms=3."""
        num_train: int = bounded(10_000, least=1)
        """Questions for training."""
        num_validation: int = bounded(500, least=1)
        """Questions for evaluations inside of a run."""
        num_test: int = bounded(500, least=1)
        """Questions for evaluation."""
        seed: int = bounded(0, least=0, most=2**31 - 1)
        """Seed of the questions."""
        system_prompt: str = ""
        """A text, or the name of one of the library's prompts (default | simple | direct | chain_of_draft |
        DeepSeekZero), all of which ask for <answer> tags."""
        answer_tags: bool = False
        """Score only what stands between <answer> and </answer>. Else the whole answer where it has no such tags."""

    def __init__(self, options: Options) -> None:
        """Raises ValueError for a dataset, or a configuration, that the library does not have."""
        library, utils = needed("reasoning_gym", "reasoning-gym"), needed("reasoning_gym.utils", "reasoning-gym")
        known = needed("reasoning_gym.factory", "reasoning-gym").DATASETS
        if options.task not in known:
            raise ValueError(f"env.args.task={options.task} is no dataset of reasoning-gym: {', '.join(sorted(known))}")
        if reserved := {"seed", "size"} & set(options.config):
            raise ValueError(f"env.args.config.{min(reserved)} cannot be set: use env.args.seed and num_train")
        self.name = f"reasoning_gym-{options.task}"
        self.system_prompt = utils.SYSTEM_PROMPTS.get(options.system_prompt, options.system_prompt)
        self._options, self._extract = options, utils.extract_answer
        self._asks_for_tags = options.answer_tags or options.system_prompt in utils.SYSTEM_PROMPTS
        self._splits = split_sizes(options.num_train, options.num_validation, options.num_test)
        size = self._splits["test"].stop
        try:
            config = dict(options.config)
            if options.task == "composite":  # the one configuration that is not of plain values
                spec = needed("reasoning_gym.composite", "reasoning-gym").DatasetSpec
                config["datasets"] = [spec(**each) for each in config.get("datasets", ())]
            self._dataset = library.create_dataset(options.task, seed=options.seed, size=size, **config)
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"env.args.config={options.config} does not suit {options.task}: {error}") from error
        if options.task in FROM_SETS and os.environ.get("PYTHONHASHSEED", "random") == "random":
            _log.warning("the items of %s differ from process to process: set PYTHONHASHSEED=0", options.task)
        self._scoring: ScoringProcess | None = None
        if options.task in EVALUATED:
            self._scoring = ScoringProcess(
                "impala_llm.envs.reasoning_gym:verify",
                memory_gib=4.0,
                example=([asdict(options), _packed(self._dataset[0])], {}),
            )

    def tasks(self, split: Split) -> Sequence[int]:
        return self._splits[split]

    def session(self, training: bool) -> SingleTurnSession:
        return SingleTurnSession(self._begin, self._scored, self._reference)

    def signature(self, task_id: int) -> str:
        """The dataset that the item is of."""
        return self._options.task

    def script(self, noise: float, seed: int) -> ReferenceScript:
        """The library's own answers; some datasets have none."""
        return ReferenceScript(noise, seed, self._other)

    def entry(self, task_id: int) -> dict[str, Any]:
        """Return an item as the library has it: question, answer, metadata."""
        check_task(task_id, self._splits)
        item: dict[str, Any] = self._dataset[task_id]
        return item

    def _begin(self, task_id: int) -> tuple[str, Any]:
        item = self.entry(task_id)
        return str(item["question"]), item

    def _reference(self, item: dict[str, Any]) -> str | None:
        if item["answer"] is None:
            return None
        return f"<answer>{item['answer']}</answer>" if self._asks_for_tags else str(item["answer"])

    def _other(self, rng: random.Random, info: dict[str, Any]) -> str | None:
        return self._reference(self.entry(rng.choice(self._splits["train"])))

    async def _scored(self, text: str, item: dict[str, Any]) -> float:
        if self._scoring is None:
            return self.score(text, item)
        return await self._scoring.score(text, [asdict(self._options), _packed(item)])

    def score(self, text: str, item: dict[str, Any]) -> float:
        """Score an answer to an item, as the library does, in this process."""
        text = after_thoughts(text)
        answer = self._extract(text)
        if answer is None and not self._options.answer_tags:
            answer = text.strip()
        return float(self._dataset.score_answer(answer, item))


def verify(answer: str, task: Any) -> float:
    """Score an answer in a scoring process. task: options of the suite, and an item of the dataset."""
    options, item = task
    return _suite(json.dumps(options)).score(answer, _unpacked(item))


def _packed(value: Any) -> Any:
    """A value of an item for its way as JSON, which has no tuples, and no keys but texts: scorers tell them apart."""
    if isinstance(value, dict):
        return {_PAIRS: [[_packed(key), _packed(each)] for key, each in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_packed(each) for each in value]}
    return [_packed(each) for each in value] if isinstance(value, list) else value


def _unpacked(value: Any) -> Any:
    """The inverse of `_packed`."""
    if isinstance(value, dict) and _PAIRS in value:
        return {_unpacked(key): _unpacked(each) for key, each in value[_PAIRS]}
    if isinstance(value, dict):
        return tuple(_unpacked(each) for each in value[_TUPLE])
    return [_unpacked(each) for each in value] if isinstance(value, list) else value


@functools.cache
def _suite(options: str) -> ReasoningGymSuite:
    return ReasoningGymSuite(ReasoningGymSuite.Options(**json.loads(options)))
