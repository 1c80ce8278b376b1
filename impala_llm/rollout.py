"""One episode: environment × engine → `Trajectory`. Tokens in, tokens out.

Invariant: the token row of an episode only ever grows. Observations are tokenised once, when they arrive; completions
are the engine's ids, never decoded and encoded again, so the learner scores exactly what the policy saw and said.
"""

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from impala_llm.engines.base import EngineError, Generation, ModelRefused, SamplingParams, TokenGenerator
from impala_llm.envs import contract
from impala_llm.envs.base import AsyncSession, Session
from impala_llm.trajectory import NO_VERSION, Trajectory

ENGINE_AWAITED = "a completion of the engine was awaited"
"""Argument of the CancelledError of an episode that was cancelled meanwhile. It is no class of its own: Python 3.11's
`asyncio.timeout` makes a TimeoutError of CancelledError itself, and of no subclass."""


class EpisodeAborted(RuntimeError):
    """The engine ended a completion early, and there is nothing to learn from what was played before."""


class ChatFormat:
    """Turns observations into tokens around the completions, by the tokenizer's own chat template.

    The template is rendered once with marks in place of the messages; the texts between the marks are the fixed pieces
    of a conversation. Rendering it again for every turn would re-tokenise earlier completions, and some templates
    rewrite them.

    Args:
        tokenizer: of the policy, with a chat template. It belongs to the format from now on, see `make_special`.
        system_prompt: first message; empty for none.

    Raises:
        ValueError: the tokenizer has no chat template, or one that drops or repeats messages, or that writes no special
            token behind a completion.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system_prompt: str = "") -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat_template: set one in the policy's directory (model.path)")
        self._tokenizer = tokenizer
        marks = ["qzobservationone", "qzcompletionone", "qzobservationtwo"]  # letters only: no template alters them
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        conversation = [
            {"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
        ]

        def render(messages: list[dict[str, str]]) -> str:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert isinstance(text, str)
            return text

        opening = render(system + conversation[:1]).split(marks[0])
        middle = render(system + conversation)
        if len(opening) != 2 or any(middle.count(mark) != 1 for mark in marks):
            raise ValueError("the chat template drops or repeats messages: it must show each message once")
        closing, prompt = middle.split(marks[1])[1].split(marks[2])
        self._before_first, self._after_first = (self._encode_template(piece) for piece in opening)
        between, self._after_observation = self._encode_template(closing), self._encode_template(prompt)
        self._observation_ids = _KnownTexts(ContentEncoder(tokenizer))
        # Tokenizers add runs of spaces as well, and encode what they do not know as a special token.
        added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._ending_ids = {*tokenizer.all_special_ids, *added} - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}
        self._closing = self.closing_of(between)
        if not self._closing:
            raise ValueError(
                f"the chat template writes {closing!r} behind a completion: no special token ends it, and a text may "
                f"be a part of one; let it write eos_token={tokenizer.eos_token!r} or another special token there"
            )
        self._after_end, end = between[len(self._closing) :], self._closing[-1]
        make_special(tokenizer, end)
        self.closing_text = closing.partition(str(tokenizer.convert_ids_to_tokens(end)))[0]
        """Text of the template between a completion and the token that ends it; mostly empty."""
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({tokenizer.eos_token_id, end} - {None}))

    @classmethod
    def of(cls, policy: Path, system_prompt: str) -> "ChatFormat":
        """Make it with the tokenizer in a policy's directory. Raises ModelRefused where it, or its template, fails."""
        try:
            return cls(AutoTokenizer.from_pretrained(policy), system_prompt)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ModelRefused(
                f"tokenizer or chat template of the model {policy} cannot be used ({type(error).__name__}: {reason}): "
                "copy the model again, or correct them"
            ) from error

    def first(self, observation: str) -> list[int]:
        """Ids of the conversation up to the first completion."""
        return [*self._before_first, *self._observation_ids(observation), *self._after_first]

    def following(self, observation: str, last_token: int) -> list[int]:
        """Ids between a completion that ended with `last_token` and the next completion."""
        closing = () if last_token in self.stop_token_ids else self._closing  # which the policy did not generate
        return [*closing, *self._after_end, *self._observation_ids(observation), *self._after_observation]

    def completion(self, text: str) -> list[int]:
        """Ids of a completion that is not sampled, up to the token that ends it, as the template closes it."""
        return [*_without_special(self._tokenizer, text), *self._closing]

    def text(self, completion: np.ndarray) -> str:
        """Text of a completion without what closes it. For the environment only; it is never encoded again."""
        text = self._tokenizer.decode(completion.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)  # of one row
        return text.removesuffix(self.closing_text)

    def closing_of(self, written: tuple[int, ...]) -> tuple[int, ...]:
        """Ids that close a completion: those that the template writes behind it up to the one that ends it, or none."""
        return next((written[:end] for end, token in enumerate(written, 1) if token in self._ending_ids), ())

    def _encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class ContentEncoder:
    """Encodes texts of users, tools and environments, which must not end a turn or forge a completion or its
    reasoning: a text that spells a special token, or an added one that the chat template writes, stays a text.

    Added tokens that the template does not write are tokens of texts, such as the HTML tags of some families.

    Args:
        tokenizer: of the policy, with its chat template; it is not changed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, template = tokenizer, str(tokenizer.chat_template)
        self._of_template = {
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if not token.special and token.content.strip() and token.content in template
        }

    def __call__(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text."""
        ids = _without_special(self._tokenizer, text)
        return ids if self._of_template.isdisjoint(ids) else _without_special(self._splitting, text)

    @cached_property
    def _splitting(self) -> PreTrainedTokenizerBase:
        """A copy to which the template's tokens are special ones: tokenizers can split no others."""
        tokenizer = copy.deepcopy(self._tokenizer)
        for number in self._of_template:
            make_special(tokenizer, number)
        return tokenizer


