"""`impala-llm doctor`: looks at this host, and at how settings fit it; says of each part what is there, and what to do.

The checks of the settings are those that `train` and `actors` make (preflight.py). In addition it checks what a start
does not look at: versions, what torch makes of the GPUs, the tasks, servers of others, memory for the weights, a
process group of two ranks.

Invariant: it leaves nothing behind, and GPUs are used by child processes alone.
"""

import asyncio
import contextlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from impala_llm.commands import model_memory, rank_group
from impala_llm.commands.host_space import reserved_bytes
from impala_llm.commands.preflight import (
    Checks,
    actors_checks,
    cpp_compiler,
    training_checks,
)
from impala_llm.config import ConfigError, load, threads_per_process
from impala_llm.engines.sglang.external_server import absent_servers
from impala_llm.engines.sglang.launch_args import find_python
from impala_llm.envs import contract
from impala_llm.envs.base import SPLITS, Split
from impala_llm.envs.contract import EnvironmentFault
from impala_llm.gateway.tasks import tried_suite
from impala_llm.gpus import deal_gpus, visible_gpus, with_num_actors
from impala_llm.hosts import TcpEndpoint, check_connect, rank_endpoint, resolve
from impala_llm.learning.policy.model_files import float32_bytes
from impala_llm.observability.terminal import working
from impala_llm.pipeline.network.listener import try_to_connect
from impala_llm.pipeline.shm.run_directory import shared_memory
from impala_llm.processes.cgroups import most_memory, num_cores
from impala_llm.settings import Config, model_directory

SHOWN_VERSIONS = ("torch", "transformers", "numpy", "pyzmq", "numba", "safetensors")
CHILD_S = 180.0
"""Seconds that a process which imports torch may take on a busy machine."""
CONNECT_S, SERVER_S = 5.0, 3.0
SPARE_FILES = 256
"""Open files of a process beside those for each actor or request."""

TORCH_PROBE = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "built_for": torch.cuda.get_arch_list(), "gpus": []}
for index in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(index)
    gpu = {"name": facts.name, "gb": facts.total_memory / 1e9, "error": ""}
    gpu["capability"] = f"{facts.major}.{facts.minor}"
    try:
        one = torch.ones(16, 16, device=f"cuda:{index}")
        assert float((one @ one).sum()) == 4096.0, "a matrix product is wrong"
    except Exception as error:
        gpu["error"] = str(error).splitlines()[0]
    found["gpus"].append(gpu)
