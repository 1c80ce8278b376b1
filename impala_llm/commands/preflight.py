"""Checks of this host before any process of a run exists: folders, files of the model, keys, ports, memory.

A long file, since every check stands here, each a function of a few lines. config.py looks at the settings alone; here
they are held against this host. Each problem is a sentence with key, value and fix. Nothing here imports torch: a
refusal takes about a second.
"""

import asyncio
import contextlib
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from safetensors import SafetensorError, safe_open

from impala_llm.checks.known_models import vocab_size
from impala_llm.config import ConfigError, to_yaml
from impala_llm.engines.sglang.launch_args import BadServerSettings, check_positions, check_python, find_python
from impala_llm.envs.webshop.hard_catalogue import check_limits
from impala_llm.envs.webshop.learned_catalogues import FILE as LEARNED_CATALOGUES
from impala_llm.envs.webshop.learned_catalogues import kind_of, seeds_of
from impala_llm.gpus import visible_gpus
from impala_llm.hosts import TcpEndpoint, check_connect, rank_endpoint, resolve
from impala_llm.learning.checkpoints.files import checkpoints
from impala_llm.learning.checkpoints.resume import how_to_start
from impala_llm.observability.metrics import MetricError, declarations
from impala_llm.pipeline.network.keys import KeyFileError, load_actor_keys, load_learner_keys
from impala_llm.pipeline.network.listener import check_known, try_to_listen
from impala_llm.pipeline.shm.run_directory import ARENA, RunDirectoryError, left_bytes, shared_memory
from impala_llm.processes.compiled_code import VARIABLE as COMPILED_CODE
from impala_llm.processes.compiled_code import compiled_folder
from impala_llm.settings import Config, model_directory, other_models, written
from impala_llm.writable_folders import try_to_write

MEGABYTE = 1 << 20
RELAY_COPIES = 4
"""Copies of the weights on a host of actors: three slots of the relay's board, and the version that arrives."""
DISK_SPARE = 32 * MEGABYTE
"""For logs, metrics and a small policy."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Any of them is enough."""
ADAPTERS = ("gymnasium", "reasoning_gym", "scienceworld", "textarena", "textworld", "verifiers")
"""Environments that have the name of the package, and of the extra, that they need."""
_MAY_HAVE_LEARNED = "it may have been trained on tasks that are held out now"

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
        "model": (_model,),
        "environment": (_catalogue, _unseen_limits),
    }
    _raise_for(config, {**first, **_engine_checks()})


def check_recording(config: Config) -> None:
    """Before `impala-llm demonstrate`. Raises ConfigError with all that was found."""
    by_policy = config.demonstrations.player == "policy"
    catalogues = (_catalogues, _catalogue, _last_catalogue, _unseen_catalogue)
    first = {"player": (_no_agent,), "catalogues": catalogues, "model": (_model,)}
    _raise_for(config, {**first, **(_engine_checks() if by_policy else {})})


def check_warm_start(config: Config) -> None:
    """Before `impala-llm sft`. Raises ConfigError with all that was found."""
    _raise_for(config, {"model": (_model,), "device": (_device,), "compiler": (_compiler,)})


def _own_metrics(config: Config) -> list[str]:
    """Metrics of the credit or the loss that cannot be logged."""
    found = []
    for key, part in (("credit", config.algorithm.credit), ("loss", config.algorithm.loss)):
        try:
            declarations(key, part.metrics)
        except MetricError as error:
            found.append(f"algorithm.{key}={part.name} cannot be used: {error}")
    return found


