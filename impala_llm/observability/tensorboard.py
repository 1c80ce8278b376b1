"""TensorBoard event files of a run's metrics."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from impala_llm.observability.writers import last_step

FLUSH_S = 10
"""An open TensorBoard is at most this many seconds behind."""


class TensorBoardWriter:
    """The metric writer `tensorboard`. A run that is resumed appends; what it makes again replaces the old."""

    def __init__(self, directory: Path) -> None:
        last = last_step(directory)
        first = 0 if last is None else last + 1  # of a run that begins again there may be events
        self._events = SummaryWriter(log_dir=str(directory), flush_secs=FLUSH_S, purge_step=first)

    def write(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, global_step=step, walltime=time_s)

    def write_text(self, name: str, text: str) -> None:
        # Indented it is shown as it is: the text plugin renders Markdown.
        self._events.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()))

    def close(self) -> None:
        self._events.close()
