"""Greedy evaluation of a policy on tasks that it never trained on: score and success with their 95 % intervals.

The tasks are the first `evaluation.num_tasks` of a split in canonical order, so two evaluations compare like with like.
Every result names what it was measured on: catalogue, goals, split, number of tasks, limits.
"""

import asyncio
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from impala_llm.config import ConfigError
from impala_llm.engines import make_engine
from impala_llm.engines.base import Engine, EngineError
from impala_llm.engines.sglang.external_server import reserved_servers
from impala_llm.environment_faults import failure_reason, is_fault, watch_for_blocking
from impala_llm.envs import contract, make_suite
from impala_llm.envs.base import Compared, Script, Split, Suite
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.envs.webshop.suite import tasks_name
from impala_llm.evaluation.results import Result, difference, paired, result_of, results_json
from impala_llm.gateway.agents import AgentFailed, AgentPlayer
from impala_llm.gateway.tasks import suite_of
from impala_llm.learning.checkpoints.files import write_file
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.observability.terminal import counting, working
from impala_llm.observability.writers import MetricWriter, last_metrics
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, Turn, play_episode
from impala_llm.settings import Config, EvaluationConfig, model_directory
from impala_llm.trajectory import Trajectory

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs the coroutine that plays episodes, such as `asyncio.run`. If there are several coroutines, all are run in one
event loop: an environment or a verifier may keep a client that belongs to the first loop."""


@dataclass(frozen=True)
class Example:
    """An episode to read."""

    task_id: int
    score: float
    turns: list[Turn]


def evaluate(
    config: Config,
    policy: Path,
    suite: Suite,
    label: str,
    tasks_label: str,
    num_examples: int = 0,
    run: Run = asyncio.run,
    position: str = "",
) -> tuple[Result, list[Example]]:
    """Play the tasks greedily.

    Args:
        policy: Hugging Face directory.
        suite: whose split `config.evaluation.split` is played; sessions are not in training mode.
        num_examples: episodes to return as text: the first ones, in canonical order.
        position: of this evaluation among several, to be shown in front of its label.

    Raises ConfigError where the first observation of a task leaves no room for a completion.
    """
    contract.warn_of_shared_tasks(suite, config.evaluation.split)  # type: ignore[arg-type]
    tasks = contract.tasks(suite, config.evaluation.split)[: config.evaluation.num_tasks]  # type: ignore[arg-type]
    transcripts: dict[int, list[Turn]] = {task: [] for task in tasks[:num_examples]}
    with counting(f"{position}{short_label(label)}: {tasks_label}", len(tasks)) as played:
        chat = ChatFormat.of(policy, suite.system_prompt)
        episodes: list[Trajectory] = run(_play_all(config, policy, suite, tasks, chat, transcripts, played))
    result = result_of(
        label,
        tasks_label,
        tasks,
        [episode.score for episode in episodes],
        [episode.success for episode in episodes],
        float(np.mean([len(e.turns) for e in episodes])),
        float(np.mean([e.num_tokens for e in episodes])),
    )
    examples = [Example(e.task_id, e.score, transcripts[e.task_id]) for e in episodes[:num_examples]]
    return result, examples


async def _play_all(
    config: Config,
    policy: Path,
    suite: Suite,
    tasks: Sequence[int],
    chat: ChatFormat,
    transcripts: dict[int, list[Turn]],
    played: Callable[[], None],
) -> list[Trajectory]:
    """Play tasks, all of them or none.

    Args:
        transcripts: a list for each task that is to be read; changed in place.
        played: called after each task.
    """
    limits = EpisodeLimits(1.0, config.engine.max_new_tokens, config.engine.max_length, greedy=True)
    timeout_s = config.actor.episode_timeout_s
    playing: list[asyncio.Task[Trajectory]] = []
    engine = make_engine(config, policy, version=0)
    agents = AgentPlayer(config, policy, suite) if config.agent.is_set else None
    streams = asyncio.Semaphore(config.actor.max_episodes)

    async def play(number: int, task: int) -> Trajectory:
        async with streams:
            kind = contract.signature(suite, task)
            spec = EpisodeSpec(f"evaluation-{number}", task, 0, number, 0, suite.name, "evaluation", kind)
            if agents is not None:
                return await _play_by_agent(agents, spec, engine, limits, transcripts.get(task), timeout_s)
            session = contract.Timed(contract.session(suite, training=False), timeout_s)
            try:
                return await play_episode(spec, session, engine, chat, limits, transcripts.get(task))
            except EnvironmentFault:
                raise
            except ValueError as error:  # there is no room for even the first completion
                raise ConfigError(str(error)) from None

    try:
        await engine.start()
        if agents is not None:
            await _start(agents, engine)
        playing += [asyncio.create_task(play(i, task)) for i, task in enumerate(tasks)]
        for ended in asyncio.as_completed(playing):
            await ended
            played()
        return [task.result() for task in playing]
    finally:
        if agents is not None:
            await agents.close()  # first: it bounds the time that agents have for their end
        await contract.end_episodes(playing)  # after a fault
        await engine.close()


async def _start(agents: AgentPlayer, engine: Engine) -> None:
    """Start the processes of the agent. Raises EnvironmentFault where none comes up."""
    try:
        await agents.start(engine)
    except AgentFailed as error:
        raise EnvironmentFault(str(error)) from error


async def _play_by_agent(
    agents: AgentPlayer,
    spec: EpisodeSpec,
    engine: Engine,
    limits: EpisodeLimits,
    transcript: list[Turn] | None,
    timeout_s: float,
) -> Trajectory:
    """Play a task by the agent. An evaluation is nothing without all of its tasks.

    Raises:
        EnvironmentFault: the agent failed.
        EngineError: the engine failed, or was still at a completion when the time was over.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await agents.play(spec, engine, limits, training=False, transcript=transcript)
    except (AgentFailed, TimeoutError) as error:
        reason = failure_reason(error, timeout_s)
        if is_fault(error):
            raise EnvironmentFault(f"the agent failed at task {spec.task_id}: {reason}") from error
        raise EngineError(f"task {spec.task_id} was not played: {reason}") from error