print(json.dumps(found))
"""
CONFIG_PROBE = """
import sys
from transformers import AutoConfig, AutoTokenizer
config = AutoConfig.from_pretrained(sys.argv[1], local_files_only=True)
AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
print(config.get_text_config().model_type)
"""


@dataclass(frozen=True)
class Finding:
    """Result of the look at one part of the host."""

    part: str
    state: str
    """State of the part, in words."""
    problems: list[str] = field(default_factory=list)
    """Problems, each with what to do; empty where there is none."""


def main(overrides: Sequence[str], as_json: bool = False) -> int:
    """Print what was found. Returns 1 where something is wrong, else 0.

    Args:
        overrides: settings, as for `config.load`.
        as_json: print one JSON object: {"ok": bool, "findings": [{"part", "state", "problems"}]}.
    """
    with working("looking at this host"):
        found = examine(overrides)
    num_wrong = sum(bool(finding.problems) for finding in found)
    is_ok = num_wrong == 0
    if as_json:
        print(json.dumps({"ok": is_ok, "findings": [asdict(finding) for finding in found]}, indent=2))
        return 0 if is_ok else 1
    width = max(len(finding.part) for finding in found)
    for finding in found:
        print(f"{'WRONG' if finding.problems else 'ok':5}  {finding.part:{width}}  {finding.state}".rstrip())
        for problem in finding.problems:
            print(f"{'':5}  {'':{width}}  -> {problem}")
    print("nothing is wrong" if is_ok else f"{num_wrong} part{'s are' if num_wrong > 1 else ' is'} wrong")
    return 0 if is_ok else 1


def examine(overrides: Sequence[str]) -> list[Finding]:
    """Look at the host, and at the settings on it; where these are refused, at the host with the default settings."""
    gpus = gpu_names()
    torch = run_probe(TORCH_PROBE)
    found = [versions(), processor_and_memory(), gpu_use(gpus, torch)]
    is_of_host = not overrides
    try:
        config, overrides = with_num_actors(load(overrides), overrides, visible_gpus())
    except ConfigError as error:
        found.append(Finding("settings", "refused; the parts below are with the defaults", str(error).splitlines()))
        checks, config = training_checks(), load()
        found += looked_at(config, {part: checks[part] for part in HOST_PARTS})
        return [*found, open_files(config), process_group(config, (), torch)]
    is_learner = config.pipeline.connect is None or config.pipeline.bind is not None
    checks = training_checks() if is_learner else actors_checks()
    if is_of_host:
        checks.pop("run folder", None)  # that a run of the default name is there is no fault of this host
    found += looked_at(config, checks)
    found += [processes(config), open_files(config)]
    if not is_learner:
        return [*found, Finding("model memory", *model_memory.look_at_engines(config, torch.get("gpus", [])))]
    return [*found, learner_memory(config, torch), process_group(config, overrides, torch)]


def looked_at(config: Config, checks: Checks) -> list[Finding]:
    """Look at the parts of the checks."""
    found = []
    for part, functions in checks.items():
        problems = [problem for check in functions for problem in check(config)]
        state, more = DETAILS[part](config)
        # If preflight has found the cause, its consequences are not reported as well.
        found.append(Finding(part, state, problems or more))
    return found


# --- the host alone


def versions() -> Finding:
    """Python and the packages, against the ranges that this package was made for."""
    shown = [f"{name} {version(name)}" for name in SHOWN_VERSIONS]
    problems = []
    try:
        own, wanted_lines = version("impala_llm"), requires("impala_llm") or []
    except PackageNotFoundError:
        own, wanted_lines = "from its source folder", []
        problems.append("impala_llm itself is not installed, so nobody knows what it needs: pip install -e .")
    for line in wanted_lines:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            there = version(wanted.name)
        except PackageNotFoundError:
            problems.append(f"{wanted.name} is not installed: pip install '{wanted}'")
            continue
        if not wanted.specifier.contains(there, prereleases=True):
            problems.append(f"{wanted.name} {there} is not what was tried ({wanted}): pip install '{wanted}'")
    return Finding(
        "versions",
        ", ".join([f"python {platform.python_version()}, impala_llm {own}", *shown]),
        problems,
    )


def processor_and_memory() -> Finding:
    """Cores and memory; both are for information."""
    memory, limit = psutil.virtual_memory(), most_memory()
    state = f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB of them available"
    if limit < memory.total:
        state = f"{limit / 1e9:.1f} GB, the limit of this container"
    return Finding("cores, memory", f"{num_cores()} cores, {state}")


def gpu_names() -> list[str]:
    """GPUs that the driver knows, whether torch can use them or not: name, memory, driver, compute capability."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    listed = subprocess.run([tool, query, "--format=csv,noheader"], capture_output=True, text=True)
    return listed.stdout.strip().splitlines() if listed.returncode == 0 else []


def gpu_use(gpus: Sequence[str], torch: dict[str, Any]) -> Finding:
    """Whether torch can use the GPUs.

    Args:
        gpus: see `gpu_names`.
        torch: see TORCH_PROBE.
    """
    if error := torch.get("error"):
        return Finding("GPUs", ", ".join(gpus) or "none", [f"torch cannot be imported ({error}): install it again"])
    build = f"torch {torch['version']}" + (f" for CUDA {torch['cuda']}" if torch["cuda"] else " without CUDA")
    if not gpus and not torch["gpus"]:
        return Finding("GPUs", f"none: learner and engines compute on the CPU; {build}")
    kinds = list(gpus) or [f"{gpu['name']}, {gpu['gb']:.0f} GB, {gpu['capability']}" for gpu in torch["gpus"]]
    state = f"{len(kinds)}: {'; '.join(sorted(set(kinds)))} (name, memory, driver, compute capability); {build}"
    if torch["cuda"] is None:
        return Finding("GPUs", state, ["this torch is a CPU build: install its CUDA build, see tools/setup_venv.sh"])
    if not torch["gpus"]:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        fix = (
            f"CUDA_VISIBLE_DEVICES={hidden} hides them: unset it"
            if hidden is not None
            else f"the driver is too old for CUDA {torch['cuda']}, or this container was started without GPUs: "
            "update the driver, or start it with --gpus all"
        )
        return Finding("GPUs", state, [f"torch finds none of them: {fix}"])
    return Finding(
        "GPUs",
        state,
        [
            f"GPU {index}, {gpu['name']}, does not compute ({gpu['error']}): this torch is built for "
            f"{', '.join(torch['built_for'])}, and the GPU is of capability {gpu['capability']}: install another build"
            for index, gpu in enumerate(torch["gpus"])
            if gpu["error"]
        ],
    )


# --- settings on this host: what is there, and what preflight does not look at


def run_folder(config: Config) -> tuple[str, list[str]]:
    """The run's name and folder."""
    folder = Path(config.run.dir)
    return f"run {config.run.name!r} in {folder}" + ("" if folder.exists() else ", which will be made"), []


