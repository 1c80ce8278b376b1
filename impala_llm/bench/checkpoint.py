"""Cost to the learner of a checkpoint of weights and moments, beside what torch has for it.

A model of the shape of SmolLM2-135M with random weights takes optimizer steps on a row, one thread. A block of steps
with a checkpoint that begins after the first of them is compared with a block without one, in turns, in an order that
rotates; what the block takes longer is the cost: waiting, and what the writing in the background takes from the steps.
Writing that outlasts the block ends before the next block begins, off the clock.

    ours            Checkpointer: copied while the next batch is computed, written by a thread with CRCs and fsync,
                    weights as a plain Hugging Face export
    torch_save      torch.save of both state dicts, which the learner waits for; without fsync
    async_save      torch.distributed.checkpoint.async_save of both with its defaults: copied before it returns, written
                    by a thread; neither a stager that is kept nor a process that writes was tried

Figures: `share_<contender>`, the cost over a minute, that is for one checkpoint a minute, of which `share_ours` is the
main one; `cost_s_<contender>`, seconds; `ratio_<peer>`, its cost over ours, and `ratio_worst`, the smallest of these.
All are medians over the rounds. Rows: seconds of each contender's blocks, of the wait for what was left to write, and
bytes on the disk.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from impala_llm.bench.frame import BenchError, whole_number

OPTIONS = {
    "layers": "layers of the model; default 30, which makes 135 M parameters",
    "tokens": "tokens of a step; default 64",
    "steps": "steps of a block; default 6",
    "rounds": "measured rounds; default 3",
    "folder": "where checkpoints go; default: the folder for temporary files",
}
_LEAST_S = 1e-3
"""Costs below are noise, and count as this."""


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measure; see the module for figures and rows. BenchError where an option is malformed."""
    layers = whole_number("layers", options.get("layers", 30))
    tokens = whole_number("tokens", options.get("tokens", 64), least=2)
    steps = whole_number("steps", options.get("steps", 6), least=2)
    rounds = whole_number("rounds", options.get("rounds", 3))
    with tempfile.TemporaryDirectory(prefix="impala_llm-bench-", dir=options.get("folder")) as folder:
        times = measure(Path(folder), layers, tokens, steps, rounds)
    return figures_of(times), rows_of(times)


Times = dict[str, list[tuple[float, float, float]]]
"""Contender -> (seconds of a block, seconds until all was written, bytes written) of each round."""


class Training:
    """A model that takes steps, and its checkpoints: what begins one returns a function that waits until it is written.

    Args:
        folder: for the checkpoints.
        layers: of the model.
        num_tokens: of a step.
    """

    def __init__(self, folder: Path, layers: int, num_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        from impala_llm.learning.checkpoints.writer import Checkpointer
        from impala_llm.learning.optim import Optimizer
        from impala_llm.learning.policy.attention import SEGMENTS
        from impala_llm.learning.policy.model import PolicyModel
        from impala_llm.settings import LearnerConfig

        torch.set_num_threads(1)
        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        self.folder = folder
        self.model = PolicyModel(AutoModelForCausalLM.from_config(shape, attn_implementation=SEGMENTS))
        self.optimizer = Optimizer(self.model, LearnerConfig(warmup_updates=0))
        self.checkpointer = Checkpointer(folder / "ours", num_kept=1)
        self.row = torch.randint(0, shape.vocab_size, (num_tokens,))
        self.positions, self.lengths = torch.arange(num_tokens), torch.tensor([num_tokens])
        self.num_steps = 0

    def step(self) -> None:
        """Take an optimizer step."""
        hidden = self.model.hidden(self.row, self.positions, self.lengths)
        log_probs, _ = self.model.action_log_probs(hidden[:-1], self.row[1:], 1.0)
        (self.model.values(hidden).square().mean() - log_probs.mean()).backward()
        self.checkpointer.wait_until_copied()
        self.optimizer.step(self.num_steps, progress=0.0)
        self.num_steps += 1

    def contenders(self) -> dict[str, Callable[[], Callable[[], object]]]:
        """Ways to begin a checkpoint, by name; the first one writes none."""
        return {
            "none": lambda: lambda: None,
            "ours": self.ours,
            "torch_save": self.torch_save,
            "async_save": self.async_save,
        }

    def ours(self) -> Callable[[], object]:
        from impala_llm.learning.checkpoints.writer import RankState, tensors_of

        tensors = tensors_of(self.model, self.optimizer, is_main=True)
        policy, files = dict(self.model.policy_weights()), self.model.config_files({})
        if not self.checkpointer.save(
            RankState(self.num_steps, self.num_steps, 1, 0.0, {}, {}, tensors, policy, files)
        ):
            raise BenchError("the last checkpoint is still being written: give more --steps")

        def wait() -> None:
            if not self.checkpointer.wait():
                raise BenchError("a checkpoint could not be written: the end of the output above says why")

        return wait

    def torch_save(self) -> Callable[[], object]:
        import torch

        torch.save(self._states(), self.folder / "torch.pt")
        return lambda: None

    def async_save(self) -> Callable[[], object]:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        future: Any = async_save(self._states(), checkpoint_id=str(self.folder / "dcp"), no_dist=True)
        wait: Callable[[], object] = future.result
        return wait

    def _states(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def measure(folder: Path, layers: int, tokens: int, num_steps: int, num_rounds: int) -> Times:
    """Take blocks of steps with each contender, and without a checkpoint, in turns; the first round does not count."""
    training = Training(folder, layers, tokens)
    contenders = training.contenders()
    times: Times = {name: [] for name in contenders}
    names = list(contenders)
    for round_number in range(num_rounds + 1):
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            began = time.perf_counter()
            training.step()
            wait = contenders[name]()
            for _ in range(num_steps - 1):
                training.step()
            block_s = time.perf_counter() - began
            wait()
            written_s = time.perf_counter() - began
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if round_number:
                times[name].append((block_s, written_s, float(size)))
    return times


def figures_of(times: Times) -> dict[str, float]:
    """The figures, from the times of all contenders and of blocks without a checkpoint."""
    peers = [name for name in times if name not in ("none", "ours")]
    cost = {
        name: max(
            _LEAST_S,
            statistics.median(mine[0] - alone[0] for mine, alone in zip(times[name], times["none"], strict=True)),
        )
        for name in ("ours", *peers)
    }
    ratios = {f"ratio_{name}": cost[name] / cost["ours"] for name in peers}
    return {
        "share_ours": cost["ours"] / 60,
        "ratio_worst": min(ratios.values()),
        **ratios,
        **{f"cost_s_{name}": value for name, value in cost.items()},
        **{f"share_{name}": cost[name] / 60 for name in peers},
    }


def rows_of(times: Times) -> list[dict[str, Any]]:
    """The rows, a contender each."""
    rows = []
    for name, rounds in times.items():
        blocks = [block_s for block_s, _, _ in rounds]
        rows.append(
            {
                "contender": name,
                "block_s": statistics.median(blocks),
                "least_s": min(blocks),
                "most_s": max(blocks),
                "left_to_write_s": statistics.median(written_s - block_s for block_s, written_s, _ in rounds),
                "megabytes": statistics.median(size for _, _, size in rounds) / 1e6,
            }
        )
    return rows
