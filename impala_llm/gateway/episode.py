"""An episode that is played through the gateway: its key, its calls of the engine, its rewards.

Invariant: all tokens that the engine samples for the episode become part of its tree, even if the client disconnects.
An episode holds at most one idle session of the engine, and none while a call is under way: so an engine with one slot
per episode never waits for ever.
"""

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from impala_llm.engines.base import EngineError, Generation, SamplingParams, TokenGenerator
from impala_llm.gateway.conversation import Conversation, Position
from impala_llm.gateway.tree import Completion
from impala_llm.rollout import EpisodeLimits, EpisodeSpec, Turn
from impala_llm.trajectory import Trajectory

_SEEDS = 1 << 63
_OF_BRANCH, _OF_CLIENT = 0, 1
"""Kinds of seeds that an episode derives from its own."""


class ContextFull(ValueError):
    """There is no room for another completion. The message names the limit."""


class EpisodeOver(RuntimeError):
    """The episode has ended: its key is no longer valid."""


@dataclass
class AgentResult:
    """The result of an episode, as its agent reports it."""

    reward: float
    score: float
    success: bool
    stats: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of single turns, by the id of the completion."""

    @classmethod
    def of(cls, result: Any) -> "AgentResult":
        """Read a number, or a dict with some of reward, score, success, stats, rewards.

        Raises:
            ValueError: it is neither, or a number in it is not finite.
        """
        given = {"reward": result} if not isinstance(result, dict) else dict(result)
        known = {"reward", "score", "success", "stats", "rewards"}
        if unknown := set(given) - known:
            raise ValueError(f"its result has {sorted(map(str, unknown))}: known are {sorted(known)}")
        reward = _number("reward", given.get("reward", given.get("score")))
        score = _number("score", given.get("score", min(1.0, max(0.0, reward))))
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"its score is {score:g}: it must lie in [0, 1]")
        tables = {}
        for name in ("stats", "rewards"):
            table = given.get(name) or {}
            if not isinstance(table, dict):
                raise ValueError(f"its {name} are a {type(table).__name__}: a dict from names to numbers is expected")
            if not all(isinstance(key, str) and key and "\0" not in key for key in table):
                raise ValueError(f"its {name} have a name that is no text, or empty, or has a zero character")
            tables[name] = {str(key): _number(f"{name}[{key!r}]", value) for key, value in table.items()}
        success = given.get("success", score == 1.0)
        if success not in (True, False):
            raise ValueError(f"its success is {success!r}: true or false is expected")
        return cls(reward, score, bool(success), **tables)


def _number(name: str, value: Any) -> float:
    try:
        number = float("nan") if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= 1e6:
        raise ValueError(f"its {name} is {value!r}: a number of at most 1e6 either way is expected")
    return number


class GatewayEpisode:
    """One episode. All methods are called from the event loop of the engine.

    Args:
        max_tokens: of its trajectory: those of all contexts together.
    """

    def __init__(
        self,
        spec: EpisodeSpec,
        engine: TokenGenerator,
        conversation: Conversation,
        limits: EpisodeLimits,
        max_tokens: int,
    ) -> None:
        self.key = f"sk-{secrets.token_urlsafe(32)}"
        self.spec, self.limits, self.conversation = spec, limits, conversation
        self.result: Any = None
        """Result of the episode that was posted; None: none was."""
        self.failure: EngineError | None = None
        """Error of the engine, after which the episode is not to be learned from."""
        self._engine: Any = engine
        self._max_tokens = max_tokens
        self._by_id: dict[str, Completion] = {}
        self._rewards: dict[str, float] = {}
        self._num_sessions = 0
        self._idle: tuple[str, int, Completion] | None = None
        """Session, seed and history that the engine keeps for it while no call is under way."""
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._aborted: set[str] = set()
        self._is_over = False

    async def sample(
        self, position: Position, limit: int | None, stop: tuple[str, ...], seed: int | None
    ) -> Completion:
        """Sample a completion. A caller that is cancelled leaves what was sampled until then in the tree.

        Args:
            limit: tokens that the client wants at most.
            stop: texts that end the completion.
            seed: the client's, for the same completion of the same request by the same policy in this episode; other
                episodes of the task, with which this one is compared, get others.

        Raises:
            ContextFull: no room for a completion.
            EpisodeOver: the episode has ended.
            EngineError: the engine has failed.
        """
        if self._is_over:
            raise EpisodeOver("this episode has ended")
        length = len(position.read) + (0 if position.parent is None else position.parent.num_tokens)
        tree = self.conversation.tree
        completion = tree.begin(position.parent, position.read)
        room = min(self.limits.max_length - length, self._max_tokens - tree.num_tokens)
        if room < 1:
            tree.end(completion, None)
            raise ContextFull(
                f"no room for a completion: the conversation has {length} tokens, at most engine.max_length="
                f"{self.limits.max_length}, and the episode {tree.num_tokens} in all branches, at most "
                f"agent.max_tokens={self._max_tokens}"
            )
        completion.limit = min(self.limits.max_new_tokens, room, limit or room)
        session, own_seed = self._session(position.parent, anew=seed is not None)
        params = SamplingParams(
            temperature=self.limits.temperature,
            max_new_tokens=completion.limit,
            stop_token_ids=self.conversation.chat.stop_token_ids,
            greedy=self.limits.greedy,
            seed=own_seed if seed is None else self._seed(seed % _SEEDS, _OF_CLIENT),
        )
        task = asyncio.ensure_future(self._generate(session, completion, params, stop))
        self._running[session] = task
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # read it even if no caller waits
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._abort(session)
            raise

    def check_room(self, texts: Iterable[str]) -> None:
        """Refuse texts that are too long for a context whatever their tokens are, before they block the event loop.

        Raises:
            ContextFull: they are.
        """
        size, longest = sum(1 + len(text) for text in texts), self.conversation.chat.longest_token
        if size > self.limits.max_length * (1 + longest):
            raise ContextFull(
                f"no room for a completion: the conversation has about {size} characters, which are more than "
                f"engine.max_length={self.limits.max_length} tokens of up to {longest}"
            )

    def completion_id(self, completions: list[Completion], prefix: str) -> str:
        """A name for the completions of one request, by which a turn may be rewarded: that of the last of them."""
        name = f"{prefix}-{secrets.token_hex(8)}"
        self._by_id[name] = completions[-1]
        return name

    def reward(self, completion_id: str, reward: Any) -> None:
        """Reward a turn, beside what it has been rewarded with before. ValueError where there is none of this id, or
        the sum is too large."""
        if completion_id not in self._by_id:
            raise ValueError(f"completion_id is {completion_id!r}: this episode has no such completion")
        total = self._rewards.get(completion_id, 0.0) + _number("reward", reward)
        self._rewards[completion_id] = _number("reward of this turn with what was posted before", total)

    @property
    def awaits_engine(self) -> bool:
        """Whether a request is under way, or the engine has failed one."""
        return bool(self._running) or self.failure is not None

    async def close(self) -> None:
        """End what is under way, and take no further request."""
        self._is_over = True
        for session in self._running:
            self._abort(session)
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._idle is not None:
            self._engine.release(self._idle[0])
            self._idle = None

    def trajectory(self, outcome: AgentResult) -> Trajectory:
        """The episode as a trajectory, once it is closed.

        Raises:
            EngineError: the engine has failed meanwhile.
            ValueError: no completion, or a reward for one that there is not.
        """
        if self.failure is not None:
            raise self.failure
        for name, reward in outcome.rewards.items():
            self.reward(name, reward)
        for name, reward in self._rewards.items():
            self._by_id[name].reward += reward
        self._rewards = {}
        return self.conversation.tree.trajectory(
            self.spec, reward=outcome.reward, score=outcome.score, success=outcome.success, stats=outcome.stats
        )

    def turns(self) -> list[Turn]:
        """Its completions as text, in the order in which they ended, each with what the policy read before it."""
        text = self.conversation.chat.text
        return [Turn(text(each.read), text(each.sampled), each.reward) for each in self.conversation.tree.completions]

    def _abort(self, session: str) -> None:
        self._aborted.add(session)
        self._engine.abort(session)

    def _session(self, parent: Completion | None, anew: bool) -> tuple[str, int]:
        """The engine's session for a call, and its seed: the one whose history it continues, or a new one."""
        idle, self._idle = self._idle, None
        if idle is not None:
            session, seed, history = idle
            if history is parent and not anew:
                return session, seed
            self._engine.release(session)
        number, self._num_sessions = self._num_sessions, self._num_sessions + 1
        if number == 0:
            return self.spec.episode_id, self.spec.seed
        # Another seed: parallel completions of one request must differ.
        return f"{self.spec.episode_id}/{number}", self._seed(number, _OF_BRANCH)

    def _seed(self, number: int, kind: int) -> int:
        """A seed of this episode."""
        return int(np.random.SeedSequence((self.spec.seed, number, kind)).generate_state(1, np.uint64)[0]) % _SEEDS

    async def _generate(
        self, session: str, completion: Completion, params: SamplingParams, stop: tuple[str, ...]
    ) -> Completion:
        parts: list[Generation] = []
        try:
            await self._sample_parts(session, completion.history, params, stop, parts)
        except EngineError as error:
            self.failure = error
            raise
        finally:
            is_kept = self.conversation.tree.end(completion, _joined(parts))
            del self._running[session]
            self._aborted.discard(session)
            if is_kept and not self._running and not self._is_over:
                self._idle = (session, params.seed, completion)
            else:
                self._engine.release(session)
        if not is_kept or parts[-1].finish_reason == "abort":
            raise EngineError(f"episode {self.spec.episode_id}: the engine aborted a completion")
        return completion

    async def _sample_parts(
        self, session: str, history: list[int], params: SamplingParams, stop: tuple[str, ...], parts: list[Generation]
    ) -> None:
        """Sample a completion: whole, or token by token where texts may end it, since nothing behind them is wanted."""
        tokens: list[int] = []
        while session not in self._aborted:
            room = params.max_new_tokens - len(tokens)
            part = await self._engine.generate(
                session, [*history, *tokens], replace(params, max_new_tokens=1 if stop else room)
            )
            parts.append(part)
            tokens += part.tokens.tolist()
            if part.finish_reason != "length":
                return
            text = self.conversation.chat.text(tokens) if stop else ""
            if any(word in text for word in stop):
                parts[-1] = replace(part, finish_reason="stop")
                return
            if len(tokens) >= params.max_new_tokens:
                return


def _joined(parts: list[Generation]) -> Generation | None:
    """One completion, made of its parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    tokens, log_probs, versions = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "log_probs", "versions")
    )
    return Generation(tokens, log_probs, versions, parts[-1].finish_reason)
