"""Conversations that branch in every way: what was sampled is learned from once, behind what it was sampled after."""

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from impala_llm.config import ConfigError, load
from impala_llm.engines.base import Generation
from impala_llm.envs import make_suite
from impala_llm.envs.base import SPLITS
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.gateway.chat import ChatTokens, TemplateRefused
from impala_llm.gateway.conversation import Conversation
from impala_llm.gateway.episode import AgentResult, ContextFull, EpisodeOver, GatewayEpisode
from impala_llm.gateway.tasks import AgentSuite
from impala_llm.gateway.tree import ConversationTree
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.rollout import EpisodeLimits, EpisodeSpec
from impala_llm.trajectory import CONTEXT_START, Trajectory
from tests.gateway.engines import RandomEngine

SPEC = EpisodeSpec("e", task_id=7, group_id=1, ticket_id=2, seed=3, env="agent", actor_id="a", signature="s")
DONE = AgentResult(reward=0.5, score=0.5, success=False)

ACTS = ["extend", "branch", "edit", "compact", "parallel", "several", "retry", "cancel", "stop"]
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    folder = make_scratch_policy(tmp_path_factory.mktemp("scratch") / "policy")
    return ChatTokens(AutoTokenizer.from_pretrained(folder))


class Player:
    """An agent that talks through an episode's conversation in random ways."""

    def __init__(
        self, chat: ChatTokens, seed: int, max_tokens: int = 100_000, engine: RandomEngine | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.engine = engine or RandomEngine(self.rng, chat.encode("ab c"))
        limits = EpisodeLimits(1.0, max_new_tokens=4, max_length=2000)
        self.episode = GatewayEpisode(
            replace(SPEC, episode_id=f"e{seed}"), self.engine, Conversation(chat), limits, max_tokens
        )
        self.conversation = self.episode.conversation
        self.states: list[Messages] = []
        """Conversations, each up to a completion that was seen."""

    async def ask(self, messages: Messages, n: int = 1, stop: tuple[str, ...] = ()) -> None:
        position = self.conversation.position_of(messages, [])
        for completion in await asyncio.gather(*(self.episode.sample(position, None, stop, None) for _ in range(n))):
            message = self.conversation.chat.reply(completion.generation.tokens.tolist()).message()
            self.conversation.remember(position, completion, message)
            self.states.append([*messages, message])

    def said(self, kind: str = "user") -> dict[str, Any]:
        return {"role": kind, "content": self.rng.choice(["x", "yy", "z<|end|>z", ""])}

    def edited(self) -> Messages:
        messages = [dict(message) for message in self.rng.choice(self.states)]
        self.rng.choice(messages)["content"] = "changed"
        return [*messages, self.said()]

    async def act(self) -> None:
        """Do one thing of those that agents do."""
        what = self.rng.choice(ACTS)
        if not self.states:
            await self.ask([self.said("system"), self.said()])
        elif what == "extend":
            await self.ask([*self.states[-1], self.said()])
        elif what == "branch":
            await self.ask([*self.rng.choice(self.states), self.said("tool")])
        elif what == "edit":
            await self.ask(self.edited())
        elif what == "compact":
            await self.ask([{"role": "user", "content": "so far: " + self.said()["content"]}])
        elif what == "parallel":
            known = list(self.states)
            await asyncio.gather(*(self.ask([*self.rng.choice(known), self.said()]) for _ in range(3)))
        elif what == "several":
            await self.ask([*self.states[-1], self.said()], n=2)
        elif what == "retry":
            await self.ask(self.rng.choice(self.states)[:-1])
        elif what == "stop":
            await self.ask([*self.states[-1], self.said()], stop=("b", "c a"))
        else:
            task = asyncio.ensure_future(self.ask([*self.states[-1], self.said()]))
            for _ in range(self.rng.randrange(6)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def play(self, num_acts: int) -> Trajectory:
        await self.ask([self.said("system"), self.said()])
        for _ in range(num_acts):
            await self.act()
        left = asyncio.ensure_future(self.ask([*self.states[-1], self.said()]))  # under way when the episode ends
        await asyncio.sleep(0)
        await self.episode.close()
        await asyncio.gather(left, return_exceptions=True)
        return self.episode.trajectory(DONE)


def assert_exact(trajectory: Trajectory, engine: RandomEngine) -> None:
    """Each sampled token is an action once, behind the tokens that it was sampled after, and nothing else is one."""
    indices = np.flatnonzero(trajectory.action_mask)
    serials = np.rint(-trajectory.behaviour_log_probs[indices] * 1024).astype(int).tolist()
    assert sorted(serials) == list(range(len(engine.sampled)))
    starts = np.flatnonzero(trajectory.versions == CONTEXT_START)
    for index, serial in zip(indices.tolist(), serials, strict=True):
        begin = int(starts[starts <= index].max(initial=0))
        token, history = engine.sampled[serial]
        assert trajectory.tokens[index] == token
        assert trajectory.tokens[begin:index].tolist() == history


@pytest.mark.system
def test_every_sampled_token_is_learned_from_exactly_once_in_a_thousand_random_conversations(chat: ChatTokens) -> None:
    num_contexts = []
    for seed in range(1000):
        player = Player(chat, seed)
        trajectory = asyncio.run(player.play(seed % 9))
        assert_exact(trajectory, player.engine)
        assert player.engine.sessions == {} and player.engine.running == set()
        num_contexts.append(len(trajectory.context_lengths))
    assert max(num_contexts) > 10 and min(num_contexts) == 1


def test_a_conversation_that_is_only_extended_is_one_row_that_keeps_the_sampled_ids(chat: ChatTokens) -> None:
    async def play() -> tuple[Trajectory, Player]:
        player = Player(chat, 5)
        await player.ask([player.said()])
        for _ in range(4):
            await player.ask([*player.states[-1], player.said()])
        await player.episode.close()
        return player.episode.trajectory(DONE), player

    trajectory, player = asyncio.run(play())
    assert_exact(trajectory, player.engine)
    assert len(trajectory.context_lengths) == 1 and len(trajectory.turns) == 5
    assert trajectory.rewards[-1] == 0.5 and trajectory.rewards.sum() == 0.5
    assert {params.seed for params in player.engine.params} == {SPEC.seed}


def test_branches_have_random_streams_of_their_own(chat: ChatTokens) -> None:
    async def play() -> Player:
        player = Player(chat, 5)
        await player.ask([player.said()], n=4)
        await player.episode.close()
        return player

    player = asyncio.run(play())
    assert len({params.seed for params in player.engine.params}) == 4


def test_a_clients_seed_gives_an_episode_the_same_completion_again_and_other_episodes_others(chat: ChatTokens) -> None:
    """As agents with a fixed seed would give all members of a group one completion, of which nothing can be learned."""

    async def seeds(spec_seed: int) -> list[int]:
        engine = RandomEngine(random.Random(0), chat.encode("ab c"))
        limits = EpisodeLimits(1.0, max_new_tokens=4, max_length=400)
        episode = GatewayEpisode(replace(SPEC, seed=spec_seed), engine, Conversation(chat), limits, 1000)
        for wanted in (11, 11, 12):
            position = episode.conversation.position_of([{"role": "user", "content": "a"}], [])
            await episode.sample(position, None, (), wanted)
        await episode.close()
        return [params.seed for params in engine.params]

    first, second = (asyncio.run(seeds(spec_seed)) for spec_seed in (3, 4))
    assert first[0] == first[1] and len({*first, *second}) == 4 and second == asyncio.run(seeds(4))


def test_engines_with_a_slot_for_each_episode_serve_all_their_branches(chat: ChatTokens) -> None:
    """No episode waits for a session that another one keeps while it waits."""

    async def play() -> int:
        rng = random.Random(1)
        engine = RandomEngine(rng, chat.encode("ab c"), slots=4)
        players = [Player(chat, seed, engine=engine) for seed in range(4)]
        await asyncio.gather(*(player.ask([player.said()]) for player in players))
        for _ in range(5):
            await asyncio.gather(*(player.ask([*player.states[-1], player.said()], n=3) for player in players))
        return len(engine.params)

    assert asyncio.run(asyncio.wait_for(play(), 60)) == 4 + 5 * 4 * 3


def test_a_space_before_the_end_of_a_completion_is_no_part_of_it(chat: ChatTokens) -> None:
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|end|>'", "' <|end|>'")
    spaced, end = ChatTokens(tokenizer), tokenizer.eos_token_id
    assert spaced.stop_token_ids == (end,)
    for said in ("a b", "a b "):
        assert spaced.reply([*spaced.encode(said), end]).content == "a b"
    asked = [{"role": "user", "content": "c"}]
    after = chat.following(asked, [], end)
    assert spaced.following(asked, [], end) == after
    assert spaced.following(asked, [], spaced.encode("b")[0]) == [*spaced.encode(" "), end, *after], "cut by length"


def test_a_template_that_leaves_out_what_a_tool_says_is_refused(chat: ChatTokens) -> None:
    """Else the policy learns from completions of what it never read."""
    tokenizer = copy.deepcopy(chat.tokenizer)
    said = "message.content if message.role != 'tool' else ''"
    tokenizer.chat_template = tokenizer.chat_template.replace("message.content", said)
    deaf = ChatTokens(tokenizer)
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    with pytest.raises(TemplateRefused, match="leaves out what a message of role 'tool' says"):
        deaf.opening(messages, [])
    assert deaf.opening(messages[:1], []) == chat.opening(messages[:1], [])


SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role in ('user', 'assistant', 'tool') or loop.first %}"
    "{% if not message.tool_calls %}{{ message.content.split('</think>')[-1] }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{{ '<|end|>' if message.role == 'assistant' else '<|act|>' }}{% endif %}{% endfor %}"
)


