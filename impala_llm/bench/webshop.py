"""How fast the shop steps, and what a large catalogue costs to load.

Figures: `steps_per_s`, environment steps a second of one thread on a mix of searches, product, option and sub pages
and purchases, replayed on a fresh catalogue so that every cache starts empty; `load_100k_s` and `load_100k_gb`,
seconds to load and index 100,000 products from files and the peak resident memory (10^9 bytes) of a process that does
nothing else. Rows: microseconds a step by kind of action.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

OPTIONS = {
    "products": "catalogue size for steps_per_s; default 1000",
    "episodes": "episodes for steps_per_s; default 3000",
    "load": "catalogue size for the load figures; default 100000",
    "mode": "observation mode for steps_per_s, text or text_rich; default text",
}

_FILES = ("items", "attributes", "human", "nouns")


def run(options: dict[str, str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Runs both parts; see the module for the figures and rows."""
    figures, rows = _measure_steps(
        int(options.get("products", 1000)), int(options.get("episodes", 3000)), options.get("mode", "text")
    )
    return figures | _measure_load(int(options.get("load", 100_000))), rows


def _measure_steps(num_products: int, num_episodes: int, mode: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    episodes = _record(num_products, num_episodes)
    env = _environment(num_products, mode)
    seconds: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    clock = time.perf_counter
    begin = clock()
    for task_id, actions in episodes:
        before = clock()
        env.reset(task_id=task_id)
        seconds["reset"] += clock() - before
        steps["reset"] += 1
        for kind, action in actions:
            before = clock()
            env.step(action)
            seconds[kind] += clock() - before
            steps[kind] += 1
    total = clock() - begin
    num_steps = steps.total() - steps["reset"]
    rows = [
        {
            "action": kind,
            "share": round(steps[kind] / num_steps, 3),
            "us_per_step": round(1e6 * seconds[kind] / steps[kind], 1),
        }
        for kind in sorted(steps, key=lambda kind: -seconds[kind])
    ]
    return {"steps_per_s": num_steps / total}, rows


def _environment(num_products: int, mode: str) -> Any:
    from impala_llm.envs.webshop import WebShopEnv, synthetic_catalogue

    return WebShopEnv(synthetic_catalogue(num_products, seed=0), observation_mode=mode)  # type: ignore[arg-type]


def _record(num_products: int, num_episodes: int) -> list[tuple[int, list[tuple[str, str]]]]:
    """Plays episodes and writes down their actions: (task_id, [(kind of action, action)])."""
    env = _environment(num_products, "text")
    rng = random.Random(0)
    num_goals = len(env.goals)
    return [(task_id, _play(env, task_id, rng)) for task_id in (rng.randrange(num_goals) for _ in range(num_episodes))]


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
        links = shown[2:] if "< prev" not in shown else shown[3:]
        if not links:
            continue
        shown = act("product", rng.choice(links))
        for page in ("description", "features"):
            if rng.random() < 0.3:
                act("sub page", page)
                shown = act("next or prev", "< prev")
        for value in rng.sample(shown[6:], min(len(shown) - 6, rng.choice((0, 1, 2, 3)))):
            act("option", value)
    if env.page == "item":
        act("buy", "buy now")
    return actions


def _measure_load(num_products: int) -> dict[str, float]:
    from impala_llm.envs.webshop.synthetic import make_records

    with tempfile.TemporaryDirectory() as folder:
        for name, records in zip(_FILES, make_records(num_products, seed=0), strict=True):
            (Path(folder) / f"{name}.json").write_text(json.dumps(records))
        child = subprocess.run(
            [sys.executable, "-m", "impala_llm.bench.webshop", folder], check=True, capture_output=True, text=True
        )
    return {f"load_{_short(num_products)}_{unit}": value for unit, value in json.loads(child.stdout).items()}


def _short(number: int) -> str:
    return f"{number // 1000}k" if number % 1000 == 0 else str(number)


def _load(folder: Path) -> dict[str, float]:
    """Loads the files of a folder; seconds, and the peak memory of this process in 10^9 bytes."""
    before = time.perf_counter()
    from impala_llm.envs.webshop import load_catalogue

    catalogue = load_catalogue(*(folder / f"{name}.json" for name in _FILES), seed=0)
    catalogue.search("gift")
    seconds = time.perf_counter() - before
    # Not getrusage: its peak counts what the parent had resident when it started this process.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"s": seconds, "gb": int(status["VmHWM"].split()[0]) * 1024 / 1e9}


if __name__ == "__main__":
    print(json.dumps(_load(Path(sys.argv[1]))))
