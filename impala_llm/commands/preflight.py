"""Checks of this host before any process of a run exists: folders, files of the model, keys, ports, memory.

config.py looks at the settings alone; here they are held against this host. Each problem is a sentence with key, value
and fix. Those of model files stand in model_files.py, those of memory and disk in host_space.py. Nothing here imports
torch: a refusal takes about a second.
"""

import asyncio
import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from impala_llm.commands.host_space import actors_memory_problems, disk_problems, memory_problems
from impala_llm.commands.model_files import (
    adapter_problems,
    model_problems,
    other_model_problems,
    starting_policy_problems,
)
from impala_llm.config import ConfigError
from impala_llm.engines.sglang.launch_args import BadServerSettings, check_positions, check_python, find_python
from impala_llm.envs.webshop.hard_catalogue import check_limits
from impala_llm.gpus import visible_gpus
from impala_llm.hosts import TcpEndpoint, check_connect, rank_endpoint, resolve
from impala_llm.learning.checkpoints.resume import how_to_start
from impala_llm.observability.metrics import METRICS, MetricError, declarations
from impala_llm.pipeline.network.keys import KeyFileError, load_actor_keys, load_learner_keys
from impala_llm.pipeline.network.listener import check_known, try_to_listen
from impala_llm.pipeline.shm.run_directory import RunDirectoryError
from impala_llm.processes.compiled_code import VARIABLE as COMPILED_CODE
from impala_llm.processes.compiled_code import compiled_folder
from impala_llm.settings import Config, model_directory
from impala_llm.writable_folders import try_to_write

ADAPTERS = ("gymnasium", "reasoning_gym", "scienceworld", "textarena", "textworld", "verifiers")
"""Environments that have the name of the package, and of the extra, that they need."""

Checks = dict[str, Sequence[Callable[[Config], list[str]]]]
"""By the part that they look at. Each returns sentences with key, value and fix, none where all is well."""


def check_training(config: Config) -> None:
    """Before `impala-llm train`. Raises ConfigError with all that was found."""
    _raise_for(config, training_checks())


def check_actors(config: Config) -> None:
    """Before `impala-llm actors`. Raises ConfigError with all that was found."""
    _raise_for(config, actors_checks())


def check_evaluation(config: Config) -> None:
    """Before `impala-llm evaluate`. Raises ConfigError with all that was found."""
    # A policy from scratch, and the logs of a server, lie in the run's folder.
    writes = config.model.path == "scratch" or config.engine.name == "sglang"
    first = {
        "run folder": (_folder,) if writes else (),
        "model": (model_problems,),
        "environment": (_catalogue, _unseen_limits),
    }
    _raise_for(config, {**first, **_engine_checks()})


def check_recording(config: Config) -> None:
    """Before `impala-llm demonstrate`. Raises ConfigError with all that was found."""
    by_policy = config.demonstrations.player == "policy"
    catalogues = (_catalogues, _catalogue, _last_catalogue, _unseen_catalogue)
    first = {"player": (_no_agent,), "catalogues": catalogues, "model": (model_problems,)}
    _raise_for(config, {**first, **(_engine_checks() if by_policy else {})})


def check_warm_start(config: Config) -> None:
    """Before `impala-llm sft`. Raises ConfigError with all that was found."""
    _raise_for(config, {"model": (model_problems,), "device": (_device,), "compiler": (_compiler,)})


def _own_metrics(config: Config) -> list[str]:
    """Metrics of the credit or the loss that cannot be logged."""
    found, declared = [], dict(METRICS)
    for key, part in (("credit", config.algorithm.credit), ("loss", config.algorithm.loss)):
        try:
            declared |= declarations(key, part.metrics, declared)
        except MetricError as error:
            found.append(f"algorithm.{key}={part.name} cannot be used: {error}")
    return found


def training_checks() -> Checks:
    """For the host of `impala-llm train`."""
    return {
        "run folder": (_own_learner, _folder, _earlier_run),
        "algorithm": (_own_metrics,),
        "model": (starting_policy_problems, model_problems, adapter_problems, other_model_problems),
        "environment": (_catalogue, _unseen_catalogue, _unseen_at_end, _package, _task_file),
        **_engine_checks(),
        "keys": (_learner_keys,),
        "compiler": (_compiler,),
        "ports": (_ports,),
        "shared memory": (memory_problems,),
        "disk": (disk_problems,),
    }


def actors_checks() -> Checks:
    """For a host of `impala-llm actors`."""
    return {
        "run folder": (_folder,),
        "model": (model_problems,),
        "environment": (_package, _task_file),
        **_engine_checks(),
        "keys": (_actor_keys,),
        "ports": (_learner_host,),
        "shared memory": (actors_memory_problems,),
    }


def _engine_checks() -> Checks:
    return {"device": (_device,), "engine": (_sglang, _servers)}


