"""Environment, loss, credit and metric writer of the user's own in a run, without a line of ours."""

import json
import re
from pathlib import Path

import pytest

from tests.algorithms import test_registry as registry
from tests.observability import test_writers as writers
from tests.system.forked_command import forked_command
from tests.system.runs import ROOT, SMALL


def example(page: str, begin: str) -> str:
    """The Python example of a page of the documentation that begins so."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    [code] = [code for code in found if code.startswith(begin)]
    return code


@pytest.mark.system
def test_parts_of_the_users_own_train_write_metrics_and_are_evaluated(user_folder: Path) -> None:
    """Environment and loss are those of the documentation. Learner and actor are processes of their own, started where
    the user's files are."""
    (user_folder / "my_env.py").write_text(example("environments.md", "import random"))
    (user_folder / "my_parts.py").write_text(example("algorithms.md", "from dataclasses") + registry.OWN)
    (user_folder / "my_writers.py").write_text(writers.OWN)
    words = [
        *("model=scratch", "env=my_env:NextLetter", "env.args.num_turns=3", f"run.name=own-{user_folder.name}"),
        *("algorithm=group_relative_by_std", "algorithm.loss=my_parts:MyLoss", "algorithm.loss.limit=3"),
        *("algorithm.credit=my_parts:PlainReturn", "algorithm.credit.scale=2"),
        *("run.metric_writers=[my_writers:Scores]", f"run.dir={user_folder}/run", "run.terminal=false", SMALL),
        *("learner.total_updates=3", "learner.batch_size=16", "engine.max_new_tokens=2", "engine.max_length=64"),
    ]

    def impala_llm(*words: str) -> str:
        done = forked_command(words, user_folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "tensorboard --logdir" not in impala_llm("train", *words)
    metrics = user_folder / "run" / "tensorboard"
    rows = [json.loads(line) for line in (metrics / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert 0.0 <= row["loss/steep_share"] <= 1.0
        assert "credit/return_mean" in row and "loss/clip_share" not in row
    assert "my_parts:MyLoss" in (user_folder / "run" / "config.yaml").read_text()
    lines = (metrics / "scores.txt").read_text().splitlines()
    assert lines[-1] == "closed" and lines[-2].startswith("3 ")
    played = impala_llm("evaluate", "--json", "--config", "run/config.yaml", "evaluation.num_tasks=8")
    assert "next-letter" in played and json.loads(played)[0]["turns"] == 3.0