def _without_special(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def make_special(tokenizer: PreTrainedTokenizerBase, end: int) -> None:
    """Make a token that ends a completion a special one of this tokenizer: no text spells it, and no text shows it.

    It may be merely an added one. No id changes.
    """
    token = tokenizer.added_tokens_decoder.get(end)
    if token is not None and not token.special:
        token.special = True
        tokenizer.add_tokens([token], special_tokens=True)


class _KnownTexts:
    """Token ids of the texts that were asked for last: the episodes of a group read the same pages.

    Args:
        most: tokens of all of them together, of up to 40 bytes each.
    """

    def __init__(self, encode: Callable[[str], tuple[int, ...]], most: int = 1 << 20) -> None:
        self._encode, self._most = encode, most
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._num_tokens = 0

    def __call__(self, text: str) -> tuple[int, ...]:
        if text in self._known:
            self._known.move_to_end(text)
            return self._known[text]
        self._known[text] = ids = self._encode(text)
        self._num_tokens += len(ids) + 1  # of empty ones there is an end as well
        while self._num_tokens > self._most:
            self._num_tokens -= len(self._known.popitem(last=False)[1]) + 1
        return ids


@dataclass(frozen=True)
class EpisodeSpec:
    """Metadata of a trajectory that is known before the first step: actor, ticket, task, seed."""

    episode_id: str
    task_id: int
    group_id: int
    ticket_id: int
    seed: int
    env: str
    actor_id: str
    signature: str

    @property
    def trajectory_fields(self) -> dict[str, Any]:
        """The fields of a `Trajectory` that are known here: all but the seed."""
        return {name: value for name, value in vars(self).items() if name != "seed"}


Completion = tuple[int, Generation, float]
"""Index of its first token, the engine's result, reward."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Sampling of a completion, and the largest length of a completion and of an episode, in tokens.

    unroll_turns, unroll_tokens: an unroll ends with the turn in which it has so many turns or action tokens.
    ends_at: time of the event loop from which no turn begins but the first. The turns so far are kept then, and where
        the engine aborts a completion: an episode that is cut there, and which the environment has given no score. Half
        a completion is no action, and is dropped. None: there is no such time, and nothing is kept.
    """

    temperature: float
    max_new_tokens: int
    max_length: int
    greedy: bool = False
    unroll_turns: int | None = None
    unroll_tokens: int | None = None
    ends_at: float | None = None

    def is_time_over(self) -> bool:
        """Whether no turn may begin any more. Called in the event loop."""
        return self.ends_at is not None and asyncio.get_running_loop().time() >= self.ends_at

    def ends_unroll(self, completions: list[Completion]) -> bool:
        """Whether an unroll of these completions is complete."""
        if self.unroll_turns is not None and len(completions) >= self.unroll_turns:
            return True
        return self.unroll_tokens is not None and sum(len(c.tokens) for _, c, _ in completions) >= self.unroll_tokens


@dataclass(frozen=True)
class Turn:
    """One step as text, for people to read."""

    observation: str
    action: str
    reward: float

    @property
    def said(self) -> str:
        """The action to print: of one without a character that can be seen, that it is empty."""
        return self.action if self.action.strip() else "(empty)"


async def play_episode(
    spec: EpisodeSpec,
    session: Session | AsyncSession,
    engine: TokenGenerator,
    chat: ChatFormat,
    limits: EpisodeLimits,
    transcript: list[Turn] | None = None,
    on_unroll: Callable[[Trajectory], object] | None = None,
) -> Trajectory:
    """Play one episode to its end.

    The end is a terminal state, an outside limit (`truncated`), or a full context: the policy cannot act where there is
    no room for what it would have to read, here or in evaluation, so nothing is to come.

    Wherever an episode is cut, by an outside limit or into unrolls, its tokens end with the observation after the last
    completion, where the next turn would begin: the value of that state stands for what is to come.

    Args:
        transcript: if given, filled with the episode as text.
        on_unroll: gets each unroll, as cut by `limits`, after which the episode continues; the last one is returned.
            None: the episode stays whole.

    Raises:
        EpisodeAborted: the engine aborted a completion, and no turn before it was to be kept.
        EngineError: the engine refused the request or died.
        EnvironmentFault, ValueError: the environment broke its contract; its first observation leaves no room.
    """
    info: dict[str, Any] = {}
    terminated = truncated = False
    try:
        observation = await contract.reset(session, spec.task_id, spec.env)
        played = _begin(spec, chat.first(observation), limits)
        while not (terminated or truncated) and len(played.tokens) < limits.max_length:
            if played.completions and limits.is_time_over():  # nothing would abort the next completion
                info, truncated = {}, True
                break
            # Not before it is known that the episode continues: the last unroll has a turn, as every other.
            if on_unroll is not None and limits.ends_unroll(played.completions):
                on_unroll(played.end_unroll({}, bootstrap=True, continues=True))
            params = _sampling(spec, chat, limits, room=limits.max_length - len(played.tokens))
            completion = await _completion(engine, spec.episode_id, played.tokens, params)
            if completion.finish_reason == "abort":
                if limits.ends_at is None or not played.completions:
                    raise EpisodeAborted(
                        f"episode {spec.episode_id}: the engine aborted the completion of turn {played.num_turns}"
                    )
                info, truncated = {}, True
                break
            action, before = chat.text(completion.tokens), observation
            observation, reward, terminated, truncated, info = await contract.step(session, action, spec.env)
            played.add(completion, reward)
            if transcript is not None:
                transcript.append(Turn(before, action, reward))
            if not terminated:
                played.tokens = [*played.tokens, *chat.following(observation, played.tokens[-1])]
    finally:
        engine.release(spec.episode_id)
        contract.close(session)
    bootstrap = truncated and not terminated and len(played.tokens) <= limits.max_length
    return played.end_unroll(info if terminated or truncated else {}, bootstrap=bootstrap)  # else it may hold anything


def _begin(spec: EpisodeSpec, tokens: list[int], limits: EpisodeLimits) -> "_Played":
    """An episode at its first observation. Raises ValueError where that leaves no room for a completion."""
    if len(tokens) >= limits.max_length:
        raise ValueError(
            f"task {spec.task_id}: its first observation has {len(tokens)} tokens and leaves no room for a completion "
            f"at engine.max_length={limits.max_length}: raise engine.max_length"
        )
    return _Played(spec, tokens)


async def _completion(engine: TokenGenerator, session: str, tokens: list[int], params: SamplingParams) -> Generation:
    """Sample a completion; where this is cancelled, the error says that the engine was awaited."""
    try:
        return await engine.generate(session, tokens, params)
    except asyncio.CancelledError as error:
        if not contract.is_cancelled():
            raise EngineError("the engine raised CancelledError: what it waited for was cancelled") from error
        raise asyncio.CancelledError(ENGINE_AWAITED) from None


def _sampling(spec: EpisodeSpec, chat: ChatFormat, limits: EpisodeLimits, room: int) -> SamplingParams:
    return SamplingParams(
        temperature=limits.temperature,
        max_new_tokens=min(limits.max_new_tokens, room),
        stop_token_ids=chat.stop_token_ids,
        greedy=limits.greedy,
        seed=spec.seed,
    )


@dataclass
class _Played:
    """Episode so far."""

    spec: EpisodeSpec
    tokens: list[int]
    """Since its start. Replaced and not changed: an engine may hold it."""
    completions: list[Completion] = field(default_factory=list)
    """Completions of the present unroll."""
    num_turns: int = 0
    num_unrolls: int = 0

    def add(self, completion: Generation, reward: float) -> None:
        """Add a completion and its reward."""
        self.completions.append((len(self.tokens), completion, reward))
        self.tokens = [*self.tokens, *completion.tokens.tolist()]
        self.num_turns += 1

    def end_unroll(self, info: dict[str, Any], *, bootstrap: bool, continues: bool = False) -> Trajectory:
        """Lay the present unroll out as the arrays of a `Trajectory`, and begin the next one.

        Args:
            info: of the step that has ended the episode; empty where none has.
            bootstrap: keep what follows the last completion, whose value is to be bootstrapped; else it is cut off.
            continues: whether the episode continues.
        """
        spec, tokens, completions = self.spec, self.tokens, self.completions
        num_tokens = len(tokens) if bootstrap else completions[-1][0] + len(completions[-1][1].tokens)
        self.completions = []
        self.num_unrolls += 1
        return Trajectory(
            **arrays_of(tokens[:num_tokens], completions),
            bootstrap=bootstrap,
            continues=continues,
            unroll_index=self.num_unrolls - 1,
            score=float(info.get("score", 0.0)),
            success=bool(info.get("success", False)),
            stats={key: float(value) for key, value in info.get("stats", {}).items()},
            **spec.trajectory_fields,
        )


def arrays_of(tokens: Sequence[int], completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the arrays of a `Trajectory` by name.

    Args:
        tokens: all of it.
        completions: those that are learned from, in order; all else is context.
    """
    mask = np.zeros(len(tokens), np.bool_)
    log_probs = np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), NO_VERSION, np.int32)
    rewards = np.zeros(len(tokens), np.float32)
    turns = np.empty((len(completions), 2), np.int32)
    for k, (start, completion, reward) in enumerate(completions):
        end = start + len(completion.tokens)
        mask[start:end] = True
        log_probs[start:end] = completion.log_probs
        versions[start:end] = completion.versions
        rewards[end - 1] = reward
        turns[k] = start, end
    return {
        "tokens": np.asarray(tokens, np.int32),
        "action_mask": mask,
        "behaviour_log_probs": log_probs,
        "versions": versions,
        "rewards": rewards,
        "turns": turns,
    }
