"""Signal handling that a process inherits from its launcher."""

import signal
import subprocess
import sys
from functools import partial


def test_a_launcher_that_ignores_the_end_of_children_costs_no_exit_code() -> None:
    """SIGCHLD stays ignored over exec, and then a child that was killed would count as one that ended well."""
    code = (
        "import subprocess, sys; from impala_llm.cli import main; main(['--version']); "
        "print(subprocess.run([sys.executable, '-c', 'import os; os.kill(os.getpid(), 9)']).returncode)"
    )
    ignore = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=ignore, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split()[-1] == str(-signal.SIGKILL)
