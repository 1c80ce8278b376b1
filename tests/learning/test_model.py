"""The packed policy against a plain Hugging Face model that sees one row at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from impala_llm.engines.base import ModelRefused
from impala_llm.engines.embedded.model_weights import SAFETENSORS_NAMES
from impala_llm.learning.policy.model import PolicyModel
from impala_llm.learning.policy_export import PolicyExport
from impala_llm.learning.ranks.parallel import Ranks
from tests.learning.builders import ARCHITECTURES, VOCABULARY, WITH_EXPERTS, save_lm

LENGTHS = [5, 33, 1, 64, 17, 32]


def packed_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    return tokens, torch.cat([torch.arange(n) for n in LENGTHS]), torch.tensor(LENGTHS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_rows_equal_separate_plain_forwards_and_their_gradients(tmp_path: Path, architecture: str) -> None:
    save_lm(tmp_path, architecture)
    model = PolicyModel.from_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens, positions, lengths = packed_rows()
    weights = torch.randn(len(tokens), VOCABULARY, generator=torch.Generator().manual_seed(2)) / len(tokens)

    logits = model.logits(model.hidden(tokens, positions, lengths))
    expected = torch.cat([plain(row[None]).logits[0] for row in tokens.split(LENGTHS)])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = dict(model.lm.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_a_row_does_not_see_its_neighbours(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    tokens, positions, lengths = packed_rows()
    changed = tokens.clone()
    changed[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] += 1
    changed %= VOCABULARY
    with torch.no_grad():
        before = model.hidden(tokens, positions, lengths).split(LENGTHS)
        after = model.hidden(changed, positions, lengths).split(LENGTHS)
    for row, (one, other) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(one, other) == (row != 1)


def test_plain_calls_are_refused(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    with pytest.raises(ValueError, match=r"PolicyModel\.hidden"):
        model.lm(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("value_hidden_size", [0, 8])
def test_the_value_head_starts_at_zero_and_shapes_the_trunk_only_on_request(
    tmp_path: Path, value_hidden_size: int
) -> None:
    save_lm(tmp_path)
    for trunk_gradient in (False, True):
        model = PolicyModel.from_pretrained(tmp_path, value_hidden_size, trunk_gradient)
        hidden = model.hidden(*packed_rows())
        values = model.values(hidden)
        assert values.shape == (sum(LENGTHS),) and not values.any()
        # a head of zeros passes nothing on: move it away from them first
        torch.nn.init.ones_(model.value_head[-1].weight)
        model.values(hidden).sum().backward()
        assert model.value_head[-1].weight.grad is not None
        assert any(p.grad is not None and bool(p.grad.any()) for p in model.lm.parameters()) == trunk_gradient


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *WITH_EXPERTS])
def test_policy_tensors_are_what_save_pretrained_writes(tmp_path: Path, architecture: str, tied: bool) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path / "start", architecture, tied))
    model.lm.save_pretrained(tmp_path / "saved")
    tensors = PolicyExport(model, Ranks("cpu")).tensors()
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert set(tensors) == set(file.keys())
        for name, (dtype, shape, data) in tensors.items():
            written = file.get_tensor(name)
            assert dtype == SAFETENSORS_NAMES[written.dtype] == "F32"
            assert shape == tuple(written.shape)
            assert isinstance(data, np.ndarray)
            assert data.tobytes() == written.numpy().tobytes()


def test_weights_that_lie_otherwise_in_memory_are_written_where_they_are_wanted(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path))
    name, parameter = next((name, p) for name, p in model.lm.named_parameters() if p.ndim == 2)
    rows = parameter.detach().clone()
    parameter.data = rows.T.contiguous().T
    dtype, shape, write = PolicyExport(model, Ranks("cpu")).tensors()[name]
    assert callable(write) and shape == tuple(rows.shape)
    target = np.zeros(rows.nbytes, np.uint8)
    write(target)
    assert target.tobytes() == rows.numpy().tobytes()


def test_the_value_head_is_as_wide_as_the_policy_where_nothing_is_said(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path), value_hidden_size=None)
    width = model.lm.config.hidden_size
    assert [tuple(p.shape) for p in model.value_head.parameters()] == [(width, width), (width,), (1, width), (1,)]


def test_saved_and_loaded_policies_agree(tmp_path: Path) -> None:
    model = PolicyModel.from_pretrained(save_lm(tmp_path / "start"), value_hidden_size=8)
    torch.nn.init.ones_(model.value_head[-1].weight)
    model.save(tmp_path / "saved", {"tokenizer.json": b"{}"})
    loaded = PolicyModel.from_pretrained(tmp_path / "saved", value_hidden_size=8)
    rows = packed_rows()
    with torch.no_grad():
        hidden, again = model.hidden(*rows), loaded.hidden(*rows)
        assert torch.equal(hidden, again)
        assert torch.equal(model.values(hidden), loaded.values(again))
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == b"{}"
    # what others read holds the policy alone, and runs without our attention
    assert not any("value" in name for name in load_file(tmp_path / "saved" / "model.safetensors"))
    assert "impala" not in (tmp_path / "saved" / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(rows[0][None])


def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    weights = save_lm(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelRefused, match=f"the model {tmp_path} cannot be loaded .*Safetensor"):
        PolicyModel.from_pretrained(tmp_path)


def without(directory: Path, word: str) -> Path:
    """Take the tensors with a word in their names out of a model's files."""
    weights = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if word not in name}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("tied", "word", "named"),
    [
        (True, "layers.0", r"model.layers.0.input_layernorm.weight, .* and 8 more"),
        (True, "model.norm", "model.norm.weight;"),
        (True, "embed_tokens", "lm_head.weight, model.embed_tokens.weight;"),
        (False, "lm_head", "lm_head.weight;"),
    ],
)
def test_a_checkpoint_that_lacks_weights_is_refused_and_no_random_ones_are_trained(
    tmp_path: Path, tied: bool, word: str, named: str
) -> None:
    directory = without(save_lm(tmp_path, tied=tied), word)
    with pytest.raises(ModelRefused, match=f"model.path={directory} lacks weights of a Qwen3ForCausalLM, .*: {named}"):
        PolicyModel.from_pretrained(directory)


def test_a_reward_model_is_no_policy(tmp_path: Path) -> None:
    """It has all layers, and another head."""
    save_lm(tmp_path / "lm", "llama", tied=False)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1).save_pretrained(
        tmp_path / "reward"
    )
    with pytest.raises(ModelRefused, match="lm_head.weight; .*set algorithm.reference"):
        PolicyModel.from_pretrained(tmp_path / "reward", key="algorithm.reference")


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *WITH_EXPERTS])
@pytest.mark.parametrize("tied", [True, False])
def test_whole_checkpoints_are_taken_in_bfloat16_too(tmp_path: Path, architecture: str, tied: bool) -> None:
    lm = AutoModelForCausalLM.from_pretrained(save_lm(tmp_path / "lm", architecture, tied), dtype=torch.bfloat16)
    lm.save_pretrained(tmp_path / "bfloat16")
    assert PolicyModel.from_pretrained(tmp_path / "bfloat16").lm.dtype == torch.float32


def test_weights_do_not_change_with_the_file_that_they_came_from(tmp_path: Path) -> None:
    """A file in float32 would be mapped: copying another model over it would replace what was trained."""
    file = save_lm(tmp_path) / "model.safetensors"
    model = PolicyModel.from_pretrained(tmp_path)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
