"""The gateway as clients see it: unmodified clients of OpenAI's protocol, over HTTP."""

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from impala_llm.engines.embedded.engine import TorchEngine
from impala_llm.envs.toy import CorridorSuite
from impala_llm.gateway.chat import ChatTokens
from impala_llm.gateway.conversation import Conversation
from impala_llm.gateway.episode import AgentResult, GatewayEpisode
from impala_llm.gateway.server import Gateway
from impala_llm.learning.packing import pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.learning.scoring import action_log_probs
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode
from impala_llm.trajectory import ARRAY_FIELDS, METADATA_FIELDS, Trajectory
from tests.gateway.engines import FailingEngine, RandomEngine
from tests.gateway.test_conversations import assert_exact

SPEC = EpisodeSpec("e", task_id=7, group_id=1, ticket_id=2, seed=3, env="corridor", actor_id="a", signature="s")
LIMITS = EpisodeLimits(0.7, max_new_tokens=6, max_length=400)
DONE = AgentResult(reward=0.5, score=0.5, success=False)
ASK = [{"role": "user", "content": "say b"}]

Use = Callable[["Served"], Awaitable[None]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_scratch_policy(tmp_path_factory.mktemp("scratch") / "policy")


@pytest.fixture(scope="module")
def chat(policy: Any) -> ChatTokens:
    return ChatTokens(AutoTokenizer.from_pretrained(policy))


class Served:
    """An episode behind a gateway."""

    def __init__(self, gateway: Gateway, episode: GatewayEpisode, engine: Any) -> None:
        self.gateway, self.episode, self.engine = gateway, episode, engine

    @cached_property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.gateway.url, api_key=self.episode.key, max_retries=0)

    async def end(self) -> Trajectory:
        await self.gateway.remove(self.episode)
        return self.episode.trajectory(DONE)

    async def say(self, messages: list[Any], **wishes: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=messages, **wishes)

    async def post(self, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.episode.key if key is None else key}"}
        async with aiohttp.ClientSession() as session, session.post(
            self.gateway.url + path, data=body if isinstance(body, bytes) else None,
            json=None if isinstance(body, bytes) else body, headers=headers,
        ) as response:  # fmt: skip
            return response.status, await response.json()


@asynccontextmanager
async def serving(chat: ChatTokens, engine: Any = None, drops: bool = False) -> AsyncIterator[Served]:
    engine = engine or RandomEngine(random.Random(0), chat.encode("ab c"))
    gateway = Gateway(engine.vocab_size, drops)
    await gateway.start()
    episode = GatewayEpisode(SPEC, engine, Conversation(chat), LIMITS, 10_000)
    gateway.add(episode, LIMITS.temperature)
    try:
        yield Served(gateway, episode, engine)
    finally:
        await gateway.close()