def algorithm(config: Config) -> tuple[str, list[str]]:
    """The credit and the loss."""
    return f"{config.algorithm.loss.name} on {config.algorithm.credit.name}", []


def environment(config: Config) -> tuple[str, list[str]]:
    """The tasks that are played, made as an actor makes them."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a library may greet
            suite = tried_suite(config)
            # There may be no tasks of a split that these settings do not play.
            counts = contract.call(f"env {suite.name}: tasks", lambda: [len(suite.tasks(split)) for split in SPLITS])
            sizes = [f"{split} {count}" for split, count in zip(SPLITS, counts, strict=True)]
            evaluated: dict[Split, str] = {}
            if config.evaluation.inside_run:
                evaluated["validation"] = "evaluation.every_updates"
            if config.evaluation.before_and_after:
                evaluated[config.evaluation.split] = "evaluation.split"  # type: ignore[index]  # by config.load
            for split, asked_by in evaluated.items():
                contract.tasks(suite, split, asked_by)
            problems = [said for split in evaluated if (said := contract.shared_tasks(suite, split))]
    except EnvironmentFault as error:
        return "agent" if config.agent.is_set else config.env.name, [str(error)]
    return f"{suite.name}, tasks: {', '.join(sizes)}", problems


def model(config: Config) -> tuple[str, list[str]]:
    """The policy's files, as transformers reads them."""
    directory = model_directory(config.model.path)
    if directory is None:
        return f"{config.model.path}: made as the run begins", []
    size = f"{float32_bytes(config.model.path) / 4e6:,.1f} M parameters"
    kind = run_probe(CONFIG_PROBE, str(directory), as_json=False)
    if error := kind.get("error"):
        return f"{directory}, {size}", [f"model.path={config.model.path}: transformers cannot read it: {error}"]
    return f"{directory}, kind {kind['said']}, {size}", []


def device(config: Config) -> tuple[str, list[str]]:
    """The GPUs of learner and actors."""
    try:
        shares = deal_gpus(config, visible_gpus())
    except ConfigError as error:
        return f"model.device={config.model.device}", [str(error)]
    if not shares.learner and not any(shares.actors):
        return f"model.device={config.model.device}: CPU", []
    actors = [",".join(own) for own in shares.actors]
    return f"GPU {','.join(shares.learner) or 'none'} for the learner, {' '.join(actors) or 'none'} for the actors", []


def compiler(config: Config) -> tuple[str, list[str]]:
    """The C++ compiler, which compiled layers need on a CPU."""
    there = shutil.which(cpp_compiler()) or f"no program {cpp_compiler()!r}"
    return f"{there}, {'' if config.learner.compile_layers else 'not '}used", []


def engine(config: Config) -> tuple[str, list[str]]:
    """The engine, and where SGLang is."""
    python = config.engine.python or find_python()
    said = run_probe("from importlib.metadata import version; print(version('sglang'))", python=python, as_json=False)
    sglang = f"SGLang {said['said']} with {python}" if said.get("said") else "SGLang is not installed"
    if config.engine.name != "sglang":
        return f"engine={config.engine.name}; {sglang}, not used", []
    urls = config.engine.urls or []
    where = f"; servers at {', '.join(urls)}" if urls else ""
    return f"engine=sglang; {sglang}{where}", asyncio.run(absent_servers(urls, SERVER_S))


def keys(config: Config) -> tuple[str, list[str]]:
    """The folder of keys."""
    return config.pipeline.keys or "none: learner and actors are on this host", []


def ports(config: Config) -> tuple[str, list[str]]:
    """Ports of the learner: those here are tried by preflight, those elsewhere must answer."""
    bind, connect, num_ranks = config.pipeline.bind, config.pipeline.connect, config.learner.num_ranks
    if bind is not None:
        return f"listening at {bind} to {rank_endpoint(bind, num_ranks)}", []
    if connect is None:
        return "none: actors on other hosts need pipeline.bind", []
    problems = []
    try:
        first = resolve(rank_endpoint(connect, 0))
        check_connect(first, has_keys=True)
    except (OSError, ValueError) as error:
        return f"learner at {connect}", [
            f"pipeline.connect={connect}: there is no endpoint yet ({error}): start the learner"
        ]
    for offset in range(num_ranks + 1):
        end = TcpEndpoint.parse(rank_endpoint(first, offset))
        whose = f"rank {offset}" if offset < num_ranks else "the weight server"
        try:
            try_to_connect(end, CONNECT_S)
        except OSError as error:
            begin, last = (TcpEndpoint.parse(rank_endpoint(first, each)).port for each in (0, num_ranks))
            fix = f"start the learner with pipeline.bind=tcp://0.0.0.0:{begin} and open ports {begin} to {last}"
            if offset:
                fix = f"open ports {begin} to {last}, or set learner.num_ranks to that of the learner"
            problems.append(
                f"pipeline.connect={connect}: port {end.port}, of {whose}, cannot be reached ({error}): {fix}"
            )
            break  # the others have the same cause
    return f"learner at {connect}" + ("" if first == connect else f", {first}"), problems