def evaluate_baselines(config: Config, suite: Suite, tasks_label: str, run: Run) -> list[Result]:
    """Play the tasks with the scripts that the suite offers for comparison: none where it is not `Compared`."""
    if not config.evaluation.baselines or not isinstance(suite, Compared):
        return []
    split: Split = config.evaluation.split  # type: ignore[assignment]  # checked by config.load
    tasks = contract.tasks(suite, split)[: config.evaluation.num_tasks]

    timeout_s = config.actor.episode_timeout_s

    async def play_all(make_script: Callable[[], Script]) -> list[tuple[float, bool, int]]:
        what = f"env {suite.name}: a baseline"
        return [await _play(contract.call(what, make_script), suite, task, timeout_s) for task in tasks]

    results = []
    for name, make_script in contract.call(f"env {suite.name}: baselines", lambda: suite.baselines().items()):
        scores, successes, turns = zip(*run(play_all(make_script)), strict=True)
        results.append(result_of(name, tasks_label, tasks, scores, successes, float(np.mean(turns)), None))
    return results


async def _play(script: Script, suite: Suite, task: int, timeout_s: float) -> tuple[float, bool, int]:
    """Play a task with a script. Returns score, success and number of turns."""
    session = contract.Timed(contract.session(suite, training=False), timeout_s)
    turns, ended = 0, False
    try:
        observation, info = await contract.begin(session, task, suite.name)
        while not ended:
            action = contract.act(script, observation, info, suite.name)
            observation, _, terminated, truncated, info = await contract.step(session, action, suite.name)
            turns, ended = turns + 1, terminated or truncated
    finally:
        contract.close(session)
        await contract.closed()
    return float(info["score"]), bool(info["success"]), turns


