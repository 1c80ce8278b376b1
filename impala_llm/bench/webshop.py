"""Speed of the shop's steps, and time and memory for loading a large catalogue.

Figures: `steps_per_s`, environment steps a second of one thread on a mix of searches, product, option and sub pages and
purchases, resets included; `load_100k_s` and `load_100k_gb`, seconds to load and index 100,000 products from files and
the peak resident memory (10^9 bytes) of the process that does it. Rows: microseconds a step by kind of action.
Each is measured in a process of its own that does nothing else, so that every cache starts empty.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import impala_llm
from impala_llm.bench.frame import BenchError
from impala_llm.envs.webshop.pages import OBSERVATION_MODES

OPTIONS = {
    "products": "catalogue size for steps_per_s; default 1000",
    "episodes": "episodes for steps_per_s; default 3000",
    "mode": f"observation mode for steps_per_s, {' or '.join(OBSERVATION_MODES)}; default text",
    "load": "catalogue size for the load figures; default 100000",
}

FILES = ("items", "attributes", "human", "nouns")
Episode = tuple[int, list[tuple[str, str]]]  # task id, [(kind of action, action)]


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Runs both parts; see the module for the figures and rows."""
    from impala_llm.envs.webshop.synthetic import make_records

    num_products, num_episodes = int(options.get("products", 1000)), int(options.get("episodes", 3000))
    num_loaded = int(options.get("load", 100_000))
    if (mode := options.get("mode", "text")) not in OBSERVATION_MODES:
        raise BenchError(f"--mode is {mode!r}: it takes {' or '.join(OBSERVATION_MODES)}")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "episodes.json"
        script.write_text(json.dumps(record_episodes(num_products, num_episodes)))
        steps_per_s, rows = _in_child("steps", str(script), str(num_products), mode)
        for name, records in zip(FILES, make_records(num_loaded, seed=0), strict=True):
            (Path(folder) / f"{name}.json").write_text(json.dumps(records))
        seconds, gigabytes = _in_child("load", folder)
    size = f"{num_loaded // 1000}k" if num_loaded % 1000 == 0 else str(num_loaded)
    return {"steps_per_s": steps_per_s, f"load_{size}_s": seconds, f"load_{size}_gb": gigabytes}, rows


def record_episodes(num_products: int, num_episodes: int) -> list[Episode]:
    """Plays shoppers on the synthetic catalogue and writes down what they do."""
    from impala_llm.envs.webshop import WebShopEnv, synthetic_catalogue

    env = WebShopEnv(synthetic_catalogue(num_products, seed=0))
    rng = random.Random(0)
    tasks = rng.choices(range(len(env.goals)), k=num_episodes)
    return [(task_id, _play(env, task_id, rng)) for task_id in tasks]


def measure_steps(episodes: list[Episode], num_products: int, mode: str) -> tuple[float, list[dict[str, Any]]]:
    """Plays recorded episodes again: steps a second, and the rows."""
    from impala_llm.envs.webshop import WebShopEnv, synthetic_catalogue

    env = WebShopEnv(synthetic_catalogue(num_products, seed=0), observation_mode=mode)  # type: ignore[arg-type]
    seconds: defaultdict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    clock = time.perf_counter
    begin = clock()
    for task_id, actions in episodes:
        before = clock()
        env.reset(task_id=task_id)
        seconds["reset"] += clock() - before
        times["reset"] += 1
        for kind, action in actions:
            before = clock()
            env.step(action)
            seconds[kind] += clock() - before
            times[kind] += 1
    total = clock() - begin
    num_steps = times.total() - times["reset"]
    rows = [
        {
            "action": kind,
            "per_step": round(times[kind] / num_steps, 3),
            "us_each": round(1e6 * seconds[kind] / times[kind], 1),
        }
        for kind in sorted(times, key=lambda kind: -seconds[kind])
    ]
    return num_steps / total, rows


def measure_load(folder: Path) -> tuple[float, float]:
    """Loads the files of a folder: seconds, and the peak memory of this process in 10^9 bytes."""
    before = time.perf_counter()
    from impala_llm.envs.webshop import load_catalogue

    items, attributes, human, nouns = (folder / f"{name}.json" for name in FILES)
    load_catalogue(items, attributes, human, nouns, seed=0)
    seconds = time.perf_counter() - before
    # Not getrusage: its peak counts what the parent had resident when it started this process.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return seconds, int(status["VmHWM"].split()[0]) * 1024 / 1e9


def _play(env: Any, task_id: int, rng: random.Random) -> list[tuple[str, str]]:
    """One shopper: searches, looks at a few products and their sub pages, chooses options, buys."""
    actions: list[tuple[str, str]] = []

    def act(kind: str, argument: str) -> list[str]:
        action = f"{'search' if kind == 'search' else 'click'}[{argument}]"
        actions.append((kind, action))
        return list(env.step(action)[-1]["available_actions"]["clickables"])

    env.reset(task_id=task_id)
    words = env.goal.instruction_text.split(", and price lower")[0].split()
    for visit in range(rng.choice((1, 1, 2, 3))):
        if visit:
            act("back to search", "back to search")
        shown = act("search", " ".join(word for word in words if visit == 0 or rng.random() < 0.7) or "gift")
        if rng.random() < 0.3:
            shown = act("next or prev", "next >")
        links = shown[shown.index("next >") + 1 :]
        if not links:
            continue
        shown = act("product", rng.choice(links))
        for page in ("description", "features"):
            if rng.random() < 0.3:
                act("sub page", page)
                shown = act("next or prev", "< prev")
        values = shown[shown.index("buy now") + 1 :]
        for value in rng.sample(values, min(len(values), rng.choice((0, 1, 2, 3)))):
            act("option", value)
    if env.page == "item":
        act("buy", "buy now")
    return actions


def _in_child(*arguments: str) -> Any:
    command = [sys.executable, "-m", "impala_llm.bench.webshop", *arguments]
    # The folder of the package, so that it is found where it is not installed.
    root = Path(impala_llm.__file__).parents[1]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=root).stdout
    return json.loads(printed.splitlines()[-1])  # what stands before is of others, such as a sitecustomize


def _main(part: str, path: str, *rest: str) -> None:
    if part == "load":
        print(json.dumps(measure_load(Path(path))))
    else:
        num_products, mode = rest
        print(json.dumps(measure_steps(json.loads(Path(path).read_text()), int(num_products), mode)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
