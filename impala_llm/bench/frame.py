"""The frame of all benchmarks: finds one by its name, runs it, and says which machine its numbers are from.

A benchmark is a module of this package, named as on the command line, with

    OPTIONS = {"products": "catalogue size; default 1000"}          what it takes; absent: nothing
    PEERS = ("faster_fifo",)                                        modules it compares with; absent: none
    def left_out(options: dict[str, str]) -> list[str]              peers that are missing; absent: PEERS not installed
    def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict]]      figures, rows

Figures are the few numbers that a check reads; rows are a table for people, each a flat dict. Invariant: the last line
of standard output is one JSON object and holds every number; a peer that is not installed is named in `left_out`.
Nothing heavy is imported here (torch least of all), so a benchmark's memory figures are its own.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pkgutil
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import psutil
from rich.console import Console
from rich.table import Table

import impala_llm.bench

_FRAME = "frame"
_DISTRIBUTIONS = ("torch", "transformers", "numpy", "pyzmq", "msgpack")
_USAGE = "usage: impala-llm bench NAME [--json] [--key value ...]"


class BenchError(ValueError):
    """A benchmark that does not exist, was asked for something it does not know, or broke its contract."""


def bench_names() -> list[str]:
    """Names of all benchmarks, sorted: the modules of this package but the frame and those that begin with `_`."""
    found = (module.name for module in pkgutil.iter_modules(impala_llm.bench.__path__))
    return sorted(name for name in found if name != _FRAME and not name.startswith("_"))


def run_bench(name: str, options: dict[str, str]) -> dict[str, object]:
    """Runs one benchmark in this process.

    Returns {"bench", "machine", "versions", "figures", "rows", "left_out"}, all of it JSON. Raises BenchError for an
    unknown name or option, and for a number in the result that is not finite.
    """
    module = _module(name)
    known: dict[str, str] = getattr(module, "OPTIONS", {})
    for key in options:
        if key not in known:
            takes = ", ".join(f"--{option} ({meaning})" for option, meaning in known.items()) or "no options"
            raise BenchError(f"benchmark {name!r} does not know --{key}: it takes {takes}")
    peers: Sequence[str] = getattr(module, "PEERS", ())
    left_out: Callable[[dict[str, str]], list[str]] | None = getattr(module, "left_out", None)
    try:
        figures, rows = module.run(options)
    except BenchError:
        raise
    except ValueError as error:
        if not options:
            raise
        given = " ".join(f"--{key}={value}" for key, value in options.items())
        raise BenchError(f"benchmark {name!r} cannot run with {given}: {error}") from error
    for results in (figures, *rows):
        for key, value in results.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise BenchError(f"benchmark {name!r}: {key!r} is {value}; leave out what could not be measured")
    return {
        "bench": name,
        "machine": machine(),
        "versions": versions(module, peers),
        "figures": {figure: float(value) for figure, value in figures.items()},
        "rows": rows,
        "left_out": left_out(options) if left_out else [peer for peer in peers if not _installed(peer)],
    }


def whole_number(name: str, value: str | int, least: int = 1) -> int:
    """Read the value of an option. BenchError where it is no whole number, or below `least`."""
    with contextlib.suppress(ValueError):
        if (number := int(value)) >= least:
            return number
    raise BenchError(f"--{name.replace('_', '-')} is {value!r}: it takes a whole number, {least} at least")


def machine() -> dict[str, object]:
    """Machine of the measurements: system, processor, cores this process may use, memory in 10^9 bytes, GPUs."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "gpus": _gpu_models(),
    }


def versions(module: ModuleType, peers: Sequence[str] = ()) -> dict[str, str]:
    """Versions of Python, of what we build on, and of the peers that are installed."""
    by_module = importlib.metadata.packages_distributions()
    names = [*_DISTRIBUTIONS, *(by_module[peer][0] for peer in peers if _installed(peer) and peer in by_module)]
    found = {"python": platform.python_version(), "impala_llm": impala_llm.__version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(argv: Sequence[str]) -> int:
    """`impala-llm bench ...` after the word bench. Returns the exit status: 0, or 2 and a sentence on stderr."""
    if not argv or argv[0] in ("-h", "--help"):
        more = "`impala-llm bench NAME --help` shows the options of one"
        print(f"{_USAGE}\n{_listing()}\n{more}", file=sys.stderr if not argv else sys.stdout)
        return 0 if argv else 2
    try:
        if "-h" in argv or "--help" in argv:
            print(f"{_USAGE.replace('NAME', argv[0])}\n{_help(argv[0])}")
            return 0
        options, json_only = _parse(argv[1:])
        result = run_bench(argv[0], options)
    except BenchError as error:
        print(f"impala-llm bench: {error}", file=sys.stderr)
        return 2
    if not json_only:
        _print_tables(result)
    print(json.dumps(result, allow_nan=False))
    return 0


def _parse(arguments: Sequence[str]) -> tuple[dict[str, str], bool]:
    options: dict[str, str] = {}
    json_only = False
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--json":
            json_only = True
            continue
        key, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not key:
            raise BenchError(f"unexpected argument {argument!r}. {_USAGE}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise BenchError(f"--{key} has no value: write --{key} VALUE or --{key}=VALUE")
            value = rest.pop(0)
        options[key.replace("-", "_")] = value
    return options, json_only


def _module(name: str) -> ModuleType:
    if name not in bench_names():
        raise BenchError(f"unknown benchmark {name!r}: {_listing()}")
    return importlib.import_module(f"impala_llm.bench.{name}")


def _help(name: str) -> str:
    """The first sentence of a benchmark's docstring, and its options."""
    module = _module(name)
    known: dict[str, str] = getattr(module, "OPTIONS", {})
    lines = [f"  --{option} VALUE    {meaning}" for option, meaning in known.items()]
    return "\n".join([(module.__doc__ or "").strip().partition("\n\n")[0], *(lines or ["  no options of its own"])])


def _print_tables(result: dict[str, object]) -> None:
    console = Console()
    figures, rows = result["figures"], result["rows"]
    assert isinstance(figures, dict) and isinstance(rows, list)
    summary = Table("figure", "value", title=f"bench {result['bench']}")
    for figure, value in figures.items():
        summary.add_row(figure, f"{value:,.4g}")
    console.print(summary)
    if rows:
        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = Table(*columns)
        for row in rows:
            table.add_row(*(_cell(row.get(column)) for column in columns))
        console.print(table)
    if result["left_out"]:
        console.print(f"not installed, left out: {result['left_out']}", markup=False)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _listing() -> str:
    return "benchmarks: " + (", ".join(bench_names()) or "none")


def _installed(module_name: str) -> bool:
    return importlib.util.find_spec(module_name) is not None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _gpu_models() -> list[str]:
    """From the driver's own files: asking torch would import it, and take its memory, into every benchmark."""
    models = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                models.append(line.partition(":")[2].strip())
    return models
