"""Programs as agents: which of their reports counts."""

import asyncio
import os
import random
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from impala_llm.config import load
from impala_llm.gateway.agent_pool import AgentFailed
from impala_llm.gateway.agents import AgentPlayer
from impala_llm.gateway.chat import ChatTokens
from impala_llm.gateway.tasks import suite_of
from impala_llm.learning.policy.scratch import make_scratch_policy
from impala_llm.rollout import EpisodeLimits, EpisodeSpec
from tests.gateway.engines import RandomEngine

PROGRAM = """
import json, os, sys, urllib.request

def post(path, body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).read()

post("/completions", {"prompt": "a", "max_tokens": 1})
if "posts" in sys.argv:
    post("/reward", {"reward": 1.0})
if "file" in sys.argv:
    open(os.environ["IMPALA_REWARD_FILE"], "w").write("0.5")
if "broken" in sys.argv:
    open(os.environ["IMPALA_REWARD_FILE"], "w").write("half")
print("tests that failed:")
print("none" if "silent" in sys.argv else "true" if "passed" in sys.argv else 0)
"""


async def score(tmp_path: Path, *words: str) -> float:
    """The score of an episode that the program plays."""
    (tmp_path / "program.py").write_text(PROGRAM)
    policy = make_scratch_policy(tmp_path / "policy")
    command = shlex.join([sys.executable, str(tmp_path / "program.py"), *words])
    config = load(["experiment=toy", f'agent.command="{command}"', "agent.processes=1", f"run.dir={tmp_path}"])
    engine: Any = RandomEngine(random.Random(0), ChatTokens(AutoTokenizer.from_pretrained(policy)).encode("ab c"))
    player = AgentPlayer(config, policy, suite_of(config))
    spec = EpisodeSpec("episode", 0, 0, 0, 0, "program", "actor-0", "task")
    try:
        await player.start(engine)
        return (await player.play(spec, engine, EpisodeLimits(1.0, 8, 400), training=True)).score
    finally:
        await player.close()


@pytest.mark.system
@pytest.mark.parametrize(
    ("words", "expected"), [((), 0.0), (("file",), 0.5), (("posts",), 1.0), (("posts", "file"), 1.0)]
)
def test_what_is_posted_counts_before_the_file_and_that_before_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: float
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert asyncio.run(asyncio.wait_for(score(tmp_path, *words), 120)) == expected


@pytest.mark.system
def test_a_reward_file_that_is_no_json_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with pytest.raises(AgentFailed, match="left no JSON in its reward file"):
        asyncio.run(asyncio.wait_for(score(tmp_path, "broken"), 120))


@pytest.mark.system
@pytest.mark.parametrize("last_line", ["silent", "passed"])
def test_a_program_without_a_reward_is_told_how_to_report_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_line: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with pytest.raises(AgentFailed, match="last line of its output is no JSON number or object"):
        asyncio.run(asyncio.wait_for(score(tmp_path, last_line), 120))
