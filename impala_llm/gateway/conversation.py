"""The position of a request in the conversation of its episode: the completion that it continues, and its new tokens.

Invariant: a history that was seen before keeps its tokens, sampled ones included; only the new part is encoded. A
request with another history begins a branch at the last completion up to which the two histories agree. No I/O here.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from impala_llm.gateway.chat import ChatTokens, Message, TemplateRefused, text_of
from impala_llm.gateway.tree import Completion, ConversationTree


@dataclass(frozen=True)
class Position:
    """Point of the tree at which a request continues."""

    parent: Completion | None
    """Completion that the request continues; None: it begins at the root."""
    read: list[int]
    """New tokens after it, up to the completion that is requested."""
    key: str
    """Digest of the conversation up to the completion that is requested."""


class Conversation:
    """Requests and completions of an episode."""

    def __init__(self, chat: ChatTokens) -> None:
        self.chat = chat
        self.tree = ConversationTree()
        self._after: dict[str, Completion] = {}
        """Completions by the digest of the conversation up to and including them."""
        self._texts: list[tuple[str, Completion]] = []
        """Those of /v1/completions whose texts show all their tokens, each with the whole text up to its end."""

    def position_of(self, messages: Sequence[Message], tools: Sequence[Any]) -> Position:
        """The position of a chat request.

        Raises:
            TemplateRefused: the chat template cannot render it.
            ValueError: a content that is no text.
        """
        key = _digest("", list(tools))
        keys = [key]
        for message in messages:
            keys.append(_digest(keys[-1], _essence(message)))
        for known in range(len(messages) - 1, 0, -1):
            parent = self._after.get(keys[known])
            if parent is None or parent.generation is None:
                continue
            try:
                read = self.chat.following(messages[known:], tools, int(parent.generation.tokens[-1]))
            except TemplateRefused:
                continue  # the template cannot render these messages alone: render all from the beginning
            if read:
                return Position(parent, read, keys[-1])
        return Position(None, self.chat.opening(messages, tools), keys[-1])

    def position_of_text(self, prompt: str | Sequence[int]) -> Position:
        """The position of a request to /v1/completions, with a prompt of text or of tokens."""
        if isinstance(prompt, str):
            fitting = [(text, completion) for text, completion in self._texts if prompt.startswith(text)]
            text, parent = max(fitting, key=lambda each: len(each[0]), default=("", None))
            return Position(parent, self.chat.encode(prompt[len(text) :]), prompt)
        ids = list(prompt)
        histories = [(completion.tokens, completion) for completion in self.tree.completions]
        agreeing = [(tokens, completion) for tokens, completion in histories if ids[: len(tokens)] == tokens]
        tokens, completion = max(agreeing, key=lambda each: len(each[0]), default=([], None))
        return Position(completion, ids[len(tokens) :], self.chat.whole_text(ids))

    def remember(self, position: Position, completion: Completion, message: Message) -> None:
        """Note the message as which a completion was given to the client."""
        self._after[_digest(position.key, _essence(message))] = completion

    def remember_text(self, position: Position, completion: Completion) -> None:
        """Note a completion of /v1/completions, unless it has tokens that its text does not show, such as a last one
        that ended it: a prompt with this text asks for what follows the text alone."""
        text = self.chat.text(completion.sampled)
        if text == self.chat.whole_text(completion.sampled):
            self._texts.append((position.key + text, completion))


def _digest(before: str, value: Any) -> str:
    return hashlib.sha256((before + json.dumps(value, sort_keys=True, default=str)).encode()).hexdigest()


def _essence(message: Message) -> list[Any]:
    """The parts of a message that clients give back as they got them: not the reasoning, which most leave out, nor the
    spaces in the arguments of a call, which some write anew."""
    calls = [
        [call.get("id"), call["function"]["name"], _value(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return [message["role"], text_of(message.get("content")), calls, message.get("tool_call_id"), message.get("name")]


def _value(arguments: Any) -> Any:
    with contextlib.suppress(TypeError, ValueError):
        return json.loads(arguments)
    return arguments
