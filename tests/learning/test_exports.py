"""Exports of the learner: Hugging Face directories, whatever the policy came with."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from impala_llm.learning.policy.lora import add_adapters
from impala_llm.learning.policy.model import PolicyModel, policy_files
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.learning.ranks.parallel import Ranks
from impala_llm.pipeline.weights.board import WEIGHTS_FILE, WeightPublisher, WeightReader
from impala_llm.settings import LoraConfig
from tests.learning.builders import save_lm


def test_the_report_of_an_evaluation_is_no_file_of_a_policy(tmp_path: Path) -> None:
    """`policy-best` has it beside its weights; a run that begins there trains other weights."""
    best = save_lm(tmp_path / "policy-best")
    (best / "evaluation.json").write_text('{"evaluation/score": 0.91}')
    assert {"config.json"} <= set(policy_files(best)) <= {"config.json", "generation_config.json"}


@pytest.mark.system
@torch.no_grad()
def test_each_version_of_another_type_has_the_weights_of_its_step_wherever_they_lie(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path / "start"))
    strided = next(p for p in model.lm.parameters() if p.ndim == 2)
    strided.data = strided.T.contiguous().T
    export, board = PolicyExport(model, Ranks("cpu")), WeightPublisher(tmp_path / "board", 2)
    for version in range(4):
        for p in model.lm.parameters():
            if version == 2 and p is not strided:
                p.data = 3 * p.data  # in other memory
            else:
                p.mul_(1.5)
        board.publish(export.tensors(torch.bfloat16), version)
        with WeightReader(tmp_path / "board").lease(version) as lease:
            found = load_file(lease.path / WEIGHTS_FILE)
        expected = {name: p.to(torch.bfloat16) for name, p in model.lm.named_parameters()}
        assert found.keys() <= expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


SAMPLING = {"temperature": 0.9, "top_p": 0.6}
"""Without do_sample: transformers loads it, and refuses to save it."""


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_policy_with_settings_that_transformers_would_not_save_is_saved_with_them(
    tmp_path: Path, file: str, lora_rank: int
) -> None:
    start = save_lm(tmp_path / "start")
    if file == "config.json":  # from which transformers takes them where there is no other file
        (start / "generation_config.json").unlink()
    values = json.loads((start / file).read_text())
    (start / file).write_text(json.dumps(values | SAMPLING))
    model = PolicyModel.from_pretrained(start)
    add_adapters(model.lm, LoraConfig(rank=lora_rank))
    PolicyExport(model, Ranks("cpu")).save(tmp_path / "saved", policy_files(start))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.generation_config.to_dict() == model.lm.generation_config.to_dict()
    written = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert {name: written[name] for name in SAMPLING} == SAMPLING
    assert saved.config.architectures == ["Qwen3ForCausalLM"]
