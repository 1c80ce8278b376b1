"""The starting policy that `model.path` names."""

import json
from pathlib import Path

import pytest

from impala_llm.config import load
from impala_llm.learning.policy.model_files import policy_files
from impala_llm.learning.policy.policy_files import resolve_policy


@pytest.mark.parametrize(
    ("change", "key", "expected"), [("hidden_size", "hidden_size", 32), ("num_layers", "num_hidden_layers", 1)]
)
def test_a_policy_from_scratch_has_the_shape_of_the_settings(
    tmp_path: Path, change: str, key: str, expected: int
) -> None:
    """An earlier command left one of another shape in the folder, and no metrics, by which it would be a run's."""
    settings = ["experiment=toy", "model=scratch", f"run.dir={tmp_path}"]
    before = resolve_policy(load(settings))
    directory = resolve_policy(load([*settings, f"model.scratch.{change}={expected}"]))
    assert json.loads((directory / "config.json").read_text())[key] == expected
    assert resolve_policy(load(settings)) == before != directory


def test_an_index_of_other_weights_is_not_taken_over(tmp_path: Path) -> None:
    kinds = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")
    for name in ("config.json", "tokenizer.json", *(f"{kind}.index.json" for kind in kinds)):
        (tmp_path / name).write_text("{}")
    assert policy_files(tmp_path).keys() == {"config.json", "tokenizer.json"}
