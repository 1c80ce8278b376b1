"""Agents of other people train a policy through the gateway, as real processes."""

from pathlib import Path

import pytest

from tests.system.runs import Run, column

OPENAI_AGENT = """
async def agent(task, client):
    letter = "ab"[task.id % 2]
    messages = [{"role": "user", "content": f"say {letter}"}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    return float(reply.choices[0].message.content[:1] == letter)
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
