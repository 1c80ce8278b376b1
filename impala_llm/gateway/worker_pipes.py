"""A pipe for the output of a process.

asyncio's own pipes are waited for with the process, and one that the process has started may hold them open.
"""

import asyncio
import os


async def open_pipe(longest_line: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.BaseTransport, int]:
    """Open a pipe. Returns its stream, the transport that ends it, and the descriptor of its other end."""
    reading, writing = os.pipe()
    stream = asyncio.StreamReader(longest_line)
    file = os.fdopen(reading, "rb", 0)
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), file
        )
    except BaseException:
        file.close()
        os.close(writing)
        raise
    return stream, transport, writing
