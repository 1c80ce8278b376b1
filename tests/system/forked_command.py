"""The command `impala-llm` in a process of its own that begins with its modules imported, torch among them.

Such a process is the fork of one that has imported them and done nothing else, so that a refusal costs its own work and
no start. Run as a program, this is that process: it answers each line of JSON with another.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Command = Callable[[list[str], Path], "subprocess.CompletedProcess[str]"]
"""Called with the words of a command and its current directory."""


@contextlib.contextmanager
def forked_command(environment: Mapping[str, str]) -> Iterator[Command]:
    """The command, with this environment."""
    program = [sys.executable, __file__]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as server:

        def call(words: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
            assert server.stdin is not None and server.stdout is not None
            print(json.dumps([words, str(folder)]), file=server.stdin, flush=True)
            return subprocess.CompletedProcess(words, *json.loads(server.stdout.readline()))

        yield call


def serve() -> None:
    """Run the command of each line of stdin, and print its status and what it has printed."""
    import impala_llm.algorithms.registry
    import impala_llm.launch
    import impala_llm.preflight  # noqa: F401
    from impala_llm import cli

    gc.freeze()  # a fork that looks through all that was imported copies its memory
    for line in sys.stdin:
        words, folder = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                os.chdir(folder)
                for own, wanted in enumerate((os.open(os.devnull, os.O_RDONLY), out.fileno(), err.fileno())):
                    os.dup2(wanted, own)
                sys.argv[1:] = words
                sys.exit(cli.main())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            printed = [file.seek(0) or file.read().decode() for file in (out, err)]
        print(json.dumps([status, *printed]), flush=True)


if __name__ == "__main__":
    serve()
