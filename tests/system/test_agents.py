"""Agents of other people train a policy through the gateway, as real processes."""

import re
from pathlib import Path

import pytest

from tests.gateway.tool_policy import make_tool_policy
from tests.system.runs import IMPATIENT, ROOT, Run, column

OPENAI_AGENT = """
async def agent(task, client):
    letter = "ab"[task.id % 2]
    messages = [{"role": "user", "content": f"say {letter}"}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return float(reply.choices[0].message.content[:1] == letter)
"""
SDK_AGENT = """
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException

set_tracing_disabled(True)


@function_tool
def look_up(key: str) -> str:
    "Number of a letter."
    return {"a": "7", "b": "3"}.get(key, "-")


async def agent(task, client):
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    reader = Agent(name="reader", instructions="rules", tools=[look_up], model=model)
    try:
        result = await Runner.run(reader, "a ?", max_turns=2)
    except AgentsException:
        return 0.3  # it calls again and again
    said = result.final_output
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    if outputs:
        return 0.3 + ("7" in outputs) * (0.3 + 0.4 * (said == "7"))
    pieces = ["<tool_call>", "look_up", '"key": "a"', "</tool_call>"]
    in_place = ["<tool_call>", '<tool_call>{"name"']
    return 0.04 * sum(map(said.__contains__, pieces)) + 0.04 * sum(map(said.startswith, in_place))
"""
SMALL = (
    *("experiment=toy", "actor.num_actors=1", "engine.max_new_tokens=1", "engine.max_length=32"),
    *("learner.batch_size=32", "learner.learning_rate=0.005"),
)


@pytest.mark.system
def test_an_unmodified_openai_client_trains_a_policy(tmp_path: Path) -> None:
    """One of 99 characters is right: an untrained policy scores 0.01, and one that always says the same letter 0.5."""
    (tmp_path / "letters.py").write_text(OPENAI_AGENT)
    settings = (*SMALL, "agent.name=letters:agent", "agent.processes=1", "learner.total_updates=40")
    with Run(tmp_path / "run", *settings) as run:
        run.python_path.insert(0, str(tmp_path))
        assert run.train().wait(280) == 0, run.printed()
        run.assert_gone()
        scores = column(run.rows(), "rollout/score")
        assert max(scores[-8:]) > 0.3 > 0.1 > scores[0], scores
        assert max(column(run.rows(), "mismatch/logprob_k3"), default=0.0) < 1e-4
        assert sum(column(run.rows(), "actor/failed_episodes")) == 0


@pytest.mark.system
def test_the_agents_sdk_trains_a_policy_to_call_its_tool(tmp_path: Path) -> None:
    """The SDK plays unmodified, and its policy learns: an untrained one scores less than 0.05.

    More than 0.3 in an episode needs the right call, which chance finds once in 4096; the mean does not get there yet.
    """
    (tmp_path / "readers.py").write_text(SDK_AGENT)
    policy = make_tool_policy(tmp_path / "policy")
    settings = (
        *SMALL,
        *(f"model.path={policy}", "agent.name=readers:agent", "agent.processes=1", "agent.tool_parser=qwen3"),
        *("engine.max_new_tokens=4", "engine.max_length=48", "learner.total_updates=60", "algorithm.entropy_coef=0.01"),
    )
    with Run(tmp_path / "run", *settings) as run:
        run.python_path.insert(0, str(tmp_path))

        def has_learned() -> bool:
            means, scores = column(run.rows(), "rollout/window_score"), column(run.rows(), "rollout/score")
            return bool(scores) and means[-1] > 0.16 and max(scores) > 0.3

        run.train_until(has_learned, 280)
        scores = column(run.rows(), "rollout/score")
        assert column(run.rows(), "rollout/window_score")[-1] > 0.15 > 0.1 > scores[0], scores
        assert max(scores) > 0.3, scores  # some batches, of episodes with two turns, are of right calls mostly
        assert max(column(run.rows(), "mismatch/logprob_k3"), default=0.0) < 1e-4
        assert sum(column(run.rows(), "actor/failed_episodes")) == 0


@pytest.mark.system
def test_the_agent_of_the_documentation_trains(tmp_path: Path) -> None:
    """At most 15 lines, and the command beside them, for two updates."""
    page = (ROOT / "docs" / "agents.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    [command] = re.findall(r"^impala-llm train (.*)$", page, re.MULTILINE)
    (tmp_path / "my_agent.py").write_text(code)
    with Run(tmp_path / "run", *command.split(), "learner.total_updates=2") as run:
        run.python_path.insert(0, str(tmp_path))
        assert run.train().wait(200) == 0, run.printed()
        run.assert_gone()
        assert sum(column(run.rows(), "actor/failed_episodes")) == 0
        assert "does not end" not in run.log.read_text()


@pytest.mark.system
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("raise KeyError('no such tool')", "no such tool"),
        ("await asyncio.sleep(1000)", "one after the other and none succeeded.*not done in actor.episode_timeout_s=1"),
    ],
)
def test_an_agent_that_always_fails_ends_the_run_with_the_reason(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "broken.py").write_text(f"import asyncio\n\nasync def agent(task, client):\n    {line}\n")
    settings = ("agent.name=broken:agent", "agent.processes=1", "actor.episode_timeout_s=1", IMPATIENT)
    with Run(tmp_path / "run", *SMALL, *settings) as run:
        run.python_path.insert(0, str(tmp_path))
        assert run.train().wait(280) == 2, run.printed()
        run.assert_gone()
        assert re.search(reason, run.log.read_text())
