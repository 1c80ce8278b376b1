"""A second pass over the same trajectories meets the same layout: ratios are 1 to the last bit."""

from pathlib import Path

import torch

from impala_llm.learning.packing import pack
from impala_llm.learning.policy.model import PolicyModel
from tests.learning.builders import make_batch, save_lm


def test_the_same_packing_twice_has_ratios_of_exactly_one(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))

    def log_probs() -> torch.Tensor:
        taken = []
        for batch in pack(make_batch(), token_budget=50):
            hidden = model.hidden(batch.tokens, batch.position_ids, batch.lengths)[batch.action_positions - 1]
            taken.append(model.action_log_probs(hidden, batch.tokens[batch.action_positions], 0.7)[0])
        return torch.cat(taken)

    assert ((log_probs() - log_probs().detach()).exp() == 1.0).all()
