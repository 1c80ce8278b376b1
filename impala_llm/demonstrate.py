"""Records demonstrations: episodes that a script, a policy or a person plays, see demonstrations.py.

A script and a person answer in text. Here they are engines, so that the same rollout lays their episodes out as it does
a policy's: the environment gets the text of the completion's ids. Their completions have log-probability 0.

Invariant: recorded episodes are kept. An interrupted recording continues without playing again what the folder has. One
process at a time records into a folder.
"""

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import inspect
import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from impala_llm.config import ConfigError
from impala_llm.demonstrations import (
    HEADER,
    PART_EPISODES,
    Demonstration,
    Header,
    add_part,
    fingerprint,
    has_parts,
    read,
    read_header,
    write_header,
)
from impala_llm.engines import make_engine
from impala_llm.engines.base import FinishReason, Generation, SamplingParams, TokenGenerator
from impala_llm.engines.sglang.external_server import reserved_servers
from impala_llm.envs import contract, make_suite
from impala_llm.envs.base import AsyncSession, Scripted, Session, Split, Suite
from impala_llm.learning.policy.model_files import base_checksum
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.part_signatures import plain
from impala_llm.processes.stop_signals import ToldToStop
from impala_llm.rollout import ChatFormat, EpisodeAborted, EpisodeLimits, EpisodeSpec, Turn, play_episode
from impala_llm.settings import Config, holds_run, model_directory, written
from impala_llm.writable_folders import removed_if_refused, try_to_write, writing_to

_KEEP_EVERY_S = 60.0
"""Time after which what was recorded is written, where a part is not full before: a kill -9 loses no more. What a
person played is written at each end."""
_SEEDS = 1 << 31
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end the recording, beside the SIGINT that asyncio knows."""


class _Ended(Exception):
    """The person wants to play no further episode."""


def record(config: Config) -> Path:
    """Record what `demonstrations.num_episodes` asks for and the folder has not yet. Returns the folder.

    Raises:
        ConfigError: the folder's are of other settings, or another process records into it, or it cannot be written
            to, or the environment has no script, or another command uses servers of `engine.urls`.
        EngineError, EnvironmentFault: the episodes cannot be played.
        SystemExit: SIGINT, SIGTERM or SIGHUP was received; what was recorded is written.
    """
    settings, folder = config.demonstrations, Path(config.demonstrations.dir)
    policy = resolve_policy(config)
    too_long = 0
    with removed_if_refused(folder, HEADER), _owned(folder):
        _begin(config, policy, folder)
        there = {d.trajectory.episode_id for d in read(folder)}  # whole: damage is told before anything is played
        missing = [n for n in range(settings.num_episodes) if _episode_id(config, n) not in there]
        if missing:  # a folder that has all of them may be read-only
            with writing_to(f"demonstrations.dir={folder}"):
                try_to_write(folder)
        try:
            for catalogue in range(settings.num_catalogues):
                numbers = [n for n in missing if n % settings.num_catalogues == catalogue]
                if numbers:
                    too_long += asyncio.run(_until_told(_record(config, policy, folder, numbers, catalogue)))
        except _Ended:
            pass
        except (KeyboardInterrupt, SystemExit) as stop:
            print(f"{folder} has what was recorded so far: the same command records the rest", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    if too_long:
        print(
            f"{too_long} episodes did not fit into engine.max_length={config.engine.max_length} tokens with "
            f"completions of engine.max_new_tokens={config.engine.max_new_tokens}, and are left out",
            file=sys.stderr,
        )
    return folder


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Keep a folder for this process, and make it if it is missing: two would give their parts the same numbers."""
    with writing_to(f"demonstrations.dir={folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"demonstrations.dir={folder} is in use: another process records into it; wait for its end, or name "
                "another folder"
            ) from None
        except OSError:  # network file systems may have no locks
            pass
        yield
    finally:
        os.close(handle)


