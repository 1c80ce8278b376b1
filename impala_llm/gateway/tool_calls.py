"""Calls of tools in completions, in the forms in which families of models write them.

A completion has calls where each of them has its family's form from beginning to end, and the name of a tool that was
offered. Else it has none: a broken call is not repaired, since the agent would do what the policy has not said. A value
that spells a mark of the form, such as `<parameter=`, makes a call a broken one.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
"""One newline on either side of a value belongs to the form, as in Qwen's own parser: all other spaces are the value's,
such as the indentation of a line of code."""
_NAMED = re.compile(r"([^<]*)(.*)", re.DOTALL)
_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_MARK = re.compile(r"<(?:function|parameter)=|</function>|</?arg_(?:key|value)>")
_FENCED = re.compile(
    r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```\s*<｜tool▁call▁end｜>", re.DOTALL
)
_JSON_TYPES = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Values as some templates show them in the calls of a conversation, so that policies write them."""

_Schemas = Mapping[str, Any]
"""The schemas of a tool's parameters."""
_Calls = Iterator[tuple[Any, Any]]
"""Name and arguments of each call."""


@dataclass(frozen=True)
class Family:
    """Form in which a family of models writes calls, between two tokens."""

    opening: str
    closing: str
    read: Callable[[str, Mapping[str, _Schemas]], _Calls]
    """The calls of a text between the two. Raises ValueError where it has not the form."""


def calls_in(family: Family, text: str, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the calls of a text between a family's two tokens: `name`, and `arguments` as a JSON text.

    Args:
        tools: of the request, as OpenAI's schema has them.

    Raises:
        ValueError, RecursionError: a call is broken, or is of no tool that was offered.
    """
    offered = _offered(tools)
    calls = []
    for name, arguments in family.read(text, offered):
        if not (isinstance(name, str) and name in offered and isinstance(arguments, dict)):
            raise ValueError("no call of an offered tool")
        calls.append({"name": name, "arguments": json.dumps(arguments, allow_nan=False)})
    return calls


def _offered(tools: Sequence[Any]) -> dict[str, _Schemas]:
    """Return the parameters' schemas of a request's tools, by name. Tools may be flat, as in OpenAI's Responses API."""
    found: dict[str, _Schemas] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas = parameters.get("properties") if isinstance(parameters, dict) else None
            found[function["name"]] = schemas if isinstance(schemas, dict) else {}
    return found


def _read_json(text: str, offered: Mapping[str, _Schemas]) -> _Calls:
    call = _loads(text)
    if not isinstance(call, dict):
        raise ValueError("no object")
    arguments = call.get("arguments")
    yield call.get("name"), {} if arguments is None else _loads(arguments) if isinstance(arguments, str) else arguments


def _read_xml(text: str, offered: Mapping[str, _Schemas]) -> _Calls:
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ValueError("no function")
    name, body = found.groups()
    yield name, _arguments(_PARAMETER, body, offered.get(name, {}))


def _read_pairs(text: str, offered: Mapping[str, _Schemas]) -> _Calls:
    found = _NAMED.fullmatch(text)
    assert found is not None  # it matches every text
    name = found[1].strip()
    yield name, _arguments(_PAIR, found[2], offered.get(name, {}))


def _read_fenced(text: str, offered: Mapping[str, _Schemas]) -> _Calls:
    if _FENCED.sub("", text).strip() or not text.strip():
        raise ValueError("no calls")
    for name, arguments in _FENCED.findall(text):
        yield name.strip(), _loads(arguments)


def _arguments(form: re.Pattern[str], text: str, schemas: _Schemas) -> dict[str, Any]:
    """The arguments of a text that has nothing but pairs of a name and a value. Raises ValueError."""
    pairs = form.findall(text)
    found = {name.strip(): _value(value, schemas.get(name.strip())) for name, value in pairs}
    if form.sub("", text).strip() or len(found) < len(pairs) or any(map(_MARK.search, map("".join, pairs))):
        raise ValueError("not the form")
    return found


def _value(text: str, schema: Any) -> Any:
    """A value that was written without quotes: the text itself where the tool takes texts, unless its JSON has another
    type that the tool takes as well; what the JSON says where no text is asked for."""
    types = _types(schema)
    is_text = "string" in types
    with contextlib.suppress(ValueError, RecursionError):
        value = _loads(_OF_PYTHON.get(text, text) if types and not is_text else text)
        if not isinstance(value, str) and not (is_text and types.isdisjoint(_JSON_TYPES[type(value)])):
            return value
    return text


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names; none: it names not all that it takes."""
    if not isinstance(schema, dict):
        return set()
    if (named := schema.get("type")) is not None:
        return {str(each) for each in (named if isinstance(named, list) else [named])}
    branches = schema.get("anyOf") or schema.get("oneOf")
    of_branches = [_types(branch) for branch in branches] if isinstance(branches, list) else []
    return set().union(*of_branches) if all(of_branches) else set()


def _loads(text: str) -> Any:
    """A JSON value, without the numbers that only Python's JSON has."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_CALL, _CALLED = "<tool_call>", "</tool_call>"
FAMILIES = {
    "qwen3": Family(_CALL, _CALLED, _read_json),
    "qwen3.5": Family(_CALL, _CALLED, _read_xml),
    "glm": Family(_CALL, _CALLED, _read_pairs),
    "deepseek-v3": Family("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _read_fenced),
}
"""By the value of agent.tool_parser."""