def run(chat: ChatTokens, use: Use, engine: Any = None, drops: bool = False) -> None:
    async def main() -> None:
        async with serving(chat, engine, drops) as served:
            await use(served)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_conversation_of_the_openai_client_is_one_exact_row(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        messages: list[Any] = [{"role": "system", "content": "rules"}, *ASK]
        for turn in range(4):
            completion = await served.say(messages, temperature=0.7)
            assert completion.choices[0].finish_reason in ("stop", "length")
            messages += [completion.choices[0].message, {"role": "user", "content": f"turn {turn}"}]
        trajectory = await served.end()
        assert_exact(trajectory, served.engine)
        assert len(trajectory.turns) == 4 and len(trajectory.context_lengths) == 1
        assert {(p.temperature, p.seed) for p in served.engine.params} == {(0.7, SPEC.seed)}

    run(chat, use)


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_streams_have_the_same_text_as_whole_completions(chat: ChatTokens, kind: str) -> None:
    async def use(served: Served) -> None:
        pieces: list[str] = []
        usage = None
        if kind == "chat":
            stream = await served.say(ASK, stream=True, stream_options={"include_usage": True})
            async for event in stream:
                pieces += [choice.delta.content or "" for choice in event.choices]
                usage = event.usage or usage
        else:
            stream = await served.client.completions.create(
                model="any", prompt="say b", stream=True, stream_options={"include_usage": True}
            )
            async for event in stream:
                pieces += [choice.text for choice in event.choices]
                usage = event.usage or usage
        tokens = [token for token, _ in served.engine.sampled]
        assert "".join(pieces) == chat.text(tokens)
        assert usage is not None and usage.completion_tokens == len(tokens)
        assert_exact(await served.end(), served.engine)

    run(chat, use)


def test_several_completions_are_several_branches(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        completion = await served.say(ASK, n=3)
        assert [choice.index for choice in completion.choices] == [0, 1, 2]
        await served.say([*ASK, completion.choices[1].message, {"role": "user", "content": "more"}])
        trajectory = await served.end()
        assert_exact(trajectory, served.engine)
        assert len(trajectory.context_lengths) == 3 and len(trajectory.turns) == 4

    run(chat, use)


def test_completions_of_texts_and_of_tokens_go_on_where_they_ended(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        complete = served.client.completions.create
        first = await complete(model="any", prompt="once upon")
        await complete(model="any", prompt="once upon" + first.choices[0].text + " and then")
        ids = [int(token) for token in served.episode.conversation.tree.completions[-1].tokens]
        await complete(model="any", prompt=[*ids, 5, 6])
        await complete(model="any", prompt=["one", "two"], n=2)
        trajectory = await served.end()
        assert_exact(trajectory, served.engine)
        assert len(trajectory.turns) == 7 and len(trajectory.context_lengths) == 5

    run(chat, use)


class Reciting(RandomEngine):
    """Says given tokens, whatever it is asked."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(random.Random(0), [])
        self.left = list(tokens)

    async def _complete(self, session_id: str, history: list[int], params: Any) -> Any:
        ends = [index for index, token in enumerate(self.left, 1) if token in params.stop_token_ids]
        number = min([params.max_new_tokens, *ends])
        tokens, self.left = self.left[:number], self.left[number:]
        serials = list(range(len(self.sampled), len(self.sampled) + number))
        self.sampled += [(token, [*history, *tokens[:index]]) for index, token in enumerate(tokens)]
        self.sessions[session_id] = [*history, *tokens]
        return self._generation(tokens, serials, "stop" if number in ends else "length")


def test_a_completion_of_a_text_is_sampled_behind_no_token_that_the_text_does_not_have(chat: ChatTokens) -> None:
    end = chat.stop_token_ids[0]
    engine = Reciting([end, end, *chat.encode("ab"), end, *chat.encode("cd"), *chat.encode("e"), end])

    async def use(served: Served) -> None:
        prompts = ["once", "once", "once", "onceab, then", "onceab, thenc", "onceab, thencd, and"]
        completions = []
        for prompt in prompts:
            completion = await served.client.completions.create(
                model="any", prompt=prompt, max_tokens=1 if "then" in prompt else 5
            )
            completions.append(completion.choices[0].text)
            assert completion.usage.prompt_tokens == len(chat.encode(prompt))
        assert completions == ["", "", "ab", "c", "d", "e"]
        histories = [completion.history for completion in served.episode.conversation.tree.completions]
        assert histories == [chat.encode(prompt) for prompt in prompts]
        trajectory = await served.end()
        assert_exact(trajectory, engine)
        assert len(trajectory.context_lengths) == 4, "a completion that was cut is gone on with"

    run(chat, use, engine)


def test_a_stop_text_that_the_last_allowed_token_completes_is_named(chat: ChatTokens) -> None:
    engine = Reciting(chat.encode("abcabc"))

    async def use(served: Served) -> None:
        found = []
        for stop in ("bc", "x"):
            choice = (await served.say(ASK, stop=[stop], max_tokens=3)).choices[0]
            found.append((choice.message.content, choice.finish_reason, choice.model_extra["stop_reason"]))
        assert found == [("a", "stop", "bc"), ("abc", "length", None)]

    run(chat, use, engine)


def test_a_completion_ends_at_a_stop_text_which_is_learned_and_not_shown(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        for attempt in range(20):
            completion = await served.say([{"role": "user", "content": str(attempt)}], stop=["b"], max_tokens=5)
            text, choice = chat.text(served.episode.conversation.tree.completions[-1].tokens), completion.choices[0]
            assert "b" not in choice.message.content and text.endswith(choice.message.content + "b" * text.count("b"))
        trajectory = await served.end()
        assert_exact(trajectory, served.engine)
        assert len(trajectory.turns) == 20 and "b" in chat.text(trajectory.tokens[trajectory.action_mask].tolist())

    run(chat, use)


def test_the_clients_limit_and_seed_hold(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        await served.say(ASK, max_tokens=2, seed=11)
        await served.say(ASK, max_completion_tokens=3)
        await served.say(ASK, max_tokens=1000)
        params = served.engine.params
        assert [p.max_new_tokens for p in params] == [2, 3, LIMITS.max_new_tokens]
        assert params[0].seed != params[1].seed

    run(chat, use)


def test_a_request_without_the_key_of_an_episode_under_way_is_refused_and_counted(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        body = {"model": "any", "messages": ASK}
        for key in ("", "sk-other", served.episode.key[:-1]):
            assert (await served.post("/chat/completions", body, key))[0] == 401
        assert (await served.post("/reward", {"reward": 1.0}, "sk-other"))[0] == 401
        await served.say(ASK)
        await served.end()
        with pytest.raises(openai.AuthenticationError):
            await served.say(ASK)
        assert served.gateway.counters["refused_keys"] == 5 and served.gateway.counters["requests"] == 1

    run(chat, use)


UNSUPPORTED = [
    {"top_p": 0.9},
    {"temperature": 0.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -1.0},
    {"logit_bias": {"5": 3}},
    {"response_format": {"type": "json_object"}},
    {"tool_choice": "required"},
    {"extra_body": {"top_k": 5}},
    {"extra_body": {"repetition_penalty": 1.1}},
]


@pytest.mark.parametrize("wish", UNSUPPORTED, ids=str)
def test_what_would_make_the_log_probabilities_wrong_is_refused_with_a_sentence_or_dropped(
    chat: ChatTokens, wish: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    key = next(iter(wish.get("extra_body", wish)))

    async def refused(served: Served) -> None:
        with pytest.raises(openai.BadRequestError, match=f"{key}=.* cannot be honoured"):
            await served.say(ASK, **wish)
        assert served.engine.sampled == []

    async def dropped(served: Served) -> None:
        await served.say(ASK, **wish)
        assert served.engine.params[0].temperature == LIMITS.temperature

    run(chat, refused)
    run(chat, dropped, drops=True)
    assert f"dropped: {key}=" in caplog.text


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": True},
        {"logprobs": 0},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "low"},
        {"modalities": ["audio"]},
    ],
    ids=str,
)
def test_what_changes_no_log_probability_and_is_not_served_is_refused_for_that_reason_or_dropped(
    chat: ChatTokens, wish: dict[str, Any]
) -> None:
    key = next(iter(wish.get("extra_body", wish)))

    async def refused(served: Served) -> None:
        with pytest.raises(openai.BadRequestError, match=f"{key}=.* is not served; leave it out") as caught:
            await served.say(ASK, **wish)
        assert "log-probabilities" not in str(caught.value)

    run(chat, refused)
    run(chat, lambda served: served.say(ASK, **wish), drops=True)


def test_what_asks_for_nothing_is_let_through(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        await served.say(ASK, top_p=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, user="me", n=1)

    run(chat, use)


BAD: list[tuple[str, Any]] = [
    ("/chat/completions", b"{"),
    ("/chat/completions", b"[]"),
    ("/chat/completions", b"\xff\xfe"),
    ("/chat/completions", {}),
    ("/chat/completions", {"messages": []}),
    ("/chat/completions", {"messages": [{"role": "assistant", "content": "b"}]}),
    ("/chat/completions", {"messages": [{"content": "b"}]}),
    ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
    ("/chat/completions", {"messages": [{"role": "user", "content": "", "tool_calls": [5]}]}),
    ("/chat/completions", {"messages": ASK, "n": 0}),
    ("/chat/completions", {"messages": ASK, "n": 10**9}),
    ("/chat/completions", {"messages": ASK, "max_tokens": -1}),
    ("/chat/completions", {"messages": ASK, "seed": "one"}),
    ("/chat/completions", {"messages": ASK, "stop": [5]}),
    ("/chat/completions", {"messages": ASK, "tools": 5}),
    ("/chat/completions", b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("/chat/completions", {"messages": ASK, "tools": [{"description": "x" * (2 << 20)}]}),
    ("/completions", {"prompt": ["a"] * 33, "n": 2}),
    ("/messages", {"messages": ASK, "tool_choice": "auto"}),
    ("/completions", {"prompt": []}),
    ("/completions", {"prompt": [-1]}),
    ("/completions", {"prompt": [10**9]}),
    ("/completions", {"prompt": ""}),
    ("/reward", {"score": 5}),
    ("/reward", {"rewrad": 1.0}),
    ("/reward", {"completion_id": "none", "reward": 1}),
    ("/reward", {"completion_id": "none"}),
]


def test_bad_requests_get_a_sentence_and_the_next_ones_an_answer(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        for path, body in BAD:
            status, answer = await served.post(path, body)
            assert status == 400 and answer["error"]["message"], (path, body, status, answer)
        assert served.gateway.counters["refused_requests"] == len(BAD)
        assert (await served.say(ASK)).choices[0].message.role == "assistant"
        assert_exact(await served.end(), served.engine)

    run(chat, use)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/reward", {"reward": "much"}, "its reward is 'much'"),
        ("/reward", {"rewrad": 1.0}, "its result has ['rewrad']"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "a\ud800"}]}, "half of a surrogate pair"),
        (
            "/chat/completions",
            {"messages": [{"role": "system", "content": "\ud800"}, *ASK]},
            "half of a surrogate pair",
        ),
        ("/completions", {"prompt": "\ud800"}, "half of a surrogate pair"),
        ("/messages", {"messages": [{"role": "user", "content": None}]}, "messages[0] is {'role': 'user', 'content'"),
        ("/messages", {"messages": [*ASK, 5]}, "messages[1] is 5: a role"),
        ("/messages", {"messages": ASK, "tool_choice": "auto"}, "tool_choice is 'auto': an object"),
    ],
)
def test_a_refusal_names_what_is_wrong(chat: ChatTokens, path: str, body: Any, said: str) -> None:
    async def use(served: Served) -> None:
        status, answer = await served.post(path, json.dumps(body).encode())
        assert status == 400 and said in answer["error"]["message"], answer
        assert served.episode.result is None

    run(chat, use)


def test_what_is_not_served_is_told_what_is(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        with pytest.raises(openai.NotFoundError, match="/v1/responses is not served.*/v1/chat/completions.*set OpenAI"):
            await served.client.responses.create(model="any", input="say b")
        assert (await served.post("/embeddings", {"input": "b"}))[0] == 404
        assert (await served.post("/embeddings", {"input": "b"}, "sk-other"))[0] == 401
        assert served.gateway.counters["refused_requests"] == 2 and served.gateway.counters["refused_keys"] == 1

    run(chat, use)


def test_a_conversation_that_is_too_long_is_named_so(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        with pytest.raises(openai.BadRequestError, match="engine.max_length=400") as caught:
            await served.say([{"role": "user", "content": "x" * 400}])
        assert caught.value.code == "context_length_exceeded"

    run(chat, use)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "word " * 400_000}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 2_000_000}]}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 100_000}),
        ("/completions", {"prompt": "word " * 400_000}),
        ("/completions", {"prompt": [5] * 100_000}),
    ],
    ids=["text", "parts", "messages", "prompt", "ids"],
)
def test_what_is_too_long_by_far_is_refused_before_it_is_encoded(
    chat: ChatTokens, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two megabytes take twenty seconds, in which the actor's loop stands still and its learner gives it up."""
    encoded: list[int] = []

    class Watched(ChatTokens):
        def encode(self, text: str) -> list[int]:
            encoded.append(len(text))
            return super().encode(text)

        def encode_content(self, text: str) -> list[int]:
            encoded.append(len(text))
            return super().encode_content(text)

        def text(self, tokens: Any) -> str:
            encoded.append(len(tokens))
            return super().text(tokens)

    async def use(served: Served) -> None:
        status, answer = await served.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "engine.max_length=400" in answer["error"]["message"] and max(encoded) < 10

    run(Watched(chat.tokenizer), use)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}'),
        ("/reward", b'{"reward": 1.0}'),
    ],
    ids=["completion", "reward"],
)
def test_a_request_whose_body_comes_after_the_end_of_its_episode_is_refused_as_that(
    chat: ChatTokens, path: str, sent: bytes
) -> None:
    async def use(served: Served) -> None:
        came, ended = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            came.set()
            await ended.wait()
            yield sent

        headers = {"Authorization": f"Bearer {served.episode.key}", "Expect": "100-continue"}
        async with aiohttp.ClientSession() as session:
            url = served.gateway.url + path
            posting = asyncio.ensure_future(session.post(url, data=body(), headers=headers))
            await came.wait()  # and so the server has begun to answer
            while not served.gateway.counters["requests"]:
                await asyncio.sleep(0.01)
            await served.gateway.remove(served.episode)
            ended.set()
            response = await posting
            assert response.status == 401 and served.episode.key not in await response.text()

    run(chat, use)