def test_a_message_of_another_role_that_the_template_leaves_out_is_refused(chat: ChatTokens) -> None:
    tokenizer = copy.deepcopy(chat.tokenizer)
    tokenizer.chat_template = SYSTEM_FIRST
    strict = ChatTokens(tokenizer)
    user, completion = {"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}
    call = {"id": "1", "type": "function", "function": {"name": "d", "arguments": "{}"}}
    for role, known in (("function", [user, completion]), ("system", [user]), ("system", [user, completion])):
        with pytest.raises(TemplateRefused, match=f"leaves out what a message of role '{role}' says: .*'user'"):
            strict.opening([*known, {"role": role, "content": "seven"}, user], [])
    with pytest.raises(TemplateRefused, match="role 'system'"):
        strict.following([{"role": "developer", "content": "in lower case"}, user], [], strict.stop_token_ids[0])
    known = [{"role": "system", "content": "s"}, user, completion, user, {**completion, "tool_calls": [call]}, user]
    rendered = tokenizer.apply_chat_template([*known, {"role": "system", "content": ""}], tokenize=False)
    assert "c<|end|>" in rendered and "<think>" not in rendered
    expected = tokenizer.encode(rendered, add_special_tokens=False)
    assert strict.opening(known, []) == expected, "reasoning, and the text beside a call, are left out by design"


def test_tasks_may_hold_any_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ("a\u2028b", "\x85", "c\x0bd")]
    (tmp_path / "tasks.jsonl").write_text("\r\n".join(lines) + "\n", "utf-8")
    suite = AgentSuite(str(tmp_path / "tasks.jsonl"), 3)
    assert [suite.data(number)["text"] for number in range(3)] == ["a\u2028b", "\x85", "c\x0bd"]


