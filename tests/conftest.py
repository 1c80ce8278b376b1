"""What every test gets: one thread a process, no network, and a tiny random policy on request."""

import os

# Before torch is imported, and inherited by the processes that system tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: random Qwen3 (hidden 64, 2 layers), tokenizer of 100 characters. Read only."""
    from tests.helpers import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))