def test_a_body_is_read_as_utf_8_whatever_charset_its_sender_names(chat: ChatTokens) -> None:
    """Some, such as punycode, take quadratic time, in which the engine would stand still."""

    async def use(served: Served) -> None:
        body = json.dumps({"messages": ASK}).encode()
        url, key = served.gateway.url + "/chat/completions", served.episode.key
        for charset in ("punycode", "utf-16", "none-such"):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": f"application/json; charset={charset}"}
            async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
                assert response.status == 200, await response.text()

    run(chat, use)


def test_a_body_that_is_compressed_is_refused_with_the_reason(
    chat: ChatTokens, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"messages": ASK}).encode()

    async def use(served: Served) -> None:
        async def post(data: bytes, encoding: str) -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {served.episode.key}", "Content-Encoding": encoding}
            url = served.gateway.url + "/chat/completions"
            async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=headers) as response:
                return response.status, await response.json()

        for data in (gzip.compress(body), b"this is not packed"):
            status, answer = await post(data, "gzip")
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert "the body is compressed (Content-Encoding: gzip)" in answer["error"]["message"]
        assert (await post(body, "identity"))[0] == 200

    run(chat, use)
    # asyncio's are of clients that other tests have not closed, and that are collected here.
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def test_what_is_dropped_is_logged_once_for_all_episodes(chat: ChatTokens, caplog: pytest.LogCaptureFixture) -> None:
    async def use(served: Served) -> None:
        for _ in range(5):
            episode = GatewayEpisode(SPEC, served.engine, Conversation(chat), LIMITS, 10_000)
            served.gateway.add(episode, LIMITS.temperature)
            client = openai.AsyncOpenAI(base_url=served.gateway.url, api_key=episode.key)
            await client.chat.completions.create(model="any", messages=ASK, top_p=0.9, presence_penalty=0.5)
            await served.gateway.remove(episode)

    run(chat, use, drops=True)
    assert caplog.text.count("dropped: top_p=") == 1 and caplog.text.count("dropped: presence_penalty=") == 1


