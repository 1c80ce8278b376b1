"""Token generators by name."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from impala_llm.engines.base import Engine, EngineError, EngineSetup
from impala_llm.part_signatures import missing_methods
from impala_llm.plugs import ENGINES, load
from impala_llm.settings import Config


def make_engine(
    config: Config,
    policy: Path,
    version: int,
    index: int | None = None,
    weights: Any = None,
    server_key: str | None = None,
) -> Engine:
    """Make the engine that `engine.name` names, for what `EngineSetup` describes. Then `await start()` it.

    Args:
        index: of the actor on this host, which gets its share of `engine.urls`; None: no actor, which gets all of them.

    Raises:
        EngineError: what was made lacks methods of an engine.
    """
    import torch

    if index is not None and config.engine.urls is not None:
        # No two actors of a command have the same share: their indices follow one another.
        number = max(1, config.num_actors)
        config = replace(config, engine=replace(config.engine, urls=config.engine.urls[index % number :: number]))
    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    engine: Engine = load(ENGINES, config.engine.name)(
        EngineSetup(config, policy, version, device, index or 0, weights, server_key)
    )
    if missing := missing_methods(engine, Engine):
        raise EngineError(
            f"engine.name={config.engine.name} has no method {' and no '.join(missing)}: add what is missing"
        )
    return engine


def torch_engine(setup: EngineSetup) -> Engine:
    """Make the embedded engine."""
    import torch

    from impala_llm.engines.embedded.engine import TorchEngine

    return TorchEngine.from_pretrained(
        setup.policy,
        version=setup.version,
        dtype=getattr(torch, setup.config.engine.dtype),
        device=setup.device,
        max_sessions=setup.config.actor.max_episodes,
        max_length=setup.config.engine.max_length,
    )


def sglang_engine(setup: EngineSetup) -> Engine:
    """Make an engine of SGLang servers: those of `engine.urls`, or one that it starts."""
    from transformers import AutoConfig

    from impala_llm.engines.sglang.engine import SGLangEngine
    from impala_llm.engines.sglang.external_server import find_servers
    from impala_llm.engines.sglang.launch_args import ServerSettings, find_python
    from impala_llm.engines.sglang.server import SGLangServer

    config, engine, policy = setup.config, setup.config.engine, setup.policy
    servers: Any
    if engine.urls is not None:
        servers = partial(find_servers, engine.urls, engine.start_timeout_s)
    else:
        settings = ServerSettings(
            model=policy,
            log=Path(config.run.dir) / "logs" / f"sglang-{setup.index}.log",
            python=engine.python or find_python(),
            device="cuda" if setup.device == "cuda" else "cpu",
            dtype=engine.dtype,
            tensor_parallel=engine.tensor_parallel,
            max_length=engine.max_length,
            max_running=config.actor.max_episodes,
            memory_fraction=engine.memory_fraction,
            radix_cache=engine.prefix_cache,
            extra_arguments=tuple(engine.server_args),
            start_timeout_s=engine.start_timeout_s,
            **({} if setup.server_key is None else {"key": setup.server_key}),  # type: ignore[arg-type]
        )
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        servers = [SGLangServer(settings)]
    made = SGLangEngine(
        servers,
        vocab_size=AutoConfig.from_pretrained(policy).get_text_config().vocab_size,
        max_length=engine.max_length,
        version=setup.version,
        in_flight=engine.in_flight,  # type: ignore[arg-type]  # one of the choices of the setting
        weights=setup.weights,
        request_timeout_s=engine.request_timeout_s,
        is_fed=engine.transfer == "distributed",
    )
    if engine.urls is not None:
        made.weights.newest = (policy, setup.version)  # such a server may have any weights
    return made
