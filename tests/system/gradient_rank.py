"""One rank of `test_parallel`: its share of a fixed batch, the reduced gradient, and what the collectives return.

Its words: POLICY_DIRECTORY OUTPUT_DIRECTORY
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from impala_llm.learning.objective import Denominators, Rows, Rules, objective
from impala_llm.learning.packing import pack
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.ranks import parallel
from impala_llm.learning.ranks.parallel import Ranks
from tests.learning.builders import make_batch, make_config


def main(words: list[str]) -> None:
    policy, output = map(Path, words)
    torch.set_num_threads(1)
    parallel.BUCKET = 1000  # numbers: some tensors together, others by themselves
    ranks = Ranks("cpu", timeout_s=60.0)
    model = PolicyModel.from_pretrained(policy, value_trunk_gradient=True)
    torch.nn.init.constant_(model.value_head[-1].weight, 0.1)
    with torch.no_grad():  # ranks start apart, the broadcast brings them together
        for parameter in model.parameters():
            parameter.add_(0.01 * ranks.rank)
    ranks.broadcast(model.parameters())

    share = make_batch()[ranks.rank :: ranks.world_size]
    counts = [sum(t.num_action_tokens for t in share), sum(len(t.turns) for t in share), len(share)]
    denominators = Denominators(*ranks.sum(counts))
    for batch in pack(share, token_budget=60):
        weights = torch.ones(len(batch.members))
        objective(make_config(), model, batch, Rows(weights), Rules(denominators, version=5)).loss.backward()
    ranks.sum_gradients(model)
    save_file({name: p.grad.clone() for name, p in model.named_parameters()}, output / f"gradient-{ranks.rank}")

    # a parameter that no rank but the first has a gradient for, and one that none has
    first, second = list(model.value_head.parameters())
    model.zero_grad(set_to_none=True)
    if ranks.is_main:
        first.grad = torch.full_like(first, 2.0)
    ranks.sum_gradients(model)
    missing = {
        "first": first.grad.unique().tolist(),
        "second": None if second.grad is None else second.grad.unique().tolist(),
    }
    gathered = ranks.gather({f"rank-{ranks.rank}": [float(ranks.rank), 1.0]})
    ranks.barrier()
    facts = {
        "rank": ranks.rank,
        "is_main": ranks.is_main,
        "counts": vars(denominators),
        "missing": missing,
        "gathered": gathered,
    }
    (output / f"facts-{ranks.rank}.json").write_text(json.dumps(facts))
    ranks.close()
