"""Ranks that share the policy where the memory of one of them does not suffice."""

import json
from pathlib import Path

import pytest

from tests.system.runs import Run

SMALL = """
import os
from dataclasses import dataclass
import torch
from impala_llm.algorithms.losses import TruncatedIS

@dataclass
class Small(TruncatedIS):
    \"\"\"On rank 1 memory does not suffice for more than a number of action tokens.\"\"\"

    def __call__(self, scored, advantages):
        if os.environ.get("RANK") == "1" and len(scored.log_probs) > 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().__call__(scored, advantages)
"""


@pytest.mark.system
def test_a_run_whose_ranks_share_the_policy_goes_on_with_a_smaller_budget(tmp_path: Path, user_folder: Path) -> None:
    (user_folder / "my_small.py").write_text(SMALL)
    words = ["experiment=toy", "learner.num_ranks=2", "learner.sharding=fsdp2", "learner.total_updates=3"]
    small = ["algorithm.loss=my_small:Small", "algorithm.entropy_coef=0.01", "learner.batch_size=64"]
    with Run(tmp_path / "run", *words, *small, "actor.num_actors=2") as run:
        run.python_path.append(str(user_folder))
        assert run.train().wait(400) == 0, run.printed()
        assert len(run.rows()) == 3
        noted = json.loads((tmp_path / "run" / "token_budget.json").read_text())
        assert noted["configured"] == 8192 and noted["tokens"] < 8192
        printed = run.log.read_text()
        assert "learner: out of memory with rows of " in printed and "once it is started again" in printed
        assert "learner died (exit code 1)" in printed
        assert f"the budget of {noted['tokens']} tokens a micro-batch of {tmp_path}" in printed
        assert "is taken over, with learner.token_budget=8192" in printed