def test_a_file_of_tasks_may_say_the_splits_and_equal_lines_are_in_one(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"

    def splits(*rows: dict[str, Any]) -> list[list[int]]:
        file.write_text("\n\n".join(map(json.dumps, rows)), "utf-8")
        suite = AgentSuite(str(file), 3)
        return [list(suite.tasks(split)) for split in SPLITS]

    names = ["test", "train", "validation", "train"]
    assert splits(*({"question": "2+2", "split": name} for name in names)) == [[1, 3], [2], [0]]
    with pytest.raises(EnvironmentFault, match="agent.tasks: .*tasks.jsonl, line 3: split is None: write one of train"):
        splits({"question": "a", "split": "train"}, {"question": "b"}, {"question": "c", "split": "test"})
    one, *others = ({"question": question, "kind": "sum"} for question in "abcd")
    assert splits(one, *others) == [[0, 1], [2], [3]]
    again = dict(reversed(one.items()))
    assert splits(one, others[0], again, *others[1:], one) == [[0, 1, 2, 5], [3], [4]]
    with pytest.raises(EnvironmentFault, match="has 2 different tasks: at least 3"):
        splits(one, others[0], again)


def test_files_of_tasks_have_one_reader(tmp_path: Path) -> None:
    """A byte-order mark and blank lines are passed over; messages name the line of the file all the same."""
    file = tmp_path / "tasks.jsonl"

    def suites() -> Iterator[Any]:
        yield lambda: AgentSuite(str(file), 3)
        yield lambda: make_suite(load(["env=tasks", f"env.args.file={file}"]).env)

    lines = [json.dumps({"prompt": f"{number} + 1 =", "answer": "1"}) for number in range(4)]
    file.write_text("\ufeff" + "\n\n".join(lines) + "\n\n \n", "utf-8")
    of_agent, of_file = (make() for make in suites())
    assert of_agent.data(3)["prompt"] == of_file.session(True).reset(3)[0] == "3 + 1 ="
    said_of = {"[]": "line 3: each line must be a JSON object", "{": "line 3: this is not JSON"}
    for broken, said in said_of.items():
        file.write_text(f"{lines[0]}\n\n{broken}\n{lines[1]}\n", "utf-8")
        for make in suites():
            with pytest.raises((EnvironmentFault, ConfigError), match=said):
                make()


def test_a_conversation_of_thousands_of_turns_is_one_context() -> None:
    tree, last = ConversationTree(), None
    one = Generation(np.array([5], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    for _ in range(3000):
        last = tree.begin(last, [7])
        tree.end(last, one)
    trajectory = tree.trajectory(SPEC, reward=1.0, score=1.0, success=True, stats={})
    assert trajectory.tokens.tolist() == [7, 5] * 3000 and tree.num_tokens == 6000
    assert len(trajectory.turns) == 3000 and len(trajectory.context_lengths) == 1


def test_the_last_completion_of_an_episode_is_the_last_of_its_trajectory(chat: ChatTokens) -> None:
    """The reward follows the conversation, also where a sub-agent has talked meanwhile."""

    async def play() -> tuple[Trajectory, Player]:
        player = Player(chat, 5)
        await player.ask([player.said()])
        main = player.states[-1]
        await player.ask([{"role": "user", "content": "sub-agent"}])
        await player.ask([*main, player.said()])
        await player.episode.close()
        return player.episode.trajectory(DONE), player

    trajectory, player = asyncio.run(play())
    assert len(trajectory.context_lengths) == 2
    assert round(-float(trajectory.behaviour_log_probs[-1]) * 1024) == len(player.engine.sampled) - 1


def test_an_episode_is_full_at_its_limit_over_all_branches(chat: ChatTokens) -> None:
    async def play() -> Trajectory:
        player = Player(chat, 5, max_tokens=60)
        with pytest.raises(ContextFull, match="agent.max_tokens=60"):
            for _ in range(60):
                await player.ask([{"role": "user", "content": "again"}], n=1)
        await player.episode.close()
        with pytest.raises(EpisodeOver):
            await player.ask([player.said()])
        return player.episode.trajectory(DONE)

    assert 50 <= asyncio.run(play()).num_tokens <= 60


def test_rewards_of_turns_are_where_their_completions_end(chat: ChatTokens) -> None:
    async def play() -> Trajectory:
        player = Player(chat, 5)
        await player.ask([player.said()])
        await player.ask([*player.states[-1], player.said()])
        first = player.episode.completion_id(player.conversation.tree.completions[:1], "chatcmpl")
        player.episode.reward(first, 0.25)
        with pytest.raises(ValueError, match="no such completion"):
            player.episode.reward("other", 1.0)
        await player.episode.close()
        return player.episode.trajectory(AgentResult.of({"score": 1.0, "rewards": {first: 1.0}}))

    trajectory = asyncio.run(play())
    ends = trajectory.turns[:, 1] - 1
    assert trajectory.rewards[ends].tolist() == [1.25, 1.0] and trajectory.rewards.sum() == 2.25


def test_rewards_of_one_turn_are_bounded_together(chat: ChatTokens) -> None:
    async def play() -> None:
        player = Player(chat, 5)
        await player.ask([player.said()])
        turn = player.episode.completion_id(player.conversation.tree.completions[:1], "chatcmpl")
        player.episode.reward(turn, 6e5)
        with pytest.raises(ValueError, match=r"with what was posted before is 1200000.0: a number of at most 1e6"):
            player.episode.reward(turn, 6e5)
        player.episode.reward(turn, -1e6)
        player.episode.reward(turn, 1e6)
        await player.episode.close()
        with pytest.raises(ValueError, match="a number of at most 1e6"):
            player.episode.trajectory(AgentResult.of({"score": 1.0, "rewards": {turn: 6e5}}))

    asyncio.run(play())


@pytest.mark.parametrize(
    "result",
    [
        *(None, "much", float("nan"), 10**400, {"score": 2.0}, {"reward": 1, "colour": 3}, {"stats": {}}),
        *({"reward": 1, "success": "false"}, {"reward": 1, "stats": {"": 1}}, {"reward": 1, "stats": {"a\0b": 1}}),
        *("1", {"reward": "1"}, {"reward": 1, "stats": {"a": "3"}}),
    ],
)
def test_results_that_are_none_are_refused(result: Any) -> None:
    with pytest.raises(ValueError, match="its "):
        AgentResult.of(result)