def evaluate_policies(config: Config, policies: dict[str, Path]) -> tuple[list[Result], list[Example]]:
    """Evaluate each policy on the configured split and, with `evaluation.unseen_seed`, on a catalogue of that seed.

    The results of each of them begin with those of the baselines. The examples are the last policy's on the configured
    split. Raises ConfigError where another command uses servers of `engine.urls`, which are given each of the policies.
    """
    disable_progress_bar()
    set_verbosity_error()  # problems of a model are raised
    with working("making the tasks"):
        suite = suite_of(config) if config.agent.is_set else make_suite(config.env)
        shop, seed = config.env.webshop, config.evaluation.unseen_seed
        suites = [(suite, f", {tasks_name(shop)}" if config.plays_shop else "")]
        is_another = seed != shop.catalogue_seed or shop.items is not None
        if seed is not None and config.plays_shop and is_another:
            shop = dataclasses.replace(
                shop, catalogue_seed=seed, goals="synthetic", items=None, attributes=None, human=None, nouns=None
            )
            unseen = make_suite(dataclasses.replace(config.env, webshop=shop))
            suites.append((unseen, f", {tasks_name(shop, 'unseen')}"))
    results: list[Result] = []
    examples: list[Example] = []
    num_rounds, rounds = len(suites) * len(policies), itertools.count(1)
    with reserved_servers(config), asyncio.Runner() as runner:
        warn = functools.partial(print, "impala-llm:", file=sys.stderr, flush=True)
        watch_for_blocking(config, warn, runner.get_loop())
        for number, (suite, which) in enumerate(suites):
            label = f"{suite.name}{which}, split {config.evaluation.split}"
            said = num_tasks_said(config.evaluation.num_tasks, len(contract.tasks(suite, config.evaluation.split)))  # type: ignore[arg-type]
            errors = Console(stderr=True)
            say = functools.partial(errors.print, highlight=False, markup=False, soft_wrap=not errors.is_terminal)
            say(f"{label}: {said}")
            results += evaluate_baselines(config, suite, label, runner.run)
            for name, path in policies.items():
                wanted = config.evaluation.num_examples if number == 0 else 0
                position = f"{next(rounds)} of {num_rounds}, " if num_rounds > 1 else ""
                result, read = evaluate(config, path, suite, name, label, wanted, runner.run, position)
                results.append(result)
                examples = read or examples
                if num_rounds > 1:  # the table comes after the last
                    say(f"{position}{short_label(name)}: score {result.score:.3f}, success {result.success:.3f}")
    return results, examples


def short_label(label: str) -> str:
    """The name of a policy for a narrow column: of a path its last part, and of a run's policy the run's folder."""
    path = Path(label)
    return path.parent.name if path.name == "policy" and path.parent.name else path.name


def num_tasks_said(wanted: int, there: int) -> str:
    """A sentence on how many of a split's tasks are played, with the key that changes it."""
    if wanted > there and wanted == EvaluationConfig().num_tasks:
        return f"all {there} tasks are played"
    if wanted > there:
        return f"all {there} tasks are played; evaluation.num_tasks={wanted} asks for more than there are"
    return f"{wanted} of {there} tasks are played (evaluation.num_tasks={wanted})"


