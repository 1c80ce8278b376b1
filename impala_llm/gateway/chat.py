"""Messages of a chat as tokens, and completions as messages.

The policy's own chat template renders a conversation; texts of users and tools are encoded apart from it, so that a
text that spells a token of the template stays a text. Messages after a completion are rendered behind a mark in the
completion's place: its tokens are never made from its text again.
"""

import bisect
import contextlib
import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from impala_llm.envs.contract import text_problem
from impala_llm.gateway.tool_calls import FAMILIES, calls_in
from impala_llm.rollout import ChatFormat, ContentEncoder, make_special

Message = Mapping[str, Any]

_LETTERS = "abcdefghij"
_MARKS = re.compile(r"(qzmessage[a-j]+qz)")
"""Words in place of contents: of letters only, so that no template alters them."""
_COMPLETION = "qzcompletionqz"
_THINK, _THOUGHT = "<think>", "</think>"
_OPENED_WITHIN = 8
"""Tokens at the end of a prompt in which the template may open the reasoning."""
_MOST_TEXTS, _LONGEST_TEXT = 1024, 4096
"""Texts whose tokens are kept, and characters of such a text: with their tokens they take some tens of MB at most."""
_MOST_KINDS = 128
"""Conversations that differ in more than what users and tools say, whose templates are kept: a system message of
20,000 tokens takes 1 MB."""


class TemplateRefused(ValueError):
    """The chat template cannot render this conversation. The message has its reason."""


