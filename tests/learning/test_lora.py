"""Adapters beside the policy's weights: what they change, what leaves the learner, and what is left without them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from impala_llm.algorithms.losses import Reinforce
from impala_llm.engines.base import ModelRefused
from impala_llm.learning.optim import Optimizer
from impala_llm.learning.packing import pack
from impala_llm.learning.policy.lora import add_adapters, load_adapters, without_adapters, without_prefix
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.learning.scoring import Scorers, action_log_probs
from impala_llm.settings import LearnerConfig, LoraConfig
from tests.learning.builders import make_batch, make_config, save_lm

TOKENS, POSITIONS, LENGTHS = torch.arange(12), torch.arange(12), torch.tensor([12])


def adapted(directory: Path, **options: object) -> PolicyModel:
    """A policy whose adapters have learned something."""
    model = PolicyModel.from_pretrained(directory)
    add_adapters(model.lm, LoraConfig(**{"rank": 4, **options}))  # type: ignore[arg-type]
    torch.manual_seed(1)
    for p in model.lm.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    return model


@torch.no_grad()
def logits(model: PolicyModel) -> torch.Tensor:
    return model.logits(model.hidden(TOKENS, POSITIONS, LENGTHS))


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_what_is_saved_is_the_policy_without_and_with_peft(tmp_path: Path, architecture: str) -> None:
    from peft import PeftModel  # here: it takes a second, in every run of the tests

    start = save_lm(tmp_path / "start", architecture)
    model = adapted(start, targets=["q_proj", "o_proj"] if "moe" in architecture else ["all-linear"])
    PolicyExport(model, Ranks("cpu")).save(tmp_path / "saved", {})
    merged = PolicyModel.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=1e-4)
    lm = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(start), tmp_path / "saved" / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(lm(input_ids=TOKENS[None]).logits[0], logits(model), atol=1e-4, rtol=1e-4)


def test_the_policy_without_its_adapters_is_the_reference(tmp_path: Path) -> None:
    start = save_lm(tmp_path)
    model = adapted(start)
    config = make_config(None, Reinforce(), kl_coef=0.1)
    config.model.path = "nowhere: no second model is loaded"
    micro = pack(make_batch(), 1000)[0]
    found = Scorers(config, model, Ranks("cpu")).scores(micro).reference
    torch.testing.assert_close(found, action_log_probs(PolicyModel.from_pretrained(start), micro, 1.0))
    before = logits(model)
    with without_adapters(model.lm):
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


def test_adapters_begin_as_nothing_and_alone_learn(tmp_path: Path) -> None:
    start = PolicyModel.from_pretrained(save_lm(tmp_path))
    model = PolicyModel.from_pretrained(tmp_path)
    add_adapters(model.lm, LoraConfig(rank=2, targets=["q_proj", "v_proj"]))
    assert torch.equal(logits(model), logits(start))
    optimizer = Optimizer(model, LearnerConfig(warmup_updates=0))
    hidden = model.hidden(TOKENS, POSITIONS, LENGTHS)
    (model.logits(hidden).square().sum() + model.values(hidden).sum()).backward()
    optimizer.step(0, 0.0)
    learning = {name.rsplit(".", 1)[0] for name in optimizer.state_dict()}
    of_matrix = "lm.model.layers.{}.self_attn.{}.lora_{}.default.weight"
    pairs = {of_matrix.format(layer, name, part) for layer in (0, 1) for name in ("q_proj", "v_proj") for part in "AB"}
    assert learning == pairs | {"value_head.0.weight", "value_head.0.bias"}
    assert not torch.equal(logits(model), logits(start))


def test_what_lies_beside_a_version_restores_the_adapters_and_the_value_head(tmp_path: Path) -> None:
    model = adapted(save_lm(tmp_path))
    torch.nn.init.constant_(model.value_head[-1].bias, 2.0)
    content = PolicyExport(model, Ranks("cpu")).beside()
    other = PolicyModel.from_pretrained(tmp_path)
    add_adapters(other.lm, LoraConfig(rank=4))
    assert other.load_value_head(content) and load_adapters(other.lm, without_prefix(content)[1])
    assert torch.equal(logits(other), logits(model)) and other.value_head[-1].bias.item() == 2.0
    of_another_rank = PolicyModel.from_pretrained(tmp_path)
    add_adapters(of_another_rank.lm, LoraConfig(rank=2))
    assert not load_adapters(of_another_rank.lm, without_prefix(content)[1])


@pytest.mark.parametrize(
    ("architecture", "targets", "reason"),
    [
        ("qwen3", ["q_prj", "k_proj"], "cannot be used: the model has no q_prj: name some of q_proj, k_proj, v_proj, "),
        ("qwen3", ["k_proj", "q_prj"], "the model has no q_prj: .*down_proj, or set model.lora.targets=.all-linear"),
        ("qwen3_moe", ["all-linear"], "experts, which is no matrix"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(
    tmp_path: Path, architecture: str, targets: list[str], reason: str
) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path, architecture))
    with pytest.raises(ModelRefused, match=f"model.lora.targets=.*{targets[0]}.*{reason}"):
        add_adapters(model.lm, LoraConfig(rank=2, targets=targets))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_adapters_of_embeddings_are_refused(tmp_path: Path, name: str, tied: bool) -> None:
    """Engines would never get those of the input, and those of the output would never learn."""
    model = PolicyModel.from_pretrained(save_lm(tmp_path, tied=tied))
    with pytest.raises(
        ModelRefused, match=rf"model.lora.targets=\['q_proj', '{name}'\] would adapt .*{name}, .*: leave"
    ):
        add_adapters(model.lm, LoraConfig(rank=2, targets=["q_proj", name]))
