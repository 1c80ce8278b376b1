"""Checks the bodies of OpenAI's requests: returns the request, or a sentence with the reason of its refusal.

Invariant: nothing that would make the policy sample from another distribution than the one whose log-probabilities are
recorded gets through: it is refused, or dropped with a warning where the settings say so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from impala_llm.processes.limited_warnings import RateLimitedWarnings

MOST_COMPLETIONS = 64
"""Limit of `n`, and of the completions of all prompts of a request."""
_MOST_TOOLS = 1 << 20
"""Characters of `tools`: they are encoded on the actor's event loop."""

_OF_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (),  # compared with the settings' one
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Keys that change what is sampled, and their values that ask for nothing."""
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "reasoning_effort": (),
}
"""Known keys that are not served, and their values that ask for nothing."""
_NEUTRAL = _OF_SAMPLING | _NOT_SERVED
_HONOURED = {
    "model",
    "messages",
    "prompt",
    "tools",
    "n",
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "stream",
}
_WITHOUT_EFFECT = {
    *("stream_options", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key"),
    *("safety_identifier", "verbosity", "prompt_cache_retention", "temperature"),
}


class BadRequest(ValueError):
    """A request that is refused. The message is a sentence for its sender."""


@dataclass(frozen=True)
class ParsedRequest:
    """Content of a request."""

    n: int
    limit: int | None
    """Tokens of a completion at most; None: the settings' limit."""
    stop: tuple[str, ...]
    seed: int | None
    stream: bool
    includes_usage: bool
    """Whether a stream ends with the numbers of tokens."""
    tools: list[Any]


class RequestReader:
    """Reads bodies.

    Args:
        temperature: the only one that is accepted; None: whatever is asked for is passed over, as in evaluations.
        drops: drop what cannot be honoured, with a warning, in place of a refusal.
        warnings: of all episodes, so that they fill no log together.
    """

    def __init__(self, temperature: float | None, drops: bool, warnings: RateLimitedWarnings) -> None:
        self._temperature, self._drops, self._warnings = temperature, drops, warnings

    def read(self, body: Mapping[str, Any]) -> ParsedRequest:
        """Check a body, apart from its messages or prompt. Raises BadRequest."""
        for key, value in body.items():
            if value is None or key in _HONOURED or key in _WITHOUT_EFFECT:
                continue
            if not any(_is_same(value, neutral) for neutral in _NEUTRAL.get(key, ())):
                self._cannot(key, value, "leave it out")
        temperature = body.get("temperature")
        is_other = temperature is not None and not _is_same(temperature, self._temperature)
        if self._temperature is not None and is_other:
            self._cannot(
                "temperature", temperature, f"leave it out, or set engine.temperature, now {self._temperature:g}"
            )
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BadRequest("tools is no list of objects: send them as OpenAI's protocol has them")
        if tools and len(json.dumps(tools)) > _MOST_TOOLS:
            raise BadRequest(f"tools has more than {_MOST_TOOLS} characters: describe fewer tools, or more briefly")
        stream_options = body.get("stream_options") or {}
        return ParsedRequest(
            _integer(body, "n", 1, MOST_COMPLETIONS) or 1,
            _integer(body, "max_completion_tokens", 1) or _integer(body, "max_tokens", 1),
            _stops(body.get("stop")),
            _integer(body, "seed", None),
            bool(body.get("stream")),
            isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
            [] if body.get("tool_choice") == "none" else tools,
        )

    def _cannot(self, key: str, value: Any, fix: str) -> None:
        reason = "is not served"
        if key in _OF_SAMPLING:
            reason = (
                "cannot be honoured: the log-probabilities that the policy learns from would not be those of what was "
                "sampled"
            )
        sentence = f"{key}={_shown(value)} {reason}; {fix}"
        if not self._drops:
            raise BadRequest(f"{sentence} (or set agent.unsupported=drop)")
        known = key if key in _NEUTRAL else "another key"
        self._warnings.log(f"gateway, {known}", f"dropped: {sentence}")


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat request. Raises BadRequest where they are malformed."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest(f"messages is {_shown(messages)}: a list of messages is expected")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{index}] is {_shown(message)}: an object with a role is expected")
        for call in message.get("tool_calls") or ():
            if (
                not isinstance(call, dict)
                or not isinstance(call.get("function"), dict)
                or "name" not in call["function"]
            ):
                raise BadRequest(
                    f"messages[{index}] has the tool call {_shown(call)}: a function with a name is expected"
                )
    if messages[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's: end with what it is to answer")
    return messages


def prompts_of(body: Mapping[str, Any], vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completions request: texts, or lists of token ids. Raises BadRequest."""
    prompt = body.get("prompt")
    prompts: list[Any]
    is_ids = isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)
    prompts = prompt if isinstance(prompt, list) and not is_ids else [prompt]
    for each in prompts:
        if isinstance(each, str) and each:
            continue
        if not (isinstance(each, list) and each and all(type(t) is int and 0 <= t < vocab_size for t in each)):
            raise BadRequest(
                f"prompt has {_shown(each)}: a text that is not empty, or token ids below {vocab_size}, is expected"
            )
    if not prompts:
        raise BadRequest("prompt is empty: send a text")
    return prompts


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are equal. Python takes False for 0, and True for 1."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def _integer(body: Mapping[str, Any], key: str, least: int | None, most: int | None = None) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    fits = type(value) is int and (least is None or value >= least) and (most is None or value <= most)
    if not fits:
        bounds = "an integer" if least is None else f"an integer from {least}" + ("" if most is None else f" to {most}")
        raise BadRequest(f"{key} is {_shown(value)}: {bounds} is expected")
    return int(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest(f"stop is {_shown(value)}: a text or a list of texts is expected")
    return tuple(stops)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:80] + "..."