@dataclass(frozen=True)
class Reply:
    """A completion as a message."""

    content: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    """As in OpenAI's protocol: each with an id of its own, and arguments as a JSON text."""

    def message(self) -> dict[str, Any]:
        """The assistant's message in OpenAI's protocol."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


class ChatTokens:
    """Between messages and tokens, by the tokenizer of a policy.

    Args:
        tool_parser, reasoning_parser: as in the settings of agents.

    Raises:
        ValueError: the tokenizer has no chat template, or not the tokens between which the parser looks for calls.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool_parser: str = "none", reasoning_parser: str = "none"
    ) -> None:
        self.tokenizer = tokenizer
        self._format = ChatFormat(tokenizer)
        self.stop_token_ids = self._format.stop_token_ids
        vocabulary = tokenizer.get_vocab()
        self.longest_token = max(map(len, vocabulary))
        """Characters that a token stands for, at most."""
        self._pieces = functools.lru_cache(_MOST_KINDS)(self._render_pieces)
        self._content_encoder = ContentEncoder(tokenizer)
        self._short_ids = functools.lru_cache(_MOST_TEXTS)(self._content_ids)
        self._family = FAMILIES.get(tool_parser)
        self._finds_reasoning = reasoning_parser == "think"
        call_tokens = () if self._family is None else (self._family.opening, self._family.closing)
        for token in call_tokens:
            if token not in vocabulary:
                raise ValueError(
                    f"agent.tool_parser={tool_parser} finds calls by the token {token!r}, which this tokenizer does "
                    "not have: choose the parser of the policy's family, or none"
                )
        self._call_ids = [vocabulary[token] for token in call_tokens]
        self._marks_speakers = False
        """Whether a completion is ended by the mark of who speaks next, such as <|user|> or <|observation|> of GLM."""
        before_user, before_tool = self._closing("user"), self._closing("tool")
        if before_tool and before_user != before_tool and before_user[:-1] == before_tool[:-1]:
            self._marks_speakers = True
            make_special(tokenizer, before_tool[-1])
            self.stop_token_ids = tuple(sorted({*self.stop_token_ids, before_tool[-1]}))

    def _closing(self, role: str) -> tuple[int, ...]:
        """Tokens that close a completion before a message of a role; none where the template cannot render that."""
        try:
            return self._behind_completion([{"role": role, "content": _mark(0), "tool_call_id": "q", "name": "q"}], [])[
                1
            ]
        except TemplateRefused:
            return ()

    @property
    def finds_calls(self) -> bool:
        """Whether there is a parser for tool calls."""
        return self._family is not None

    def opening(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Tokens of a conversation from its beginning up to the next completion.

        Raises:
            TemplateRefused: the template cannot render it, or leaves a part out.
        """
        marked, contents = _mark_contents(messages)
        return self._filled(self._pieces(_frozen(marked), _frozen(tools), ""), contents)

    def following(self, messages: Sequence[Message], tools: Sequence[Any], last_token: int) -> list[int]:
        """Tokens between a completion that ended with `last_token` and the next one, with the messages in between.

        Raises:
            TemplateRefused: the template cannot render them there.
        """
        marked, contents = _mark_contents(messages)
        pieces, closing = self._behind_completion(marked, tools)
        tokens, stops = self._filled(pieces, contents), self.stop_token_ids
        if not closing or last_token not in stops:
            return tokens
        # The policy generated the token that ends its completion; but one mark of a speaker does not stand for another.
        is_there = closing[-1] == last_token if self._marks_speakers else closing[-1] in stops
        return tokens[len(closing) :] if is_there else tokens

    def _behind_completion(
        self, marked: list[dict[str, Any]], tools: Sequence[Any]
    ) -> tuple[list[str | tuple[int, ...]], tuple[int, ...]]:
        """The template's text between a completion and the next one, with messages in between; and the first tokens of
        it, which close the completion."""
        before = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _COMPLETION}]
        pieces = self._pieces(_frozen([*before, *marked]), _frozen(tools), _COMPLETION)
        return pieces, self._format.closing_of(pieces[0]) if pieces and isinstance(pieces[0], tuple) else ()

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, such as the prompt of a completion, which spells no special ones.

        Raises:
            ValueError: no tokenizer takes it.
        """
        return list(self._ids(text, splits_special=True))

    def encode_content(self, text: str) -> list[int]:
        """Tokens of what a user or a tool says. Raises ValueError as `encode` does."""
        return list(self._short_ids(text) if len(text) <= _LONGEST_TEXT else self._content_ids(text))

    def _ids(self, text: str, splits_special: bool) -> tuple[int, ...]:
        _check_text(text)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=splits_special))

    def _content_ids(self, text: str) -> tuple[int, ...]:
        _check_text(text)
        return self._content_encoder(text)

    def text(self, tokens: Sequence[int]) -> str:
        """Text of sampled tokens, without special ones."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)  # of one row
        return text

    def whole_text(self, tokens: Sequence[int]) -> str:
        """Text of tokens with special ones."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        assert isinstance(text, str)  # of one row
        return text

    def reply(self, tokens: Sequence[int], read: Sequence[int] = (), tools: Sequence[Any] = ()) -> Reply:
        """A completion's tokens as a message. Where a call is broken, all stay a part of its text, see tool_calls.py.

        Args:
            read: tokens before it, with which the template may have opened the reasoning.
            tools: those that the client has offered: there are no calls of others.
        """
        ids = list(tokens)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        opened = _THINK if self.whole_text(read[-_OPENED_WITHIN:]).rstrip().endswith(_THINK) else ""
        thoughts = self._num_thoughts(ids, opened)
        rest, calls = self._without_calls(ids[thoughts:], tools)
        ids = [*ids[:thoughts], *rest]
        whole = opened + self.whole_text(ids)
        if not self._finds_reasoning or not whole.startswith(_THINK):
            return Reply(self._unclosed(ids), None, calls)
        reasoning, closing, content = whole.removeprefix(_THINK).partition(_THOUGHT)
        return Reply(content.strip(), None if closing and not reasoning else reasoning, calls)

    def _without_calls(self, ids: list[int], tools: Sequence[Any]) -> tuple[list[int], list[dict[str, Any]]]:
        """The tokens of a completion beside its calls, and the calls; all tokens, and no call, where one is broken."""
        if self._family is None or not tools:
            return ids, []
        opening, closing = self._call_ids
        calls: list[dict[str, Any]] = []
        beside, behind = [], 0
        try:
            for start in [index for index, token in enumerate(ids) if token == opening]:
                if start >= behind:
                    end = ids.index(closing, start)  # ValueError: it has no end
                    calls += calls_in(self._family, self.whole_text(ids[start + 1 : end]), tools)
                    beside.append(ids[behind:start])
                    behind = end + 1
        except (ValueError, RecursionError):
            return ids, []
        if not calls:
            return ids, []
        texts = [part for part in [*beside, ids[behind:]] if self.whole_text(part).strip()]  # not newlines of the form
        return [token for part in texts for token in part], [_tool_call(call) for call in calls]

    def _unclosed(self, tokens: Sequence[int]) -> str:
        """Text of a completion without what the template writes to close it: it is written again with the message."""
        return self.text(tokens).removesuffix(self._format.closing_text)

    def _num_thoughts(self, ids: list[int], opened: str) -> int:
        """Number of tokens of the reasoning, with those that end it; 0 if none is looked for, or it has no end.

        Text in there that looks like a call is not one: the policy only thinks about it.
        """

        def is_over(number: int) -> bool:
            return _THOUGHT in opened + self.whole_text(ids[:number])

        if not self._finds_reasoning or not is_over(len(ids)):
            return 0
        number = bisect.bisect_left(range(len(ids)), True, key=is_over)
        return number if (opened + self.whole_text(ids[:number])).startswith(_THINK) else 0

    def _render_pieces(self, messages: str, tools: str, after: str) -> list[str | tuple[int, ...]]:
        """Render a conversation whose contents are marks.

        Args:
            messages, tools: as JSON.
            after: only what follows this text.

        Returns:
            Marks, and between them the tokens of the template.
        """
        pieces: list[str | tuple[int, ...]] = []
        for piece in _MARKS.split(self._render(json.loads(messages), tools, after)):
            if _MARKS.fullmatch(piece):
                pieces.append(piece)
            elif piece:
                pieces.append(self._ids(piece, splits_special=False))
        for message in json.loads(messages):
            if _MARKS.fullmatch(message["content"]) and message["content"] not in pieces:
                raise _left_out(message)
        self._check_shows_others(json.loads(messages), tools, after)
        return pieces

    def _check_shows_others(self, messages: list[dict[str, Any]], tools: str, after: str) -> None:
        """Raise TemplateRefused where the template leaves out what other roles than user and tool say.

        It may rewrite that, as many strip the reasoning from completions: so marks stand in its place here, which show
        whether it is rendered at all. Some templates leave out the text beside calls by design.
        """
        probe = [dict(message) for message in messages]
        others = [
            message
            for message in probe
            if message["role"] not in ("user", "tool")
            and message["content"] not in ("", after)
            and not message.get("tool_calls")
        ]
        if not others:
            return
        for number, message in enumerate(others, len(probe)):
            message["content"] = _mark(number)
        try:
            text = self._render(probe, tools, after)
        except TemplateRefused:  # it refuses the marks alone
            return
        for message in others:
            if message["content"] not in text:
                raise _left_out(message)

    def _render(self, messages: list[dict[str, Any]], tools: str, after: str) -> str:
        """The text of a conversation behind `after`."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=json.loads(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is other people's code
            reason = " ".join(str(error).split())
            raise TemplateRefused(f"the chat template refuses these messages: {reason}") from error
        assert isinstance(text, str)
        _, found, rest = text.partition(after) if after else ("", "", text)
        if after and not found:
            raise TemplateRefused("the chat template drops an assistant's message")
        return rest

    def _filled(self, pieces: list[str | tuple[int, ...]], contents: Mapping[str, str]) -> list[int]:
        """Tokens with the contents in place of their marks."""
        tokens: list[int] = []
        for piece in pieces:
            tokens += self.encode_content(contents[piece]) if isinstance(piece, str) else piece
        return tokens


def _check_text(text: str) -> None:
    if problem := text_problem(text):
        raise ValueError(f"a text of the request cannot be encoded: {problem}")


def _left_out(message: Message) -> TemplateRefused:
    return TemplateRefused(
        f"the chat template leaves out what a message of role {message['role']!r} says: say it in one of role 'user', "
        "or set a chat_template that shows it there"
    )


def _frozen(value: object) -> str:
    return json.dumps(value)


def _mark_contents(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Messages with marks in place of what users and tools say, and what stands for each mark."""
    contents: dict[str, str] = {}
    marked = []
    for number, message in enumerate(messages):
        message = _for_template(message)
        if message["role"] in ("user", "tool") and message["content"]:
            mark = _mark(number)
            contents[mark], message["content"] = message["content"], mark
        marked.append(message)
    return marked, contents


def _mark(number: int) -> str:
    """The mark of a message, see `_MARKS`."""
    return f"qzmessage{''.join(_LETTERS[int(digit)] for digit in str(number))}qz"


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates know it: content as a text, arguments of calls as values."""
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = text_of(message.get("content"))
    if found["role"] == "developer":
        found["role"] = "system"
    if found.get("tool_calls"):
        calls = []
        for call in found["tool_calls"]:
            function = dict(call["function"])
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError):  # templates show a text as it is
                    function["arguments"] = json.loads(arguments)
            calls.append({**call, "function": function})
        found["tool_calls"] = calls
    return found


def text_of(content: Any) -> str:
    """The text of a message's content, which may come in parts.

    Raises:
        ValueError: a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"content has a part of type {kind!r}: this policy reads text alone")
        texts.append(part["text"])
    return "".join(texts)


def texts_of(message: Message) -> list[str]:
    """The texts of a message that grow with a conversation: its content, and the arguments of its calls."""
    calls = message.get("tool_calls") or ()
    return [text_of(message.get("content")), *(str(call["function"].get("arguments")) for call in calls)]


def _tool_call(function: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
