"""Calls of every family: a whole one comes to the agent as it was written, and a broken one stays text."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from impala_llm.gateway.chat import ChatTokens, Reply
from tests.gateway.tool_policy import CALL, CALLED

JSON, XML, PAIRS, FENCED = "qwen3", "qwen3.5", "glm", "deepseek-v3"
SECTION, SECTION_END, BEGIN, END, SEPARATOR = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
TOKENS = {
    JSON: [CALL, CALLED],
    XML: [CALL, CALLED],
    PAIRS: [CALL, CALLED, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    FENCED: [SECTION, SECTION_END, BEGIN, END, SEPARATOR],
}
TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "number": {"type": ["integer", "null"]},
    "choice": {"type": "boolean"},
    "either": {"oneOf": [{"type": "string"}, {"$ref": "#/$defs/other"}]},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": TYPES}}},
    {"type": "function", "name": "look-up"},
]


def reply_of(model: Path, parser: str, text: str) -> Reply:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(TOKENS[parser])
    return ChatTokens(tokenizer, parser).reply(tokenizer.encode(text, add_special_tokens=False), tools=TOOLS)


def as_json(inside: str) -> str:
    return f"{CALL}\n{inside}\n{CALLED}"


def as_xml(*pairs: tuple[str, str], name: str = "f") -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"{CALL}\n<function={name}>\n{parameters}</function>\n{CALLED}"


def as_pairs(*pairs: tuple[str, str], name: str = "f") -> str:
    arguments = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"{CALL}{name}\n{arguments}{CALLED}"


def as_fenced(*arguments: str, name: str = "f") -> str:
    calls = (f"{BEGIN}function{SEPARATOR}{name}\n```json\n{each}\n```{END}" for each in arguments)
    return SECTION + "\n".join(calls) + SECTION_END


UNQUOTED = [("city", "Paris"), ("days", "3")]


@pytest.mark.parametrize(
    ("parser", "text", "name", "arguments"),
    [
        (JSON, as_json('{"name": "f", "arguments": {"key": 1}}'), "f", {"key": 1}),
        (JSON, as_json('{"name": "f", "arguments": "{\\"key\\": 1}"}'), "f", {"key": 1}),
        (JSON, as_json('{"name": "f"}'), "f", {}),
        (XML, as_xml(*UNQUOTED), "f", {"city": "Paris", "days": 3}),
        (PAIRS, as_pairs(*UNQUOTED), "f", {"city": "Paris", "days": 3}),
        (PAIRS, as_pairs(*UNQUOTED).replace("\n", ""), "f", {"city": "Paris", "days": 3}),
        (PAIRS, as_pairs(name="look-up"), "look-up", {}),
        (FENCED, as_fenced('{"a": 1}', name="look-up"), "look-up", {"a": 1}),
    ],
)
def test_a_whole_call_is_one(tiny_model: Path, parser: str, text: str, name: str, arguments: dict[str, Any]) -> None:
    reply = reply_of(tiny_model, parser, f"I look.{text}")
    [call] = [call["function"] for call in reply.tool_calls]
    assert (call["name"], json.loads(call["arguments"]), reply.content) == (name, arguments, "I look.")


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "75001", "75001"),
        ("text", "null", "null"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", '"quoted"', '"quoted"'),
        ("text", "    return 1\n", "    return 1\n"),
        ("text", "", ""),
        ("text", "say <b>this</b> and </tool_response>", "say <b>this</b> and </tool_response>"),
        ("maybe", "75001", "75001"),
        ("maybe", "null", None),
        ("maybe", "None", "None"),
        ("number", "75001", 75001),
        ("number", "None", None),
        ("number", "many", "many"),
        ("choice", "True", True),
        ("either", '{"a": 1}', {"a": 1}),
        ("unknown", "7", 7),
        ("unknown", "True", "True"),
        ("unknown", '"quoted"', '"quoted"'),
        ("unknown", "NaN", "NaN"),
    ],
)
@pytest.mark.parametrize("parser", [XML, PAIRS])
def test_a_value_without_quotes_has_a_type_that_the_tool_asks_for(
    tiny_model: Path, parser: str, key: str, written: str, value: Any
) -> None:
    text = as_xml((key, written)) if parser == XML else as_pairs((key, written))
    [call] = reply_of(tiny_model, parser, text).tool_calls
    assert json.loads(call["function"]["arguments"]) == {key: value}


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        *((JSON, as_json(f'{{"name": "f", "arguments": {given}}}')) for given in ('"b"', "[1]", "5", '"[1]"')),
        (JSON, as_json('{"name": "f", "arguments": {"city": Paris}}')),
        (JSON, as_json('{"name": "f", "arguments": {"a": NaN}}')),
        (JSON, as_json('{"name": "f", "arguments": {"a": 1e999}}')),
        (JSON, as_json('{"name": "g", "arguments": {}}')),
        (JSON, as_json('{"name": ["f"], "arguments": {}}')),
        (JSON, as_json("[" * 3000)),
        (JSON, as_json("1" * 5000)),
        (XML, as_xml(*UNQUOTED).removesuffix(CALLED)),
        (XML, f"{CALL}\n<parameter=city>\nParis\n</parameter>\n{CALLED}"),
        (XML, as_xml(("city", "Paris")).replace("</parameter>\n", "")),
        (XML, as_xml(("a", "x"), ("b", "y")).replace("</parameter>", "", 1)),
        (XML, as_xml(("a", "x")).replace("<function=f>", "<function=f")),
        (XML, as_xml(("a", "x")).replace("</function>", "")),
        (XML, as_xml(("a", "x")).replace("</function>", "</function>\n<function=f>\n</function>")),
        (XML, as_xml(("a", "x"), ("a", "y"))),
        (XML, as_xml(("a", "x"), name="g")),
        (XML, as_xml(("a", "x")).replace("</function>", "and so on</function>")),
        (PAIRS, as_pairs(*UNQUOTED).removesuffix(CALLED)),
        (PAIRS, as_pairs(*UNQUOTED, name="")),
        (PAIRS, f"{CALL}f\n<arg_key>city</arg_key>\n<arg_value>Paris\n{CALLED}"),
        (PAIRS, as_pairs(*UNQUOTED).replace("<arg_value>Paris</arg_value>\n", "")),
        (PAIRS, f"{CALL}f\n<arg_value>ls</arg_value>\n{CALLED}"),
        (PAIRS, f"{CALL}I think I should call{CALLED}"),
        (FENCED, as_fenced('{"city": Paris}')),
        (FENCED, as_fenced('{"a": 1}').replace("```json\n", "")),
        (FENCED, as_fenced('{"a": 1}').replace("```json\n", "").replace("\n```", "")),
        (FENCED, as_fenced('{"a": 1}', "{}").replace("\n```", "", 1)),
        (FENCED, as_fenced("[1]")),
        (FENCED, as_fenced()),
        (FENCED, as_fenced("{}").removesuffix(SECTION_END)),
        (FENCED, as_fenced("{}").replace(SECTION_END, f"so{SECTION_END}")),
    ],
)
def test_a_broken_call_stays_text(tiny_model: Path, parser: str, text: str) -> None:
    reply = reply_of(tiny_model, parser, text)
    assert reply.tool_calls == [] and reply.content == text


@pytest.mark.parametrize(
    ("parser", "call", "calls"),
    [
        (JSON, as_json('{"name": "f", "arguments": {"a": 1}}'), 1),
        (XML, as_xml(("a", "1")), 1),
        (PAIRS, as_pairs(("a", "1")), 1),
        (FENCED, as_fenced('{"a": 1}', '{"a": 1}'), 2),
    ],
)
def test_several_calls_take_nothing_but_the_space_between_them_from_the_completion(
    tiny_model: Path, parser: str, call: str, calls: int
) -> None:
    reply = reply_of(tiny_model, parser, f"{call}\n{call} and then {call}done")
    assert [json.loads(each["function"]["arguments"]) for each in reply.tool_calls] == [{"a": 1}] * 3 * calls
    assert reply.content == " and then done"
    assert reply_of(tiny_model, parser, f"\n{call}\n").message()["content"] is None
