"""One rank of `test_parallel` that makes its policy and a reference, as a learner does at its start.

Its words: POLICY_DIRECTORY OUTPUT_DIRECTORY FREE SHARDING, and "refused" where rank 0 finds packed rows computed
wrongly. FREE: the host's free memory in bytes. SHARDING: learner.sharding. What ranks do is noted in a file of all of
them, in the order in which they do it; the end of each stands in a file of its own.
"""

from pathlib import Path
from typing import Any

import psutil
import torch

from impala_llm.config import load
from impala_llm.engines.base import ModelRefused
from impala_llm.learning.origin import Origin, make_model
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.scoring import Scorers


def main(words: list[str]) -> None:
    policy, output, free, sharding = Path(words[0]), Path(words[1]), int(words[2]), words[3]
    torch.set_num_threads(1)
    ranks = Ranks("cpu", 60.0, sharding)
    settings = [
        f"model.path={policy}",
        f"learner.num_ranks={ranks.world_size}",
        f"learner.sharding={sharding}",
        "algorithm.kl_coef=0.1",
        "learner.batch_size=48",
    ]
    config = load(["model=pretrained", "env=corridor", *settings])
    memory = psutil.virtual_memory()._replace(available=free)
    psutil.virtual_memory = lambda: memory
    noted(PolicyModel, "from_pretrained", output, f"reads {ranks.rank}", before=True)
    noted(Ranks, "cut", output, f"has the policy {ranks.rank}", before=False)
    if "refused" in words and ranks.is_main:
        PolicyModel.check = refuse  # type: ignore[method-assign]
    try:
        model = make_model(config, Origin(0, 0, None, None, is_lost=False), ranks)
        noted(PolicyModel, "to", output, f"has the reference {ranks.rank}", before=False)
        Scorers(config, model, ranks)
        end = str(sum(p.numel() for p in model.lm.parameters()))
    except ModelRefused as error:
        end = f"refused: {error}"
    (output / f"end-{ranks.rank}").write_text(end)
    ranks.barrier()
    ranks.close()


def refuse(model: PolicyModel, max_length: int) -> float:
    raise ModelRefused("packed rows are computed wrongly")


def noted(kind: Any, name: str, output: Path, line: str, before: bool) -> None:
    """Note each call of a method in the file, before it begins or after it ends."""
    method = getattr(kind, name)

    def call(*arguments: Any, **options: Any) -> Any:
        result = None if before else method(*arguments, **options)
        with (output / "notes").open("a") as file:
            file.write(line + "\n")
        return method(*arguments, **options) if before else result

    setattr(kind, name, call)