async def _until_told(recording: Coroutine[Any, Any, int]) -> int:
    """The result of the recording. One of `_ENDINGS` cancels it, as asyncio has it for SIGINT, and raises SystemExit
    then: so it writes what it has."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def end(number: int) -> None:
        if not told:  # a second one does not cut the end short
            told.append(number)
            task.cancel()

    heard = [number for number in _ENDINGS if signal.getsignal(number) != signal.SIG_IGN]  # as nohup has SIGHUP
    before = [signal.getsignal(number) for number in heard]
    for number in heard:
        loop.add_signal_handler(number, end, number)
    try:
        return await recording
    except asyncio.CancelledError:
        if told:
            raise SystemExit(128 + told[0]) from None
        raise
    finally:
        for number, handler in zip(heard, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _record(config: Config, policy: Path, folder: Path, numbers: Sequence[int], catalogue: int) -> int:
    """Play episodes of one suite and add them to the folder. Returns how many did not fit."""
    settings = config.demonstrations
    suite, source = _suite(config, catalogue)
    chat = ChatFormat.of(policy, suite.system_prompt)
    if settings.player == "person" and suite.system_prompt:
        print(suite.system_prompt + "\n")
    split: Split = settings.split  # type: ignore[assignment]  # checked by config.load
    tasks = list(contract.tasks(suite, split, "demonstrations.split"))
    random.Random(f"{config.run.seed}, {catalogue}").shuffle(tasks)
    limits = EpisodeLimits(config.engine.temperature, config.engine.max_new_tokens, config.engine.max_length)
    streams = asyncio.Semaphore(config.actor.max_episodes if settings.player == "policy" else 1)

    async with _players(config, policy, suite, chat) as player:

        def left_out() -> None:
            if settings.player == "person":
                print(f"The end: more than engine.max_length={limits.max_length} tokens; it is left out.\n")

        async def play(number: int) -> Demonstration | None:
            task = tasks[number // settings.num_catalogues % len(tasks)]
            seed = random.Random(f"{config.run.seed}, {number}").randrange(_SEEDS)
            spec = EpisodeSpec(
                _episode_id(config, number), task, number, number, seed, suite.name, settings.player,
                contract.signature(suite, task),
            )  # fmt: skip
            text: list[Turn] = []
            async with streams:
                session = _Watched(contract.session(suite, training=True))
                try:
                    row = await play_episode(spec, session, player(session, seed), chat, limits, text)
                except EpisodeAborted:
                    left_out()
                    return None
                except contract.EnvironmentFault:
                    raise
                except ValueError as error:  # there is no room for even the first completion
                    raise ConfigError(str(error)) from None
            if not any(session.last[2:4]):  # neither terminated nor truncated: the next observation does not fit
                left_out()
                return None
            if settings.player == "person":
                print(f"The end: score {row.score:.2f}.\n")
            return Demonstration(row, source, tuple(text))

        # One after another they begin only when their turn comes: a person is to be asked no more after the last one.
        tasks_under_way: list[asyncio.Task[Demonstration | None]] = []
        episodes: Iterable[Awaitable[Demonstration | None]] = map(play, numbers)
        if settings.player == "policy":
            tasks_under_way = [asyncio.create_task(play(number)) for number in numbers]
            episodes = asyncio.as_completed(tasks_under_way)
        try:
            return await _keep(folder, episodes, 0.0 if settings.player == "person" else _KEEP_EVERY_S)
        finally:
            await contract.end_episodes(tasks_under_way)


async def _keep(folder: Path, episodes: Iterable[Awaitable[Demonstration | None]], every_s: float) -> int:
    """Add episodes to the folder as they end, at least every so many seconds. Returns how many did not fit."""
    kept_at = time.monotonic()
    found: list[Demonstration] = []
    too_long = 0
    try:
        for episode in episodes:
            demonstration = await episode
            too_long += demonstration is None
            found += [] if demonstration is None else [demonstration]
            if len(found) >= PART_EPISODES or (found and time.monotonic() - kept_at >= every_s):
                with writing_to(f"demonstrations.dir={folder}"):
                    add_part(folder, found)
                found, kept_at = [], time.monotonic()
            await asyncio.sleep(0)  # where nothing else waits Ctrl-C comes through here
    finally:  # Ctrl-C and faults included
        with writing_to(f"demonstrations.dir={folder}"):
            add_part(folder, found)
    return too_long


Player = Callable[["_Watched", int], TokenGenerator]
"""From the session and the seed of an episode: the engine that plays it."""


@asynccontextmanager
async def _players(config: Config, policy: Path, suite: Suite, chat: ChatFormat) -> AsyncIterator[Player]:
    """The player of a suite's episodes."""
    if config.demonstrations.player == "policy":
        with reserved_servers(config):
            engine = make_engine(config, policy, version=0)
            try:
                await engine.start()
                yield lambda _session, _seed: engine
            finally:
                await engine.close()
        return

    def spoken(session: _Watched, seed: int) -> TokenGenerator:
        act: Callable[[str, dict[str, Any]], str] = functools.partial(_typed, chat, config.engine.max_new_tokens)
        if config.demonstrations.player == "script":
            assert isinstance(suite, Scripted)  # `_suite` has looked
            script = contract.call(f"env {suite.name}: script", lambda: suite.script(config.demonstrations.noise, seed))
            act = functools.partial(contract.act, script, env=suite.name)
        return _Spoken(chat, session, act)

    yield spoken


