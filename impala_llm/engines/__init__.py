"""Token generators by name."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from impala_llm.engines.base import Engine
from impala_llm.settings import Config


def make_engine(
    config: Config, policy: Path, version: int, index: int = 0, weights: Any = None, server_key: str | None = None
) -> Engine:
    """Make the engine that `engine.name` names, with the weights of a Hugging Face directory. Then `await start()` it.

    Args:
        version: policy version of those weights.
        index: of the actor on this host; it selects the log and the share of the configured servers.
        weights: source of the newest weights for a restarted server: `engine.WeightsSource`.
        server_key: API key of a server that is started; None: a new random one.
    """
    import torch

    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.engine.name == "sglang":
        return _sglang_engine(config, policy, version, index, weights, server_key, device)
    from impala_llm.engines.embedded.engine import TorchEngine

    return TorchEngine.from_pretrained(
        policy,
        version=version,
        dtype=getattr(torch, config.engine.dtype),
        device=device,
        max_sessions=config.actor.max_episodes,
        max_length=config.engine.max_length,
    )


def _sglang_engine(
    config: Config, policy: Path, version: int, index: int, weights: Any, server_key: str | None, device: str
) -> Engine:
    from impala_llm.engines.sglang.engine import SGLangEngine
    from impala_llm.engines.sglang.external_server import find_servers
    from impala_llm.engines.sglang.launch_args import ServerSettings, find_python
    from impala_llm.engines.sglang.server import SGLangServer

    engine = config.engine
    servers: Any
    if engine.urls is not None:
        own = engine.urls[index :: max(1, config.actor.num_actors)]
        servers = partial(find_servers, own, engine.start_timeout_s)
    else:
        settings = ServerSettings(
            model=policy,
            log=Path(config.run.dir) / "logs" / f"sglang-{index}.log",
            python=engine.python or find_python(),
            device="cuda" if device == "cuda" else "cpu",
            dtype=engine.dtype,
            tensor_parallel=engine.tensor_parallel,
            max_length=engine.max_length,
            max_running=config.actor.max_episodes,
            memory_fraction=engine.memory_fraction,
            radix_cache=engine.prefix_cache,
            extra_arguments=tuple(engine.server_args),
            start_timeout_s=engine.start_timeout_s,
            **({} if server_key is None else {"key": server_key}),
        )
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        servers = [SGLangServer(settings)]
    return SGLangEngine(
        servers,
        vocab_size=json.loads((policy / "config.json").read_text())["vocab_size"],
        max_length=engine.max_length,
        version=version,
        in_flight=engine.in_flight,  # type: ignore[arg-type]  # checked by config.py
        weights=weights,
        request_timeout_s=engine.request_timeout_s,
        is_fed=engine.transfer == "distributed",
    )
