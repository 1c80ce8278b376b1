"""Entry of the console script `impala-llm`.

The modules of the commands are imported inside of `main`: that takes a second, in which Ctrl-C is not an error either.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Args:
        argv: its words; None: those of this process.

    Returns:
        The exit code: 2 for bad input, 130 after Ctrl-C, 141 if the reader of its output has ended.
    """
    atexit.register(gc.freeze)  # the collections at the end of the process took longer than what many commands do
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers has a bar for every file that it reads or writes
    try:
        from impala_llm.commands.parser import run_command
        from impala_llm.processes.supervised import keep_exit_codes

        keep_exit_codes()
        code = run_command(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nor is another one an error
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Else the interpreter tries to print the rest once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