def show(results: Sequence[Result], examples: Sequence[Example], console: Console) -> None:
    """Print the examples, and the results: one table for policies that have played the same tasks."""
    in_file = not console.is_terminal  # whose lines are not cut
    for number, example in enumerate(examples, 1):
        console.print(
            f"[bold]Example {number}[/] · task {example.task_id} · score {example.score:.2f}", highlight=False
        )
        for turn in example.turns:
            observation = f"  {turn.observation.strip()}"
            console.print(observation, style="dim", highlight=False, markup=False, soft_wrap=in_file)
            console.print(f"  > {turn.said}", style="bold", highlight=False, markup=False, soft_wrap=in_file)
    for (tasks, num_tasks), group in itertools.groupby(results, key=lambda r: (r.tasks, r.num_tasks)):
        rows = list(group)
        # A policy alone has its name, which may be long, above the table and not in a narrow column.
        alone = f"{short_label(rows[0].label)}: " if len(rows) == 1 else ""
        title = f"{alone}{tasks}: {num_tasks} tasks, greedy, 95 % intervals"
        table = Table(title=escape(title), title_justify="left")
        if not alone:
            table.add_column("policy", overflow="fold")
        for column in ("score", "success", "turns", "tokens"):
            table.add_column(column, justify="right", no_wrap=True)
        for r in rows:
            table.add_row(
                *([] if alone else [short_label(r.label)]),
                f"{r.score:.3f}  [{r.score_interval[0]:.3f}, {r.score_interval[1]:.3f}]",
                f"{r.success:.3f}  [{r.success_interval[0]:.3f}, {r.success_interval[1]:.3f}]",
                f"{r.turns:.1f}",
                "" if r.tokens is None else f"{r.tokens:.0f}",
            )
        console.print(table)


def show_differences(pairs: Sequence[tuple[Result, Result]], console: Console) -> list[str]:
    """Print how the second policy of each pair differs from the first. Returns the sentences."""
    texts = [difference(before, after) for before, after in pairs]
    for text in texts:
        console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    return texts


def compare(config: Config) -> list[Result]:
    """After a run: the starting policy beside the trained one; the table is printed and kept in `run.dir`.

    Raises ConfigError, EngineError or EnvironmentFault where they cannot be played.
    """
    policies = {"before": resolve_policy(config), "after": Path(config.run.dir) / "policy"}
    results, examples = evaluate_policies(config, policies)
    console = Console()
    show(results, examples, console)
    pairs = paired(results, *policies)
    text = "\n".join(show_differences(pairs, console))
    try:
        write_file(Path(config.run.dir) / "evaluation.json", [f"{results_json(results, pairs)}\n".encode()])
    except OSError as error:  # as on a full disk: the run is over, and its policy is saved
        print(f"impala-llm: {config.run.dir}/evaluation.json cannot be written ({error.strerror}): copy the table")
    write_comparison(config, *pairs[0], text)
    return results


def write_comparison(config: Config, before: Result, after: Result, text: str) -> None:
    """Add the comparison of two policies to the metrics of their run, at its last step."""
    folder = Path(config.run.dir) / "tensorboard"
    scores = {
        f"evaluation/{which}_{name}": value
        for which, result in (("before", before), ("after", after))
        for name, value in (("score", result.score), ("success_rate", result.success))
    }
    step = int(last_metrics(folder).get("step", 0))
    with MetricWriter(folder, config.run.metric_writers, with_lines=False) as writer:
        writer.write(step, scores)
        writer.write_text("before and after", text)


def main(config: Config, as_json: bool = False) -> int:
    """`impala-llm evaluate`: the policy of `model.path`, and the one that it began as where evaluation.start says so.

    Raises ConfigError, EngineError or EnvironmentFault.
    """
    policies = {config.model.path: resolve_policy(config)}
    if config.evaluation.start is not None:
        start = model_directory(config.evaluation.start)
        if start is None:
            raise ConfigError(
                f"evaluation.start={config.evaluation.start} is no policy: name a folder with a Hugging Face model, or "
                "one of impala_llm/assets"
            )
        policies = {"before": start, "after": policies[config.model.path]}
    results, examples = evaluate_policies(config, policies)
    console = Console(stderr=as_json)
    show(results, examples, console)
    pairs = paired(results, *policies) if len(policies) == 2 else []
    show_differences(pairs, console)
    if as_json:
        print(results_json(results, pairs))
    return 0