def _raise_for(config: Config, checks: Checks) -> None:
    found = [problem for part in checks.values() for check in part for problem in check(config)]
    if found:
        raise ConfigError.of(found)


def _no_agent(config: Config) -> list[str]:
    if not config.agent.is_set:
        return []
    key = "name" if config.agent.name is not None else "command"
    return [
        f"agent.{key}={getattr(config.agent, key)}: no agent plays demonstrations, which are of env.name="
        f"{config.env.name}: leave the agent out (agent.{key}=null)"
    ]


def _catalogues(config: Config) -> list[str]:
    number = config.demonstrations.num_catalogues
    if number == 1 or (config.plays_shop and config.env.webshop.items is None):
        return []
    return [
        f"demonstrations.num_catalogues={number}: only WebShop without data files makes catalogues: set "
        "demonstrations.num_catalogues=1"
    ]


def _unseen_catalogue(config: Config) -> list[str]:
    shop, number = config.env.webshop, config.demonstrations.num_catalogues
    seen, seed = range(shop.catalogue_seed, shop.catalogue_seed + number), config.evaluation.unseen_seed
    if not config.plays_shop or shop.items is not None or seed not in seen:
        return []
    of_demonstrations = f" and demonstrations.num_catalogues={number}" if number > 1 else ""
    return [
        f"evaluation.unseen_seed={seed} is a catalogue that is learned from: env.webshop.catalogue_seed="
        f"{shop.catalogue_seed}{of_demonstrations}; set another seed, or evaluation.unseen_seed=null"
    ]


def _package(config: Config) -> list[str]:
    """The package of an adapter that is not installed. One that cannot be imported an actor finds: that takes long."""
    name = config.env.name
    if name not in ADAPTERS or config.agent.is_set or find_spec(name) is not None:
        return []
    extra = name.replace("_", "-")
    return [f"env.name={name} needs the package {name}, which is not installed: pip install 'impala-llm[{extra}]'"]


def _task_file(config: Config) -> list[str]:
    if config.env.name != "tasks" or config.agent.is_set:
        return []
    args = config.env.args
    file = args.get("file") if isinstance(args, dict) else getattr(args, "file", None)
    if file is None or Path(file).expanduser().is_file():
        return []
    return [f"env.args.file={file} is no file: give JSON lines, or a name that ends in .parquet"]


def _catalogue(config: Config) -> list[str]:
    """A hard catalogue of the tasks that cannot be made."""
    shop = config.env.webshop
    return [] if shop.items is not None else _beyond_limits(config, "env.webshop.catalogue_seed", shop.catalogue_seed)


def _unseen_limits(config: Config) -> list[str]:
    """An unseen hard catalogue that cannot be made. An evaluation plays it beside data files as well."""
    unseen = config.evaluation.unseen_seed
    if unseen is None or _catalogue(config):
        return []
    found = _beyond_limits(config, "evaluation.unseen_seed", unseen)
    return [f"{problem}, or evaluation.unseen_seed=null" for problem in found]


def _unseen_at_end(config: Config) -> list[str]:
    """The same where training ends with an evaluation: no other part of it plays the unseen catalogue."""
    return _unseen_limits(config) if config.evaluation.before_and_after else []


def _last_catalogue(config: Config) -> list[str]:
    """The last catalogue of a recording of several."""
    first, number = config.env.webshop.catalogue_seed, config.demonstrations.num_catalogues
    if number == 1 or config.env.webshop.items is not None or _catalogue(config):
        return []
    key = f"demonstrations.num_catalogues={number} ends at env.webshop.catalogue_seed"
    return _beyond_limits(config, key, first + number - 1)


def _beyond_limits(config: Config, key: str, seed: int) -> list[str]:
    shop = config.env.webshop
    if not config.plays_shop or shop.catalogue != "hard":
        return []
    try:
        check_limits(shop.num_products, seed, key)
    except ValueError as error:
        return [str(error)]
    return []


def _own_learner(config: Config) -> list[str]:
    pipeline = config.pipeline
    if pipeline.connect is None or pipeline.bind is not None:
        return []
    return [
        f"pipeline.connect={pipeline.connect} is where actors find a learner, and train starts one here: leave "
        "it out, or start actors alone with `impala-llm actors`"
    ]


def _folder(config: Config) -> list[str]:
    folder = Path(config.run.dir)
    missing: list[Path] = []
    done = "made"
    try:
        if folder.exists() and not folder.is_dir():
            return [f"run.dir={folder} is a file: name a folder, which is made if it is missing"]
        # Later checks may refuse the start, and a dry run starts nothing: folders that are made here are removed again.
        missing = [part for part in (folder / "logs", folder, *folder.parents) if not part.exists()]
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        done = "written to"
        try_to_write(folder)
    except OSError as error:
        fix = "name another folder" + (", or put that right" if done == "written to" else "")
        return [f"run.dir={folder} cannot be {done} ({error.strerror}): {fix}"]
    finally:
        for part in missing:
            with contextlib.suppress(OSError):  # another process uses it by now, or it could not be made
                part.rmdir()
    return []


