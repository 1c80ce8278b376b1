"""The process group of a learner: whether two ranks on this host find each other.

Invariant: it leaves nothing behind, and torch computes in child processes alone.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from impala_llm.config import ConfigError
from impala_llm.gpus import visible_gpus
from impala_llm.launch import plan
from impala_llm.processes.child_processes import Child, end
from impala_llm.settings import PACKAGE, Config

LIMIT_S = 180.0
"""Seconds that both may take on a busy machine, the import of torch included."""
RANK_PROBE = """
import sys
from impala_llm.learning.ranks.parallel import Ranks
ranks = Ranks(sys.argv[1], timeout_s=float(sys.argv[2]))
total = ranks.sum([ranks.rank + 1.0])[0]
ranks.close()
sys.exit(0 if total == 3.0 else f"the ranks 1 and 2 have the sum {total}")
"""


def look(config: Config, overrides: Sequence[str], num_gpus: int) -> tuple[str, list[str]]:
    """Two ranks, started as the learner's are, sum a number: by NCCL where there are two GPUs, else by gloo.

    Args:
        num_gpus: that torch can use.

    Returns:
        The state in words, and problems, each with what to do.
    """
    if config.learner.num_processes == 1 and config.learner.sharding != "fsdp2":  # which has a group of one
        return "not tried: a learner of one process needs none (learner.num_ranks=2 tries it)", []
    is_nccl = config.model.device != "cpu" and num_gpus > 1
    kind = "NCCL" if is_nccl else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        try:
            learner = plan(config, overrides, ())[0]
        except ConfigError as error:
            return "not tried", [str(error)]
        environment = {**learner.environment, "PYTHONPATH": str(PACKAGE.parent)}
        if is_nccl:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[:2])
        command = [sys.executable, "-c", RANK_PROBE, "cuda" if is_nccl else "cpu", "60"]
        ranks = Child("ranks", command, Path(folder) / "ranks.log", environment, 2, Path(folder))
        interface = environment.get(f"{kind.upper()}_SOCKET_IFNAME")
        state = f"{kind}, a sum over 2 ranks" + (f" over {interface}" if interface else "")
        began = time.monotonic()
        try:
            ranks.start()
            while ranks.poll() is None and time.monotonic() < began + LIMIT_S:
                time.sleep(0.05)
            code = ranks.poll()
        finally:
            end([ranks], polite=False)
        if code == 0:
            return f"{state} in {time.monotonic() - began:.1f} s with the start of both", []
        why = f"no answer in {LIMIT_S:.0f} s" if code is None else f"exit code {code}"
        fix = f"does {kind.upper()}_SOCKET_IFNAME name an interface of this host, and does a firewall let it through?"
        return state, [f"it failed ({why}{ranks.last_log_line()}): {fix}"]
