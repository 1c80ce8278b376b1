"""An engine of the chaos test: reads weights all the time and looks at every byte.

python -m tests.system.chaos.engine DIRECTORY INDEX
"""

import random
import sys
import time
from pathlib import Path

import numpy as np

from impala_llm.pipeline.shm.run_directory import RunDirectory
from impala_llm.pipeline.weights.board import WeightReader, WeightsError
from tests.system.chaos.content import is_whole
from tests.system.chaos.events import EventLog
from tests.system.chaos.settings import Settings, die_with_parent

MAX_HOLD_S = 0.2


def main(arguments: list[str]) -> None:
    """Until all actors are gone."""
    die_with_parent()
    settings = Settings.load(Path(arguments[0]))
    log = EventLog(settings.log_path(f"engine-{arguments[1]}"))
    run_dir = RunDirectory.attach(settings.run_name)
    reader = WeightReader(run_dir.weights_path)
    log.say("start")
    own: dict[str, np.ndarray] = {}
    while not settings.actors_gone.exists():
        time.sleep(random.uniform(0.0, MAX_HOLD_S))
        if reader.latest() is None:
            continue
        try:
            with reader.lease(timeout_s=5.0) as lease:
                tensors = lease.tensors(verify=False)
                was_whole = is_whole(tensors, lease.version)
                time.sleep(random.uniform(0.0, MAX_HOLD_S))
                if own.keys() != tensors.keys():
                    own = {name: np.empty(data.size, np.uint8) for name, (_, _, data) in tensors.items()}
                lease.copy_into(own)
                copied = {name: (*tensors[name][:2], data) for name, data in own.items()}
                log.say("read", lease.version, was_whole and is_whole(copied, lease.version))
        except WeightsError as error:
            log.say("unreadable", str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
