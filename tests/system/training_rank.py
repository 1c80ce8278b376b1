"""One rank of `test_sharding`: trains on its share of the same batch five times, and writes down what came of it.

Its words: POLICY_DIRECTORY OUTPUT_DIRECTORY [SETTING ...]

By rank: `facts-<rank>.json`, and from rank 0 `parameters`, whole, after the steps. With `resume=FILE` the optimizer
goes on from the moments in it, and with `keep=FILE` they are written there. Where ranks share the policy they also save
it in `saved`, and publish it on a board, `board`, in bfloat16: version 1 early, for the last rank. With `infinite=1`
the last rank has an episode with infinite rewards in its second update.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from impala_llm.config import load
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.lora import add_adapters
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.publishing import VersionPublisher
from impala_llm.learning.ranks.parallel import Ranks, local
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader
from impala_llm.trainer import Trainer
from tests.learning.builders import make_batch, make_trajectory

UPDATES = 5


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def take(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """Fill a target with a whole tensor, or with its share of it."""
    if isinstance(target, DTensor):
        tensor = distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(tensor)


@contextmanager
def counted_passes(model: PolicyModel) -> Iterator[list[int]]:
    """Counts the passes through the policy."""
    counts = [0]

    def count(*_: object) -> None:
        counts[0] += 1

    handle = model.register_forward_pre_hook(count)
    yield counts
    handle.remove()


def with_infinite_return(batch: Batch) -> Batch:
    """The batch with an episode whose rewards add up to infinity."""
    first, *others = batch.trajectories
    rewards = np.where(first.action_mask, np.float32(3e38), np.float32(0))
    return replace(batch, trajectories=(replace(first, rewards=rewards), *others))


class Receiver:
    """A receiver that gets nothing without a newer version, or gets all that it wants."""

    def __init__(self, needs: bool) -> None:
        self.needs = needs
        self.early: list[int] = []

    def needs_weights(self) -> bool:
        return self.needs

    def announce_late(self, version: int) -> None:
        self.early.append(version)


def publish(ranks: Ranks, model: PolicyModel, output: Path) -> dict[str, object]:
    boards = [WeightPublisher(output / name) for name in ("board", "kept")]
    publisher = VersionPublisher(ranks, model, *boards, interval=3, max_staleness=2, dtype=torch.bfloat16)
    publisher.begin(0)
    waits = ranks.leads and ranks.rank == ranks.world_size - 1
    receiver: Any = Receiver(waits)
    with WeightReader(output / "board").lease(0) if ranks.is_main else nullcontext():
        while waits and not receiver.early:
            publisher.publish_early(1, receiver, lambda: False)
        publisher.wait_for_ranks(1, receiver, lambda: False)
    publisher.export.save(output / "saved", {})
    return {"early": receiver.early}


def main(arguments: list[str]) -> None:
    policy, output, words = Path(arguments[0]), Path(arguments[1]), arguments[2:]
    torch.set_num_threads(1)
    files = {
        key: Path(path) for key, path in (word.split("=", 1) for word in words if word[:4] in ("keep", "resu", "infi"))
    }
    width = next((int(word.split("=")[1]) for word in words if word.startswith("learner.tensor_parallel=")), 1)
    num_ranks = int(os.environ["WORLD_SIZE"]) // width
    settings = [word for word in words if word.split("=")[0] not in files]
    config = load(
        ["model=scratch", "algorithm=ppo", f"learner.num_ranks={num_ranks}", "learner.warmup_updates=0", *settings]
    )
    config.model.path = str(policy)
    if config.learner.token_budget != "auto":
        config.learner.token_budget = 44  # many micro-batches, unlike in number between ranks
    how = config.learner.sharding, config.learner.cpu_offload, config.learner.tensor_parallel
    ranks = Ranks("cpu", 60.0, *how)
    torch.manual_seed(0)
    model = PolicyModel.from_pretrained(policy, value_trunk_gradient=True)
    add_adapters(model.lm, config.model.lora)
    ranks.place(model, config.learner.precision)
    episodes = [*make_batch(), *(make_trajectory(38, [(4, 9), (20, 36)], seed) for seed in range(6, 12))]
    share = episodes[ranks.rank * len(episodes) // num_ranks : (ranks.rank + 1) * len(episodes) // num_ranks]
    batch = Batch(tuple(share), (1.0,) * len(share), tuple(t.ticket_id for t in share), 1.0)
    trainer = Trainer(config, ranks, model)
    if "resume" in files:
        moments = load_file(files["resume"])
        trainer.optimizer.load(lambda name, tensor: take(moments[name], tensor))
    rows: list[dict[str, float]] = []
    with counted_passes(model) as passes:
        for update in range(UPDATES):
            is_bad = "infinite" in files and update == 1 and ranks.rank == num_ranks - 1
            trainer.update(with_infinite_return(batch) if is_bad else batch, 3 + update, progress=0.0)
            rows.append(trainer.log.flush())
    state = trainer.optimizer.state_dict()
    held = [*model.parameters(), *(tensor for name, tensor in state.items() if not name.endswith(".step"))]
    facts: dict[str, object] = {
        "passes": passes[0],
        "num_bytes": sum(local(tensor).nbytes for tensor in held),
        "skipped": [row["optimizer/skipped"] for row in rows],
        "not_finite": [row["optimizer/not_finite"] for row in rows],
    }
    if ranks.is_sharded:
        facts |= publish(ranks, model, output)
    (output / f"facts-{ranks.process}.json").write_text(json.dumps(facts))
    parameters = {name: whole(p) for name, p in model.named_parameters()}
    moments = {name: whole(tensor) for name, tensor in state.items()}
    if ranks.is_main:
        save_file(parameters, output / "parameters")
        if "keep" in files:
            save_file(moments, files["keep"])
    ranks.close()