def test_an_engine_that_fails_is_the_servers_fault_and_ends_the_episode_without_a_trajectory(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        with pytest.raises(openai.InternalServerError, match="the engine is broken"):
            await served.say(ASK)
        with pytest.raises(RuntimeError, match="the engine is broken"):
            await served.end()

    run(chat, use, FailingEngine(random.Random(0), [5]))


def test_a_client_that_goes_away_leaves_what_was_sampled_and_its_session_free(chat: ChatTokens) -> None:
    """Its completion is aborted; a retry is a branch."""

    class Slow(RandomEngine):
        """Its first completion has one token and then waits for the abort."""

        def __init__(self) -> None:
            super().__init__(random.Random(0), chat.encode("ab c"))
            self.waits = asyncio.Event()

        async def _complete(self, session_id: str, history: list[int], params: Any) -> Any:
            if self.sampled:
                return await super()._complete(session_id, history, params)
            self.sampled.append((5, history))
            self.sessions[session_id] = [*history, 5]
            self.waits.set()
            while session_id not in self.aborted:
                await asyncio.sleep(0.01)
            return self._generation([5], [0], "abort")

    async def use(served: Served) -> None:
        lost = asyncio.ensure_future(served.say(ASK))
        await served.engine.waits.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        await served.say(ASK)
        trajectory = await served.end()
        assert_exact(trajectory, served.engine)
        assert len(trajectory.context_lengths) == 2 and served.engine.sessions == {}

    async def main() -> None:
        async with serving(chat, Slow()) as served:
            await use(served)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_models_are_listed(chat: ChatTokens) -> None:
    async def use(served: Served) -> None:
        assert [model.id async for model in served.client.models.list()] == ["policy"]
        assert (await served.client.models.retrieve("gpt-4o")).id == "gpt-4o"

    run(chat, use)


@pytest.mark.system
def test_an_episode_of_the_openai_client_equals_the_same_one_played_by_reset_and_step(
    policy: Any, chat: ChatTokens
) -> None:
    """Token for token and log-probability for log-probability; a learner of the same version has the ratio 1."""
    suite = CorridorSuite(CorridorSuite.Options(num_turns=5))

    async def direct() -> Trajectory:
        engine = TorchEngine.from_pretrained(policy, max_sessions=2, max_length=400)
        chat_format = ChatFormat(chat.tokenizer)
        return await play_episode(SPEC, suite.session(True), engine, chat_format, LIMITS)

    async def through_the_gateway() -> Trajectory:
        async with serving(chat, TorchEngine.from_pretrained(policy, max_sessions=2, max_length=400)) as served:
            session = suite.session(True)
            observation, _ = session.reset(SPEC.task_id)
            messages, ended, reward, info = [], False, 0.0, {}
            while not ended:
                messages.append({"role": "user", "content": observation})
                reply = (await served.say(messages)).choices[0].message
                messages.append(reply)
                observation, reward, ended, _, info = session.step(reply.content)
            await served.gateway.remove(served.episode)
            return served.episode.trajectory(AgentResult.of({"reward": reward, **info}))

    wanted, found = asyncio.run(direct()), asyncio.run(through_the_gateway())
    assert len(found.turns) == 5
    for name in ARRAY_FIELDS:
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    assert {name: getattr(found, name) for name in METADATA_FIELDS} == {
        name: getattr(wanted, name) for name in METADATA_FIELDS
    }
    (micro,) = pack([found], 1000)
    learner = action_log_probs(PolicyModel.from_pretrained(policy), micro, LIMITS.temperature)
    assert float((learner - micro.behaviour_log_probs).abs().max()) < 1e-4