class _Watched:
    """A session that keeps what it returned last: a player that answers in text reads it."""

    def __init__(self, session: Session | AsyncSession) -> None:
        self._session = session
        self.last: Any = None

    async def reset(self, task_id: int) -> tuple[str, dict[str, Any]]:
        begun: tuple[str, dict[str, Any]] = await self._keep(self._session.reset(task_id))
        return begun

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        played: tuple[str, float, bool, bool, dict[str, Any]] = await self._keep(self._session.step(action))
        return played

    def close(self) -> None:
        contract.close(self._session)

    async def _keep(self, result: Any) -> Any:
        self.last = await result if inspect.isawaitable(result) else result
        return self.last


class _Spoken:
    """A player that answers in text, as an engine of one episode."""

    def __init__(self, chat: ChatFormat, watched: _Watched, act: Callable[[str, dict[str, Any]], str]) -> None:
        self._chat, self._watched, self._act = chat, watched, act

    async def generate(self, session_id: str, prompt: Sequence[int], params: SamplingParams) -> Generation:
        tokens = self._chat.completion(self._act(self._watched.last[0], self._watched.last[-1]))
        reason: FinishReason = "stop"
        if len(tokens) == params.max_new_tokens + 1:  # as a policy's that is cut after its last word
            tokens, reason = tokens[:-1], "length"
        elif len(tokens) > params.max_new_tokens:
            reason = "abort"
        zeros = np.zeros(len(tokens), np.int32)
        return Generation(np.array(tokens, np.int32), zeros.astype(np.float32), zeros, reason)

    def release(self, session_id: str) -> None:
        pass


def _typed(chat: ChatFormat, most: int, observation: str, _info: dict[str, Any]) -> str:
    """The action that a person types, asked for until it can be one. Raises _Ended where they end the recording.

    Args:
        most: tokens of a completion.
    """
    print(observation.strip(), flush=True)
    while True:
        action = _line()
        if action is None or contract.text_problem(action):
            print("not UTF-8, type it again", flush=True)
        elif (length := len(chat.completion(action)) - 1) > most:  # without the token that ends it
            print(f"{length} tokens, and engine.max_new_tokens={most} is the most: type a shorter answer", flush=True)
        elif action:
            return action


def _line() -> str | None:
    """A line that a person types; None where it cannot be decoded. Bytes that are no UTF-8 are halves of surrogate
    pairs in it. Raises _Ended at the end of their input."""
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        with contextlib.suppress(io.UnsupportedOperation):  # a strict reader would lose the lines after it as well
            sys.stdin.reconfigure(errors="surrogateescape")
    # The handlers of the event loop would wait for the next await, and that for a line.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDINGS)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _end_at_once)
    try:
        return input("> ").strip()
    except UnicodeError:
        return None
    except (EOFError, KeyboardInterrupt):
        raise _Ended from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once(number: int, _frame: object) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else ToldToStop(number)


