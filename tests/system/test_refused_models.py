"""A model that cannot be computed ends the run in a sentence, wherever that is found."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Mamba2Config

from impala_llm.learning.scratch import make_scratch_policy
from tests.system.runs import Run


@pytest.mark.system
def test_a_kind_that_nobody_has_tried_is_refused_when_it_starts_and_not_again_and_again(tmp_path: Path) -> None:
    model = make_scratch_policy(tmp_path / "model")
    vocabulary = len(AutoTokenizer.from_pretrained(model))
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    with Run(tmp_path / "run", "experiment=toy", f"model.path={model}") as run:
        assert run.train().wait(120) == 2, run.printed()
        run.assert_gone()
        assert f"the model {model} (mamba2)" in run.log.read_text()
        assert "docs/engines.md" in run.log.read_text()
