"""Tools and reasoning in both directions: what the policy writes becomes calls, and what they gave becomes tokens."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from impala_llm.gateway.chat import ChatTokens
from impala_llm.learning.policy.scratch import ACT, END
from impala_llm.rollout import EpisodeLimits
from tests.gateway import test_server
from tests.gateway.engines import RandomEngine
from tests.gateway.test_conversations import assert_exact
from tests.gateway.test_server import Reciting, serving
from tests.gateway.tool_policy import CALL, CALLED, CALLS, make_tool_policy

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    tokenizer = AutoTokenizer.from_pretrained(make_tool_policy(tmp_path_factory.mktemp("tools") / "policy"))
    return ChatTokens(tokenizer, tool_parser="qwen3")


class Scripted(RandomEngine):
    """Says given tokens."""

    def __init__(self, chat: ChatTokens, *completions: list[str]) -> None:
        super().__init__(random.Random(0), [])
        self.script = [chat.tokenizer.convert_tokens_to_ids(completion) for completion in completions]

    async def _complete(self, session_id: str, history: list[int], params: Any) -> Any:
        tokens = self.script.pop(0)
        serials = list(range(len(self.sampled), len(self.sampled) + len(tokens)))
        self.sampled += [(token, [*history, *tokens[:index]]) for index, token in enumerate(tokens)]
        self.sessions[session_id] = [*history, *tokens]
        return self._generation(tokens, serials, "stop")


def ids(chat: ChatTokens, *tokens: str) -> list[int]:
    return chat.tokenizer.convert_tokens_to_ids(list(tokens))


def test_a_call_and_its_result_go_both_ways_and_keep_the_sampled_tokens(chat: ChatTokens) -> None:
    engine = Scripted(chat, [CALL, CALLS[0], CALLED, END], ["7", END])

    async def main() -> None:
        async with serving(chat, engine) as served:
            messages: list[Any] = [{"role": "user", "content": "a ?"}]
            first = (await served.say(messages, tools=[TOOL])).choices[0]
            assert first.finish_reason == "tool_calls" and first.message.content is None
            (call,) = first.message.tool_calls
            assert call.function.name == "look_up" and json.loads(call.function.arguments) == {"key": "a"}
            again = first.message.model_dump(exclude_none=True)
            again["tool_calls"][0]["function"]["arguments"] = '{"key":"a"}'  # as some clients write it anew
            messages += [again, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
            second = (await served.say(messages, tools=[TOOL])).choices[0]
            assert (second.message.content, second.finish_reason) == ("7", "stop")
            trajectory = await served.end()
        assert_exact(trajectory, engine)
        opening = ids(chat, "tools", "a", "?", ACT)
        assert trajectory.tokens.tolist() == [
            *opening, *ids(chat, CALL, CALLS[0], CALLED, END), *ids(chat, "7", ACT), *ids(chat, "7", END)
        ]  # fmt: skip

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("broken", [[CALL, "7", CALLED], [CALL, CALLS[0]], [CALL, CALLS[0], CALLED, CALL, "7", CALLED]])
def test_a_broken_call_stays_text(chat: ChatTokens, broken: list[str]) -> None:
    reply = chat.reply(ids(chat, *broken, END), tools=[TOOL])
    assert reply.tool_calls == [] and reply.content == "".join(broken)


@pytest.mark.parametrize("parser", ["none", "qwen3"])
def test_tools_without_a_parser_are_warned_of_once(
    chat: ChatTokens, parser: str, caplog: pytest.LogCaptureFixture
) -> None:
    chat = ChatTokens(chat.tokenizer, parser)

    async def main() -> None:
        async with serving(chat, Scripted(chat, *[["7", END]] * 3)) as served:
            for tools in ([], [TOOL], [TOOL]):
                await served.say([{"role": "user", "content": "a ?"}], tools=tools)
                assert ("agent.tool_parser=none" in caplog.text) == (parser == "none" and bool(tools))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert caplog.text.count("agent.tool_parser=none") == (parser == "none")


@pytest.mark.parametrize("wish", [{"tools": [TOOL], "tool_choice": "none"}, {}], ids=["choice none", "no tools"])
def test_a_call_stays_text_where_no_tools_are_offered(chat: ChatTokens, wish: dict[str, Any]) -> None:
    engine = Scripted(chat, [CALL, CALLS[0], CALLED, END])

    async def main() -> None:
        async with serving(chat, engine) as served:
            [choice] = (await served.say([{"role": "user", "content": "a ?"}], **wish)).choices
            assert choice.message.tool_calls is None and choice.finish_reason == "stop"
            assert choice.message.content == "".join([CALL, CALLS[0], CALLED])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_calls_stream_at_their_own_indices(chat: ChatTokens) -> None:
    engine = Scripted(chat, [CALL, CALLS[0], CALLED, CALL, CALLS[1], CALLED, END])

    async def main() -> None:
        async with serving(chat, engine) as served:
            calls = {}
            async for event in await served.say([{"role": "user", "content": "a"}], tools=[TOOL], stream=True):
                for call in event.choices[0].delta.tool_calls or ():
                    calls[call.index] = json.loads(call.function.arguments)
            assert calls == {0: {"key": "a"}, 1: {"key": "b"}}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_that_was_never_sampled_is_context(chat: ChatTokens) -> None:
    """As where an agent begins with examples, or compacts a conversation and keeps its calls."""
    engine = Scripted(chat, ["7", END])
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "b"}'}}

    async def main() -> None:
        async with serving(chat, engine) as served:
            await served.say(
                [
                    {"role": "user", "content": "b"},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": "3"},
                ]
            )
            trajectory = await served.end()
        assert_exact(trajectory, engine)
        context = ["b", ACT, CALL, CALLS[1], CALLED, END, "3", ACT]
        assert trajectory.tokens.tolist() == [*ids(chat, *context), *ids(chat, "7", END)]

    asyncio.run(asyncio.wait_for(main(), 60))


MARKS = ["<|user|>", "<|assistant|>", "<|observation|>"]
BY_MARKS = (
    "{% for message in messages %}{% if message.role == 'tool' %}<|observation|>{% else %}<|{{ message.role }}|>"
    "{% endif %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_completion_ends_with_the_mark_of_whoever_speaks_next_where_a_template_has_nothing_else(
    chat: ChatTokens, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tool_policy(tmp_path / "policy"))
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})  # as GLM has them
    tokenizer.chat_template = BY_MARKS
    marked = ChatTokens(tokenizer, tool_parser="qwen3")
    user, assistant, observation = ids(marked, *MARKS)
    end = tokenizer.eos_token_id
    assert set(marked.stop_token_ids) == {end, user, observation}
    said, [seven] = [{"role": "tool", "content": "7", "tool_call_id": "a"}], ids(marked, "7")
    assert marked.following(said, [], observation) == [seven, assistant], "sampled already"
    asked, [three] = [{"role": "user", "content": "3"}], ids(marked, "3")
    assert marked.following(asked, [], user) == [three, assistant]
    for last in (observation, end):
        assert marked.following(asked, [], last) == [user, three, assistant], "not sampled, and needed"
    assert chat.stop_token_ids == tuple(ids(chat, END)), "another template"


def test_marks_of_speakers_that_are_merely_added_are_no_part_of_a_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tool_policy(tmp_path / "policy"))
    tokenizer.add_tokens(MARKS)
    tokenizer.chat_template = BY_MARKS
    chat = ChatTokens(tokenizer, tool_parser="qwen3")
    user, assistant, observation = ids(chat, *MARKS)
    for end in (user, observation):
        assert chat.text([*ids(chat, "7"), end]) == "7"
    said = f"3{MARKS[0]}{MARKS[2]}"
    read = chat.opening([{"role": "user", "content": said}, {"role": "tool", "content": said}], [])
    assert (read.count(user), read.count(assistant), read.count(observation)) == (1, 1, 1)


def test_what_users_and_tools_say_begins_no_call(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens([CALL, CALLED])
    tokenizer.chat_template += f"{{% if tools %}}write {CALL}{CALLED}{{% endif %}}"
    chat = ChatTokens(tokenizer, tool_parser="qwen3")
    said = f"do {CALL}this{CALLED}"
    for role in ("user", "tool"):
        read = chat.opening([{"role": "user", "content": "q"}, {"role": role, "content": said}], [TOOL])
        assert [read.count(token) for token in ids(chat, CALL, CALLED)] == [1, 1] and said in chat.whole_text(read)


THINK, THOUGHT = "<think>", "</think>"


@pytest.mark.parametrize(
    ("said", "content", "reasoning", "arguments"),
    [
        ([THINK, CALL, CALLS[0], CALLED, THOUGHT, "b"], "b", f"{CALL}{CALLS[0]}{CALLED}", []),
        ([THINK, CALL, CALLS[0], CALLED, THOUGHT, CALL, CALLS[1], CALLED], "", f"{CALL}{CALLS[0]}{CALLED}", ["b"]),
        ([THINK, CALL, THOUGHT, "7", CALL, CALLS[1], CALLED], "7", CALL, ["b"]),
        ([THINK, "a", CALL, CALLS[1], CALLED], "", "a", ["b"]),
        (["a", CALL, CALLS[1], CALLED], "a", None, ["b"]),
    ],
)
def test_a_call_that_is_only_thought_of_is_none_and_takes_nothing_from_the_completion(
    tmp_path: Path, said: list[str], content: str, reasoning: str | None, arguments: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tool_policy(tmp_path / "policy"))
    tokenizer.add_tokens([THINK, THOUGHT])
    thinking = ChatTokens(tokenizer, tool_parser="qwen3", reasoning_parser="think")
    reply = thinking.reply(ids(thinking, *said, END), tools=[TOOL])
    assert (reply.content, reply.reasoning) == (content, reasoning)
    assert [json.loads(call["function"]["arguments"])["key"] for call in reply.tool_calls] == arguments


@pytest.mark.parametrize(("stop", "content", "reasoning"), [("7", "", "a"), ("3", "b", "a7")])
def test_a_stop_text_in_the_reasoning_ends_the_completion_and_is_named(
    tmp_path: Path, stop: str, content: str, reasoning: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tool_policy(tmp_path / "policy"))
    tokenizer.add_tokens([THINK, THOUGHT])
    chat = ChatTokens(tokenizer, reasoning_parser="think")
    said = ids(chat, THINK, "a", "7", THOUGHT, "b", "3")
    ask = {"messages": [{"role": "user", "content": "a ?"}], "max_tokens": 6}

    async def main() -> None:
        async with serving(chat, Reciting(said)) as served:
            _, completion = await served.post("/chat/completions", {**ask, "stop": [stop]})
            [choice] = completion["choices"]
            assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == (content, reasoning)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        async with serving(chat, Reciting(said)) as served:
            _, answer = await served.post("/messages", {**ask, "stop_sequences": [stop]})
            assert [block[block["type"]] for block in answer["content"]] == [reasoning, content]
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_reasoning_is_kept_apart_in_the_completion_and_in_place_in_the_tokens(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    chat = ChatTokens(tokenizer, reasoning_parser="think")
    said = tokenizer.encode("<think>a letter</think>\n\nb", add_special_tokens=False)
    engine = Scripted(chat)
    engine.script = [[*said, tokenizer.eos_token_id], [*chat.encode("c"), tokenizer.eos_token_id]]
    limits, test_server.LIMITS = test_server.LIMITS, EpisodeLimits(0.7, 100, 400)

    async def main() -> None:
        async with serving(chat, engine) as served:
            messages: list[Any] = [{"role": "user", "content": "say b"}]
            message = (await served.say(messages)).choices[0].message
            assert (message.content, message.reasoning_content) == ("b", "a letter")
            messages += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "and c"}]
            await served.say(messages)
            trajectory = await served.end()
        assert_exact(trajectory, engine)
        assert len(trajectory.context_lengths) == 1  # the client has left the reasoning out, the policy has not

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        test_server.LIMITS = limits


@pytest.mark.parametrize(
    ("opened", "said", "reply"),
    [
        ("<think>\n", "a letter\n</think>\n\nb", ("b", "a letter\n")),
        ("<think>\n", "a letter", ("", "a letter")),
        ("<think>\n", "</think>b", ("b", None)),
        ("<think>\n\n</think>\n\n", "b", ("b", None)),
        ("", "<think></think>b", ("b", None)),
    ],
)
def test_reasoning_that_the_template_opens_is_kept_apart_as_well(
    tiny_model: Path, opened: str, said: str, reply: tuple[str, str | None]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template += "{% if add_generation_prompt %}" + opened.replace("\n", "{{ '\\n' }}") + "{% endif %}"
    chat = ChatTokens(tokenizer, reasoning_parser="think")
    engine = Scripted(chat)
    engine.script = [[*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]]

    async def main() -> None:
        async with serving(chat, engine) as served:
            message = (await served.say([{"role": "user", "content": "b?"}])).choices[0].message
            assert (message.content, getattr(message, "reasoning_content", None)) == reply

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_parser_whose_tokens_the_policy_does_not_have_is_refused(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for parser, token in {"qwen3": "<tool_call>", "deepseek-v3": "tool▁calls▁begin"}.items():
        with pytest.raises(ValueError, match=f"agent.tool_parser={parser} finds calls by the token .*{token}"):
            ChatTokens(tokenizer, tool_parser=parser)
