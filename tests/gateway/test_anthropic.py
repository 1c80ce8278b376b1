"""Anthropic's protocol, by its unmodified client."""

import asyncio
from typing import Any

import pytest

from impala_llm.gateway.chat import ChatTokens
from impala_llm.learning.policy.scratch import ACT, END
from tests.gateway.test_conversations import assert_exact
from tests.gateway.test_server import Served, serving
from tests.gateway.test_tools import Scripted, chat, ids
from tests.gateway.tool_policy import CALL, CALLED, CALLS

pytestmark = pytest.mark.system

__all__ = ["chat"]
TOOL: Any = {"name": "look_up", "description": "Number of a letter.", "input_schema": {"type": "object"}}


def client_of(served: Served) -> Any:
    import anthropic  # here: it takes most of a second, in every run of the tests

    url = served.gateway.url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=url, api_key=served.episode.key, max_retries=0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_a_tool_keeps_the_sampled_tokens(chat: ChatTokens, streams: bool) -> None:  # noqa: F811
    engine = Scripted(chat, [CALL, CALLS[0], CALLED, END], ["7", END])

    async def main() -> None:
        async with serving(chat, engine) as served:
            client = client_of(served)

            async def say(messages: list[Any]) -> Any:
                wish: Any = {"model": "any", "max_tokens": 6, "messages": messages, "tools": [TOOL], "system": "rules"}
                if not streams:
                    return await client.messages.create(**wish)
                async with client.messages.stream(**wish) as stream:
                    return await stream.get_final_message()

            messages: list[Any] = [{"role": "user", "content": "a ?"}]
            first = await say(messages)
            assert first.stop_reason == "tool_use"
            [call] = first.content
            assert (call.name, call.input) == ("look_up", {"key": "a"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7"}]}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            second = await say(messages)
            assert (second.content[0].text, second.stop_reason) == ("7", "end_turn")
            assert second.usage.output_tokens == 2
            trajectory = await served.end()
        assert_exact(trajectory, engine)
        opening = ids(chat, "tools", "rules", ACT, "a", "?", ACT)
        assert trajectory.tokens.tolist() == [
            *opening, *ids(chat, CALL, CALLS[0], CALLED, END), *ids(chat, "7", ACT), *ids(chat, "7", END)
        ]  # fmt: skip

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("streams", [False, True])
def test_a_completion_that_a_stop_text_ends_names_it(chat: ChatTokens, streams: bool) -> None:  # noqa: F811
    engine = Scripted(chat, ["a", "7", END], ["a", END])

    async def main() -> None:
        async with serving(chat, engine) as served:
            client = client_of(served)
            found = []
            for _ in range(2):
                asked: Any = [{"role": "user", "content": "a ?"}]
                wish: Any = {"model": "any", "max_tokens": 6, "messages": asked, "stop_sequences": ["b", "7"]}
                if streams:
                    async with client.messages.stream(**wish) as stream:
                        answer: Any = await stream.get_final_message()
                else:
                    answer = await client.messages.create(**wish)
                found.append((answer.content[0].text.strip(), answer.stop_reason, answer.stop_sequence))
            assert found == [("a", "stop_sequence", "7"), ("a", "end_turn", None)]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_cannot_be_honoured_and_a_wrong_key_are_refused(chat: ChatTokens) -> None:  # noqa: F811
    import anthropic

    async def main() -> None:
        async with serving(chat, Scripted(chat)) as served:
            client, ask = client_of(served), [{"role": "user", "content": "a ?"}]
            say: Any = client.messages.create
            with pytest.raises(anthropic.BadRequestError, match="top_k=5 cannot be honoured"):
                await say(model="any", max_tokens=6, messages=ask, extra_body={"top_k": 5})
            with pytest.raises(anthropic.BadRequestError, match="tool_choice=.* cannot be honoured"):
                await say(model="any", max_tokens=6, messages=ask, tools=[TOOL], tool_choice={"type": "any"})
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
            with pytest.raises(anthropic.BadRequestError, match="reads text alone"):
                await say(model="any", max_tokens=6, messages=[{"role": "user", "content": [image]}])
            client.api_key = "sk-other"
            with pytest.raises(anthropic.AuthenticationError):
                await say(model="any", max_tokens=6, messages=ask)

    asyncio.run(asyncio.wait_for(main(), 60))
