"""The files that count as the weights of a Hugging Face directory."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from impala_llm.engines.base import EngineError
from impala_llm.engines.sglang.weight_update import read_layout


def save(path: Path, **shapes: tuple[int, ...]) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path)


def test_only_files_that_are_named_as_a_models_weights_count_beside_others(tmp_path: Path) -> None:
    save(tmp_path / "model-00001-of-00002.safetensors", a=(2, 3))
    save(tmp_path / "model-00002-of-00002.safetensors", b=(4,))
    save(tmp_path / "value_head.safetensors", c=(5,))
    assert read_layout(tmp_path) == {"a": (2, 3), "b": (4,)}


def test_weights_of_any_name_count_where_none_is_named_as_a_models(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.safetensors", a=(2, 3))
    assert read_layout(tmp_path) == {"a": (2, 3)}


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_tied_embeddings_is_left_out(tied: bool, tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", **{"embed": (2, 3), "lm_head.weight": (2, 3)})
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    assert ("lm_head.weight" in read_layout(tmp_path)) is not tied


def test_a_directory_without_weights_or_with_cut_ones_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"{tmp_path}: no "):
        read_layout(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(EngineError, match="cannot read .*model.safetensors"):
        read_layout(tmp_path)