def _suite(config: Config, catalogue: int) -> tuple[Suite, str]:
    """A suite of the configured environment, and its name. catalogue: which of several, counted from 0."""
    env, source = config.env, config.env.name
    if env.name == "webshop" and env.webshop.items is None:
        seed = env.webshop.catalogue_seed + catalogue
        env = dataclasses.replace(env, webshop=dataclasses.replace(env.webshop, catalogue_seed=seed))
        source = f"{env.name}, catalogue {seed}"
    suite = make_suite(env)
    if config.demonstrations.player == "script" and not isinstance(suite, Scripted):
        raise ConfigError(
            f"demonstrations.player=script: env={env.name} has no script: set demonstrations.player=policy or person, "
            "or give its suite a method `script` (docs/demonstrations.md)"
        )
    return suite, source


def _episode_id(config: Config, number: int) -> str:
    return f"{config.demonstrations.player}-{config.run.seed}-{number}"


def _begin(config: Config, policy: Path, folder: Path) -> None:
    """Write the header of a folder without demonstrations; refuse those of other settings."""
    env: dict[str, Any] = {"name": config.env.name}
    if config.env.name == "webshop":
        env["webshop"] = dataclasses.asdict(config.env.webshop)
    elif config.env.args is not None:
        args = config.env.args
        env["args"] = args if isinstance(args, dict) else dataclasses.asdict(args)
    of_recording = dataclasses.asdict(config.demonstrations)
    keys = ["player", "split", "num_catalogues", *(["noise"] if config.demonstrations.player == "script" else [])]
    of_recording = {key: of_recording[key] for key in keys}
    settings = {"env": env, "demonstrations": of_recording}
    by_policy = config.demonstrations.player == "policy"
    if by_policy:
        settings["engine"] = {key: getattr(config.engine, key) for key in ("temperature", "max_new_tokens")}
    settings["run"] = {"seed": config.run.seed}
    weights = base_checksum(policy) if by_policy else None
    tokenizer = AutoTokenizer.from_pretrained(policy)
    header = Header(
        config.env.name, config.demonstrations.player, config.model.path, fingerprint(tokenizer), len(tokenizer),
        plain(settings), weights,
    )  # fmt: skip
    if not has_parts(folder) and (holds_run(folder) or model_directory(str(folder)) is not None):
        raise ConfigError(f"demonstrations.dir={folder} holds a run, a warm start or a policy: name another folder")
    if not has_parts(folder):  # a header alone is of a recording that never began, and claims nothing
        with writing_to(f"demonstrations.dir={folder}"):
            write_header(folder, header)
        return
    before = read_header(folder)
    where = f"demonstrations.dir={folder} holds demonstrations"
    fix = "name another folder, or put it back"
    if before.tokenizer != header.tokenizer:
        raise ConfigError(f"{where} with the tokenizer of model.path={before.model}, and not of {header.model}: {fix}")
    fix += f"; to learn from it as it is, set sft.data=[{folder}]"
    theirs = _by_key(before.settings)
    for key, value in _by_key(json.loads(json.dumps(header.settings))).items():
        if key in theirs and theirs[key] != value:
            if key == "run.seed":  # its episodes have other names, so they would be added to the folder's
                fix += (
                    f"; others are recorded with demonstrations.dir=NEW, and sft.data=[{folder},NEW] learns from both"
                )
            raise ConfigError(f"{where} with {key}={written(theirs[key])}, and not {written(value)}: {fix}")
    if before.weights != weights:
        raise ConfigError(f"{where} of model.path={before.model} with other weights than {header.model} has: {fix}")


def _by_key(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a header by their keys, such as env.args.task. A mapping that is the value of one is whole: what
    it leaves out counts as well."""
    found = settings
    for section in ("env", "demonstrations", "engine", "run", "env.webshop", "env.args"):
        if isinstance(inner := found.get(section), dict):
            found = found | {f"{section}.{name}": value for name, value in inner.items()}
            del found[section]
    return found