def unfit_policy(config: Config) -> str | None:
    """A sentence where the policy to be evaluated is known to have been made for other tasks; None otherwise."""
    env, path = config.env.name, config.model.path
    if path == "scratch" or config.agent.is_set:
        return None
    if found := _starting_policy(config):
        return found[0]
    directory = model_directory(path)
    if directory is not None and config.plays_shop and (found_seed := _learned_catalogue(config, directory)):
        return found_seed
    with contextlib.suppress(OSError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        run = directory if directory is None else directory.parent
        if run is not None and run.parent.name == "checkpoints":
            run = run.parent.parent
        trained = None if run is None else yaml.safe_load((run / "config.yaml").read_text())
        agent = {} if trained is None else trained.get("agent") or {}
        if trained is None or agent.get("name") or agent.get("command"):  # an agent's tasks are its own
            return None
        if (before := trained["env"]["name"]) != env:
            return f"model.path={path} was trained with env={before}: its scores with env={env} may say nothing"
        args = yaml.safe_load(to_yaml(config))["env"]["args"] or {}
        others = {key: value for key, value in (trained["env"]["args"] or {}).items() if args.get(key) != value}
        if others:
            were = ", ".join(
                f"env.args.{key}={written(value)}, and not {written(args.get(key))}" for key, value in others.items()
            )
            return f"model.path={path} was trained with {were}: {_MAY_HAVE_LEARNED}"
        return _unfit_shopper(config, trained) if env == "webshop" else None
    return None


def _learned_catalogue(config: Config, directory: Path) -> str | None:
    """`unfit_policy` by what stands beside the policy."""
    shop, unseen = config.env.webshop, config.evaluation.unseen_seed
    if unseen is None or (unseen == shop.catalogue_seed and shop.items is None):
        return None
    with contextlib.suppress(OSError):
        learned = seeds_of((directory / LEARNED_CATALOGUES).read_bytes(), kind_of(vars(shop)))
        return _not_unseen(config) if unseen in learned else None
    return None


def left_out_catalogue(config: Config) -> str | None:
    """A sentence where an evaluation leaves out the unseen catalogue, which is that of its tasks; None otherwise."""
    shop, unseen = config.env.webshop, config.evaluation.unseen_seed
    if not config.plays_shop or shop.items is not None or unseen != shop.catalogue_seed:
        return None
    return (
        f"evaluation.unseen_seed={unseen} is left out, since the tasks are of this catalogue (env.webshop."
        f"catalogue_seed={unseen}): set another seed to play an unseen one, or evaluation.unseen_seed=null"
    )


def _not_unseen(config: Config) -> str:
    unseen = config.evaluation.unseen_seed
    return (
        f"model.path={config.model.path} has learned from catalogue {unseen}, which evaluation.unseen_seed={unseen} "
        "plays as an unseen one: set another seed, or evaluation.unseen_seed=null"
    )


def _unfit_shopper(config: Config, trained: dict[str, Any]) -> str | None:
    """`unfit_policy` of a policy that was trained in the shop. Made catalogues of the same size and another seed have
    other products; those of another size share asins at most, of other products. The splits of a hard one share none;
    the goals of files, or of an easy one, are dealt anew.

    Args:
        trained: the settings of its training.
    """
    path, shop, unseen = config.model.path, config.env.webshop, config.evaluation.unseen_seed
    before, number = trained["env"]["webshop"], trained["demonstrations"]["num_catalogues"]
    is_alike = all(before[key] == getattr(shop, key) for key in ("catalogue", "num_products"))
    first = before["catalogue_seed"]
    learned = range(first, first + number) if before["items"] is None and is_alike else ()
    if unseen in learned and (unseen != shop.catalogue_seed or shop.items is not None):
        return _not_unseen(config)
    keys: tuple[str, ...] = ()
    if shop.items is not None and before["items"] is not None:
        keys = ("items", "num_products", "goals")
    elif shop.items is None and shop.catalogue == "easy" and shop.catalogue_seed in learned:
        keys = ("goals",)
    others = [key for key in keys if before[key] != getattr(shop, key)]
    were = ", ".join(
        f"env.webshop.{key}={written(before[key])}, and not {written(getattr(shop, key))}" for key in others
    )
    return f"model.path={path} was trained with {were}: {_MAY_HAVE_LEARNED}" if others else None


def training_checks() -> Checks:
    """For the host of `impala-llm train`."""
    return {
        "run folder": (_own_learner, _folder, _earlier_run),
        "algorithm": (_own_metrics,),
        "model": (_starting_policy, _model, _adapters, _other_models),
        "environment": (_catalogue, _unseen_catalogue, _unseen_at_end, _package, _task_file),
        **_engine_checks(),
        "keys": (_learner_keys,),
        "compiler": (_compiler,),
        "ports": (_ports,),
        "shared memory": (_memory,),
        "disk": (_disk,),
    }


def actors_checks() -> Checks:
    """For a host of `impala-llm actors`."""
    return {
        "run folder": (_folder,),
        "model": (_model,),
        "environment": (_package, _task_file),
        **_engine_checks(),
        "keys": (_actor_keys,),
        "ports": (_learner_host,),
        "shared memory": (_actors_memory,),
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


def _starting_policy(config: Config) -> list[str]:
    """Starting policies that never score in an environment: nothing would be learned from."""
    env, path = config.env.name, config.model.path
    if config.agent.is_set:  # whose tasks no policy names
        return []
    if path == "tiny_shopper" and env != "webshop":
        return [f"model.path=tiny_shopper has learned to shop and nothing else: with env={env} set model=scratch"]
    if path == "tiny_shopper" and config.env.webshop.observation_mode != "compact":
        mode = config.env.webshop.observation_mode
        return [
            f"env.webshop.observation_mode={mode}: model.path=tiny_shopper reads pages of mode compact alone; leave "
            "it out, or set model=pretrained model.path=DIRECTORY"
        ]
    if path == "tiny_shopper" and not config.env.webshop.row_numbers:
        return [
            "env.webshop.row_numbers=false: model.path=tiny_shopper clicks results by their numbers: set "
            "env.webshop.row_numbers=true, as model=tiny_shopper does"
        ]
    if path == "scratch" and env == "webshop":
        return [
            "model.path=scratch begins with random weights and a tokenizer of characters, and never scores with "
            "env=webshop: set model=tiny_shopper, or model=pretrained model.path=DIRECTORY"
        ]
    return []


def _model(config: Config) -> list[str]:
    """The files of model.path: whole, with tokenizer and chat template. Its config.json: checks/known_models.py."""
    directory = model_directory(config.model.path)
    if directory is None:
        return []  # made from scratch
    where = f"model.path={config.model.path}"
    try:
        tokenizer = directory / "tokenizer_config.json"
        template = _json_object(tokenizer).get("chat_template") if tokenizer.is_file() else None
        if (vocabulary := directory / "tokenizer.json").is_file():
            _json_object(vocabulary)
    except ValueError as error:
        return [f"{where}: {error}: copy the model again"]
    found = _weights("model.path", config.model.path, directory)
    if not template and not any((directory / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        found.append(
            f"{where} has no chat template, by which observations become tokens: take an instruction-tuned model, or "
            "put a chat_template.jinja into the folder"
        )
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        found.append(
            f"{where} has no tokenizer ({', '.join(TOKENIZER_FILES)}): copy the model again, with all its files"
        )
    return found


def _adapters(config: Config) -> list[str]:
    """Targets of adapters that the model does not have; one that is made from scratch is not looked at."""
    lora, directory = config.model.lora, model_directory(config.model.path)
    if not lora.rank or lora.targets == ["all-linear"] or directory is None:
        return []
    matrices = {name.removesuffix(".weight"): shape for name, shape in _tensor_shapes(directory) if len(shape) == 2}
    unknown = [t for t in lora.targets if matrices and not any(f".{name}".endswith(f".{t}") for name in matrices)]
    num_tokens = vocab_size(directory)  # rows of embeddings, which are refused
    there = ", ".join(sorted({name.rpartition(".")[2] for name, (n, _) in matrices.items() if n != num_tokens}))
    return [
        f"model.lora.targets={list(lora.targets)}: no matrix of model.path={config.model.path} is named {name}: choose "
        f"from {there}, or all-linear"
        for name in unknown
    ]


def _other_models(config: Config) -> list[str]:
    """The files of the other models that the learner loads."""
    found = []
    for key, path in other_models(config).items():
        if (directory := model_directory(path)) is not None:
            found += _weights(key, path, directory)
    return found


def _weights(key: str, path: str, directory: Path) -> list[str]:
    """Problems with the configuration and the weights of a model."""
    where = f"{key}={path}"
    try:
        if not isinstance(_json_object(directory / "config.json").get("model_type"), str):
            raise ValueError("config.json has no model_type")
        index = directory / "model.safetensors.index.json"
        files = _json_object(index).get("weight_map") if index.is_file() else {"all": "model.safetensors"}
        if not isinstance(files, dict):
            raise ValueError(f"{index.name} has no weight_map")
    except ValueError as error:
        return [f"{where}: {error}: copy the model again"]
    found = []
    for name in sorted(map(str, set(files.values()))):
        try:
            with safe_open(directory / name, "np"):
                pass
        except (OSError, SafetensorError) as error:
            found.append(f"{where}: {name} is missing or damaged ({error}): copy the model again")
    return found


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return values


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


def reserved_bytes(config: Config) -> dict[str, int]:
    """Bytes of shared memory by the setting that they follow from, on the learner's host; where the learner is on
    another one, on that of its actors.

    All of it is reserved as the processes start: without room they would fail again and again.
    """
    pipeline, path = config.pipeline, config.model.path
    published = float32_bytes(path) // (2 if config.publishes_bfloat16 else 1)
    if not config.learner_processes_here:  # what the relay fetches
        return {f"model.path={path}": RELAY_COPIES * published}
    # A version that is not published may be kept, on a board of two slots, in float32.
    kept = 0 if config.learner.sync_interval == 1 else 2 * float32_bytes(path)
    return {
        "replay.capacity_mb": config.learner.num_ranks * (config.replay.capacity_mb * 5 // 4 + 64) * MEGABYTE,
        "pipeline.arena_mb": config.num_actors * pipeline.arena_mb * MEGABYTE,
        "pipeline.weight_slots": pipeline.weight_slots * published + kept,
    }


def _memory(config: Config) -> list[str]:
    return _shortage(reserved_bytes(config), left_bytes(config.run.name))


def _actors_memory(config: Config) -> list[str]:
    """Beside a learner the arenas of actors lie in shared memory."""
    parts = reserved_bytes(config)
    if config.learner_processes_here:
        return _shortage({"pipeline.arena_mb": parts["pipeline.arena_mb"]}, left_bytes(config.run.name, suffix=ARENA))
    return _shortage(parts, left_bytes(config.run.name))


def _shortage(parts: dict[str, int], left: int) -> list[str]:
    """A sentence where shared memory has no room for the bytes by setting.

    Args:
        left: bytes that a dead owner has left of this run: they are used again, or go first.
    """
    needed, free = sum(parts.values()), shutil.disk_usage(shared_memory()).free + left
    if needed <= free:
        return []
    shares = ", ".join(f"{size / MEGABYTE:,.0f} MiB for {key}" for key, size in parts.items())
    return [
        f"{shared_memory()} has {free / MEGABYTE:,.0f} MiB free, and the run reserves {needed / MEGABYTE:,.0f} MiB "
        f"({shares}): lower what these settings take, or enlarge it (Docker: --shm-size)"
    ]


def _disk(config: Config) -> list[str]:
    """Disk space for the last policy, without which a run has learned for nothing, and for checkpoints. With
    evaluations inside of the run there are two more policies, the best one and the one that is being evaluated, and the
    checkpoint of the best."""
    folder, kept = Path(config.run.dir), config.learner.checkpoints_kept
    num_policies = 3 if config.evaluation.inside_run else 1
    # One more is there while it is written. Beside the weights it has their moments, twice as large, and of ranks that
    # share the policy their shares of it; of adapters all of these are small.
    num_checkpoints = kept + (2 if config.evaluation.inside_run else 1) if kept else 0
    is_shared = config.learner.sharding == "fsdp2" or config.learner.tensor_parallel > 1
    num_parts = 1 if config.model.lora.rank else 4 if is_shared else 3
    weights = float32_bytes(config.model.path)
    needed = DISK_SPARE + (num_policies + num_parts * num_checkpoints) * weights
    # Their successors are written before they are removed.
    largest = num_parts if kept else 1
    needed = max(needed - _bytes_replaced(folder), DISK_SPARE + largest * weights)
    there = next(part for part in (folder, *folder.absolute().parents) if os.path.isdir(part))
    if (free := shutil.disk_usage(there).free) >= needed:
        return []
    fewer = ", lower learner.checkpoints_kept" if kept else ""
    return [
        f"run.dir={folder} has {free / MEGABYTE:,.0f} MiB of free disk space, and policies, checkpoints and logs take "
        f"{needed / MEGABYTE:,.0f} MiB: make room{fewer}, or name a folder on another disk"
    ]


def _bytes_replaced(folder: Path) -> int:
    """Bytes of the checkpoints and policies of a run that give way to later ones: not those of learner.save_every."""
    policies = [folder / name for name in ("policy", "policy-best", "policy-candidate")]
    total = 0
    parts = [part for part in (*checkpoints(folder), *policies) if os.path.isdir(part)]
    for path in (path for part in parts for path in part.rglob("*")):
        with contextlib.suppress(OSError):  # a learner may be at work
            total += path.stat().st_size if path.is_file() else 0
    return total


def float32_bytes(path: str) -> int:
    """Bytes that the weights of a model take on the weight board, which holds the learner's float32.

    Args:
        path: value of `model.path`.

    Returns:
        0 where the model is made from scratch, or cannot be read.
    """
    directory = model_directory(path)
    return sum(4 * math.prod(shape) for _, shape in _tensor_shapes(directory)) if directory else 0


def layer_parameters(path: str) -> int:
    """Number of parameters in the matrices of a model's layers, which tensor parallelism divides.

    Args:
        path: value of `model.path`.

    Returns:
        0 where the model is made from scratch, or cannot be read.
    """
    directory = model_directory(path)
    shapes = _tensor_shapes(directory) if directory else ()
    return sum(math.prod(shape) for name, shape in shapes if len(shape) > 1 and re.search(r"\.\d+\.", name))


def _tensor_shapes(directory: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of a model's tensors. Files that cannot be read are left out: `_model` reports them."""
    for file in directory.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(file, "np") as tensors:
            names = tensors.keys()  # it is no dict
            yield from ((name, tensors.get_slice(name).get_shape()) for name in names)
