"""Token generators by name."""

from pathlib import Path

from impala_llm.config import Config
from impala_llm.engines.base import Engine


def make_engine(config: Config, policy: Path, version: int) -> Engine:
    """The engine that `engine.name` means, with the weights of a Hugging Face directory.

    Args:
        version: policy version of those weights.
    """
    import torch

    from impala_llm.engines.torch_engine import TorchEngine

    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return TorchEngine.from_pretrained(
        policy,
        version=version,
        dtype=getattr(torch, config.engine.dtype),
        device=device,
        max_sessions=config.actor.max_episodes,
        max_length=config.engine.max_length,
    )
