"""Anthropic's protocol in terms of OpenAI's: bodies of /v1/messages, and answers to them.

Invariant: nothing is added to a conversation or left out of it but the model's own reasoning, which the tokens keep.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body of /v1/messages as one of /v1/chat/completions. Raises ValueError for blocks that are no text or tool."""
    own = ("system", "messages", "tools", "tool_choice", "stop_sequences", "thinking")
    found = {key: value for key, value in body.items() if key not in own}
    found["stop"] = body.get("stop_sequences")
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"])})
    given = body.get("messages")
    for index, message in enumerate(given if isinstance(given, list) else ()):
        if not _is_message(message):
            raise ValueError(
                f"messages[{index}] is {message!r:.80}: a role, and a text or a list of blocks as content, are expected"
            )
        messages += _chat_messages(message)
    found["messages"] = messages
    if body.get("tools"):
        found["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool.get("input_schema", {}),
                },
            }
            for tool in body["tools"]
        ]
    choice = body.get("tool_choice") or {}
    if not isinstance(choice, dict):
        raise ValueError(f"tool_choice is {choice!r:.80}: an object with a type is expected")
    kind = choice.get("type")
    if kind is not None:
        found["tool_choice"] = "required" if kind == "any" else kind
    return found


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    is_blocks = isinstance(content, list) and all(isinstance(each, dict) and "type" in each for each in content)
    return isinstance(content, str) or is_blocks


def _chat_messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A message, whose results of tools are messages of their own."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts, calls = [], []
    for block in blocks:
        if block["type"] == "tool_result":
            result = _text(block.get("content") or "")
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": json.dumps(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] not in ("thinking", "redacted_thinking"):
            texts.append(_text([block]))
    if texts or calls or not blocks:
        yield {"role": message["role"], "content": "".join(texts)} | ({"tool_calls": calls} if calls else {})


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block["type"] != "text":
            raise ValueError(f"content has a block of type {block['type']!r}: this policy reads text alone")
    return "".join(block["text"] for block in content)


def answer_of(chat_completion: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion of one choice as an answer to /v1/messages."""
    [choice] = chat_completion["choices"]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"] or not message.get("tool_calls"):
        content.append({"type": "text", "text": message["content"] or ""})
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    usage, stop = chat_completion["usage"], choice["stop_reason"]
    is_stopped = stop is not None and choice["finish_reason"] == "stop"
    return {
        "id": chat_completion["id"],
        "type": "message",
        "role": "assistant",
        "model": chat_completion["model"],
        "content": content,
        "stop_reason": "stop_sequence" if is_stopped else _STOP_REASONS[choice["finish_reason"]],
        "stop_sequence": stop if is_stopped else None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def events_of(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A whole answer as the events of a stream, each block in one piece."""
    usage = answer["usage"]
    unsaid: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**answer, **unsaid, "usage": {**usage, "output_tokens": 0}}}
    for index, block in enumerate(answer["content"]):
        kind = block["type"]
        if kind == "tool_use":
            empty, delta = (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        else:
            empty, delta = {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}