def _earlier_run(config: Config) -> list[str]:
    """A folder takes one run; a name, one living run."""
    try:
        how_to_start(config)
    except (ConfigError, RunDirectoryError) as error:
        return [str(error)]
    return []


def _device(config: Config) -> list[str]:
    if config.model.device == "cuda" and not visible_gpus():
        return ["model.device=cuda, and this host has no GPU that can be used: set model.device=auto or cpu"]
    if config.model.device == "cuda" and version("torch").endswith("+cpu"):
        return ["model.device=cuda, and the torch that is installed is the CPU build: install its CUDA build"]
    return []


def cpp_compiler() -> str:
    """The program that torch.compile calls on a CPU, for which it writes C++."""
    return os.environ.get("CXX", "g++")


def torch_folder() -> str:
    """Where torch is installed."""
    torch = find_spec("torch")
    return str(Path(torch.origin).parent) if torch and torch.origin else ""


def _compiler(config: Config) -> list[str]:
    compiler = cpp_compiler()
    is_gpu = config.model.device != "cpu" and visible_gpus()
    if not config.learner.compile_layers or is_gpu:
        return []
    if not shutil.which(compiler):
        return [
            f"learner.compile_layers=true needs a C++ compiler on a CPU, and there is no program {compiler!r}: install "
            "g++, or set learner.compile_layers=false"
        ]
    # torch 2.13 names both to the compiler without quotes.
    kept = compiled_folder(Path(config.run.dir) / "compiled")
    fixes = {torch_folder(): "install into a folder without one", kept: f"name one without in {COMPILED_CODE}"}
    return [
        f"learner.compile_layers=true: on a CPU torch cannot compile with a space in the path {folder}: {fix}, or set "
        "learner.compile_layers=false"
        for folder, fix in fixes.items()
        if " " in folder
    ][:1]


def _sglang(config: Config) -> list[str]:
    if config.engine.name != "sglang" or config.engine.urls is not None or config.num_actors == 0:
        return []
    directory, found = model_directory(config.model.path), []
    try:
        asyncio.run(check_python(config.engine.python or find_python()))
    except BadServerSettings as error:
        found.append(str(error))
    try:
        if directory is not None:
            check_positions(directory, config.engine.max_length)
    except BadServerSettings as error:
        found.append(str(error))
    return found


def _learner_keys(config: Config) -> list[str]:
    return _key_problems(config, load_learner_keys) if config.pipeline.bind is not None else []


def _actor_keys(config: Config) -> list[str]:
    return _key_problems(config, load_actor_keys) if config.pipeline.connect is not None else []


def _key_problems(config: Config, load: Callable[[Path], object]) -> list[str]:
    if config.pipeline.keys is None:
        return []
    try:
        load(Path(config.pipeline.keys).expanduser())
    except KeyFileError as error:
        return [f"pipeline.keys={config.pipeline.keys}: {error}"]
    return []


def _ports(config: Config) -> list[str]:
    """Ports of the ranks, and of the weight server, which follows them."""
    bind = config.pipeline.bind
    if bind is None:
        return []
    for offset in range(config.learner.num_ranks + 1):
        end = TcpEndpoint.parse(rank_endpoint(bind, offset))
        try:
            try_to_listen(end)
        except OSError as error:
            fix = "give an address of this host, or tcp://0.0.0.0:PORT for all of them"
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                fix = "end what uses it, or take other ports, above 1023"
            return [f"pipeline.bind={bind}: port {end.port} cannot be listened at ({error.strerror}): {fix}"]
    return []


def _learner_host(config: Config) -> list[str]:
    connect = config.pipeline.connect
    if connect is None:
        return []
    try:
        endpoint = resolve(rank_endpoint(connect, 0))
        check_connect(endpoint, has_keys=True)
    except FileNotFoundError:
        folder = Path(connect[1:]).expanduser().absolute().parent
        # The learner may write it later.
        return [] if folder.is_dir() else [f"pipeline.connect={connect}: there is no folder {folder}: correct the path"]
    except (OSError, ValueError) as error:
        return [f"pipeline.connect={connect}: {error}: the file must hold the learner's endpoint"]
    return _unknown_host("pipeline.connect", connect, TcpEndpoint.parse(endpoint).host)


def _servers(config: Config) -> list[str]:
    urls = config.engine.urls or ()
    return [problem for url in urls for problem in _unknown_host("engine.urls", url, urlsplit(url).hostname or "")]


def _unknown_host(key: str, value: str, host: str) -> list[str]:
    try:
        check_known(host)
    except OSError as error:
        return [f"{key}={value}: this host does not know {host!r} ({error.strerror}): correct it or give an address"]
    return []
