"""Seeded runs in one process, to check that a change leaves results equal to the last bit.

    tools/seeded_run.py [NAME ...]

Prints JSON: for each run the losses of every update and the SHA-256 of the final weights, value head included. On one
machine two runs of one tree are equal, and so is that of a tree in which code was only moved.

Without the pipeline: the embedded engine plays, the trainer trains. `toy_*`, `corridor_*` and `quickstart` are
on-policy (η = 0): each batch is played by the weights it trains. `reuse_*` train three times on a batch, so that ratios
differ from 1.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from impala_llm.config import load
from impala_llm.engines import make_engine
from impala_llm.envs import make_suite
from impala_llm.learning.batch_source import Batch
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy.policy_files import resolve_policy
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.rollout import ChatFormat, EpisodeLimits, EpisodeSpec, play_episode
from impala_llm.settings import Config
from impala_llm.trainer import Trainer

WATCHED = (
    "loss/policy", "loss/value", "loss/total", "loss/entropy", "loss/reference_kl", "optimizer/gradient_norm",
    "ratio/mean", "ratio/ess", "loss/clip_share", "ratio/rejected_share", "advantage/mean", "advantage/std",
    "value/explained_variance", "buffer/ess", "preference/margin_mean",
)  # fmt: skip
TOY = ("experiment=toy", "learner.warmup_updates=0", "algorithm.max_staleness=0")
CORRIDOR = ("experiment=corridor", "learner.warmup_updates=0", "algorithm.max_staleness=0")
REUSE = ("experiment=toy", "learner.warmup_updates=0", "learner.learning_rate=0.01", "algorithm.max_staleness=4")
LAGGED = ("experiment=corridor", "learner.warmup_updates=0", "learner.learning_rate=0.01", "algorithm.max_staleness=4")
RUNS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    # name: batches, updates on each, settings
    "toy_group_relative": (4, 1, TOY),
    "toy_ppo": (4, 1, (*TOY, "algorithm=ppo")),
    "corridor_vtrace": (4, 1, CORRIDOR),
    "quickstart": (4, 1, ("experiment=quickstart", "algorithm.max_staleness=0")),
    "reuse_truncated_is": (1, 3, REUSE),
    "reuse_sequence": (1, 3, (*REUSE, "algorithm.loss.level=sequence", "algorithm.loss.cap=2")),
    "reuse_reinforce": (1, 3, (*REUSE, "algorithm.loss=reinforce", "algorithm.kl_coef=0.1")),
    "reuse_cispo": (1, 3, (*REUSE, "algorithm.loss=cispo", "algorithm.credit=rloo", "algorithm.reject=token")),
    "reuse_gspo": (
        1, 3, (*REUSE, "algorithm.loss=gspo", "algorithm.loss.clip_low=0.2", "algorithm.loss.clip_high=0.28")
    ),
    "reuse_dpo": (1, 3, (*REUSE, "algorithm=dpo")),
    "reuse_distillation": (
        1, 3, (*REUSE, "algorithm.credit=distillation", "algorithm.credit.teacher_context=b", "algorithm.group_size=1")
    ),
    "reuse_ppo": (1, 3, (*LAGGED, "algorithm=ppo", "algorithm.probability_limit=0.1")),
    "reuse_decoupled": (1, 3, (*LAGGED, "algorithm=decoupled_ppo", "algorithm.credit.lam=0.9")),
    "reuse_vtrace_token": (
        1, 3, (
            *LAGGED, "algorithm.loss=truncated_is",
            "algorithm.credit.granularity=token", "algorithm.credit.dead_band=0.01",
        )
    ),
    "reuse_vtrace_product": (1, 3, (*LAGGED, "algorithm.credit.turn_ratio=product", "algorithm.credit.discount=0.9")),
}  # fmt: skip


async def play(config: Config, engine: Any, chat: ChatFormat, first_ticket: int) -> Batch:
    """The next batch of training tasks, in the order of the suite."""
    suite, size, group_size = make_suite(config.env), config.learner.batch_size, config.algorithm.group_size
    tasks = suite.tasks("train")
    limits = EpisodeLimits(config.engine.temperature, config.engine.max_new_tokens, config.engine.max_length)
    episodes = []
    for ticket in range(first_ticket, first_ticket + size):
        group = ticket // group_size
        task = tasks[group % len(tasks)]
        spec = EpisodeSpec(f"episode-{ticket}", task, group, ticket, ticket, suite.name, "actor", suite.signature(task))
        episodes.append(play_episode(spec, suite.session(True), engine, chat, limits))
    trajectories = await asyncio.gather(*episodes)
    return Batch(tuple(trajectories), (1.0,) * size, tuple(range(size)), 1.0)


async def train(config: Config, num_batches: int, updates_each: int) -> dict[str, Any]:
    """The metrics of each update, and the checksum of the weights after them."""
    policy = resolve_policy(config)
    model = PolicyModel.from_pretrained(policy, config.model.value_hidden_size, config.model.value_trunk_gradient)
    trainer = Trainer(config, Ranks("cpu"), model)
    engine = make_engine(config, policy, version=0)
    chat = ChatFormat(AutoTokenizer.from_pretrained(policy), make_suite(config.env).system_prompt)
    updates = []
    for number in range(num_batches):
        batch = await play(config, engine, chat, number * config.learner.batch_size)
        for version in range(number * updates_each, (number + 1) * updates_each):
            summary = trainer.update(batch, version, progress=0.0).metrics.flush()
            updates.append({name: summary[name] for name in WATCHED if name in summary})
        engine.load_state(model.lm.state_dict(), (number + 1) * updates_each)  # type: ignore[attr-defined]
    await engine.close()
    checksum = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        checksum.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return {"updates": updates, "sha256": checksum.hexdigest()}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run; all of them without a name")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in RUNS]:
        parser.error(f"{unknown[0]} is no run: choose of {', '.join(RUNS)}")
    disable_progress_bar()
    torch.set_num_threads(1)
    found = {}
    for name in names or RUNS:
        num_batches, updates_each, words = RUNS[name]
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(prefix="seeded-") as folder:
            config = load([*words, f"run.dir={folder}", "model.device=cpu"])
            found[name] = asyncio.run(train(config, num_batches, updates_each))
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