def memory(config: Config) -> tuple[str, list[str]]:
    """Shared memory."""
    usage, needed = shutil.disk_usage(shared_memory()), sum(reserved_bytes(config).values())
    free = f"{usage.total / 1e9:.1f} GB, {usage.free / 1e9:.1f} GB of them free"
    return f"{shared_memory()}, {free}; these settings reserve {needed / 1e9:.1f} GB", []


def disk(config: Config) -> tuple[str, list[str]]:
    """Disk of the run's folder."""
    folder = Path(config.run.dir).absolute()
    there = next(part for part in (folder, *folder.parents) if part.is_dir())
    return f"{shutil.disk_usage(there).free / 1e9:.1f} GB free at {there}", []


DETAILS: dict[str, Callable[[Config], tuple[str, list[str]]]] = {
    "run folder": run_folder,
    "model": model,
    "algorithm": algorithm,
    "environment": environment,
    "device": device,
    "compiler": compiler,
    "engine": engine,
    "keys": keys,
    "ports": ports,
    "shared memory": memory,
    "disk": disk,
}
"""By the part of `training_checks` and `actors_checks`."""
HOST_PARTS = ("compiler", "shared memory", "disk")
"""Parts that tell of the host whatever the settings are."""


def processes(config: Config) -> Finding:
    """Processes on this host's cores."""
    learner, of_learner = config.learner, config.learner_processes_here
    threads, number = threads_per_process(config), of_learner + config.num_actors
    cores = num_cores()
    state = f"of the learner: {of_learner}, actors: {config.num_actors}, each with OpenMP threads: {threads}"
    problems = []
    if number > cores:
        fixes = {"learner.num_ranks": learner.num_ranks, "learner.tensor_parallel": learner.tensor_parallel}
        lower = [f"{key}={value}" for key, value in fixes.items() if of_learner and value > 1]
        if config.num_actors:
            episodes = f"(one plays {config.actor.max_episodes} episodes at once, actor.max_episodes)"
            lower.insert(0, f"actor.num_actors={config.num_actors} {episodes}")
        problems = [f"{number} processes share {cores} cores: lower {' or '.join(lower)}"]
    return Finding("processes", state, problems)


def open_files(config: Config) -> Finding:
    """The limit of open files: a connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The learner raises its own limit as far as it may. An actor has a connection for each request to its server.
    requests = config.actor.max_episodes if config.engine.name == "sglang" else 0
    learner, actor = SPARE_FILES + 2 * config.num_actors, SPARE_FILES + requests
    problems = []
    if hard != resource.RLIM_INFINITY and hard < learner:
        problems.append(f"actor.num_actors={config.num_actors} needs {learner} open files: ulimit -Hn {learner}")
    if soft != resource.RLIM_INFINITY and soft < actor:
        problems.append(f"actor.max_episodes={config.actor.max_episodes} needs {actor} open files: ulimit -n {actor}")
    return Finding("open files", f"at most {soft}, {hard} if asked for", problems)


def learner_memory(config: Config, torch: dict[str, Any]) -> Finding:
    """Memory for weights, gradients, optimizer, engines and a checkpoint's copy: what is certain."""
    return Finding("model memory", *model_memory.look(config, torch.get("gpus", [])))


def process_group(config: Config, overrides: Sequence[str], torch: dict[str, Any]) -> Finding:
    """Two ranks, started as the learner's are, sum a number."""
    return Finding("process group", *rank_group.look(config, overrides, len(torch.get("gpus", []))))


def run_probe(code: str, *arguments: str, python: str = sys.executable, as_json: bool = True) -> dict[str, Any]:
    """Run Python code in a process of its own.

    Returns:
        The JSON object of its last line; without `as_json` {"said": that line}; {"error": why} where it failed. What
        stands before is of others, such as a sitecustomize.
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" or python == sys.executable
    }
    try:
        done = subprocess.run(
            [python, "-c", code, *arguments], capture_output=True, errors="replace", timeout=CHILD_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    said = (done.stdout.strip().splitlines() or [""])[-1]
    if not as_json:
        return {"said": said}
    try:
        return dict(json.loads(said))
    except (ValueError, TypeError):
        return {"error": f"its last line {said!r} is no JSON object"}
