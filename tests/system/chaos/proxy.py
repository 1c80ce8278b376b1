"""A bad network between some actors and their ranks: it cuts, drops, repeats, reorders, truncates and flips bits.

    python -m tests.system.chaos.proxy DIRECTORY

It speaks ZMTP 3 (RFC 23) as far as frames go, so that it can treat whole messages badly and not only bytes. What is
repeated comes from the same actor process, in the same direction, up to seconds later and through a later connection.
"""

import asyncio
import contextlib
import random
import sys
from pathlib import Path

from impala_llm.pipeline.shm.run_directory import RunDirectory
from tests.system.chaos.events import EventLog
from tests.system.chaos.settings import NUM_RANKS, Settings, die_with_parent

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
RATES = {
    "drop": 0.01,
    "duplicate": 0.01,
    "replay": 0.01,
    "reorder": 0.01,
    "truncate": 0.005,
    "flip": 0.01,
    "noise": 0.002,
    "cut": 0.003,
    "half": 0.002,
}
"""Share of messages: lost; sent twice; sent again later; sent after the next one; cut short; a bit changed; noise in
the stream, then cut; connection cut; connection cut in the middle of the message."""
MAX_DELAY_S = 6.0
NOISE_S = (0.1, 2.0)


def frame_bytes(body: bytes, flags: int) -> bytes:
    flags &= ~_LONG
    if len(body) > 255:
        return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def message_bytes(frames: list[bytes]) -> bytes:
    return b"".join(frame_bytes(body, _MORE if i + 1 < len(frames) else 0) for i, body in enumerate(frames))


class Connection:
    """One actor's, and ours to the rank. writers: towards the rank, towards the actor."""

    def __init__(self, to_rank: asyncio.StreamWriter, to_actor: asyncio.StreamWriter) -> None:
        self.writers = (to_rank, to_actor)
        self.identity = b""

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.log = EventLog(settings.log_path("proxy"))
        self.random = random.Random(f"{settings.seed} proxy")
        self.run_dir = RunDirectory.attach(settings.run_name)
        self.latest: dict[bytes, Connection] = {}
        """By the routing id of the actor process."""

    async def run(self) -> None:
        servers = []
        for rank in range(NUM_RANKS):
            path = self.settings.proxy_path(rank)
            path.unlink(missing_ok=True)
            target = self.run_dir.endpoint(rank).removeprefix("ipc://")
            servers.append(await asyncio.start_unix_server(self.serve(target), path))
        await asyncio.gather(*(server.serve_forever() for server in servers))

    def serve(self, target: str):
        async def handle(from_actor: asyncio.StreamReader, to_actor: asyncio.StreamWriter) -> None:
            try:
                from_rank, to_rank = await asyncio.open_unix_connection(target)
            except OSError:
                to_actor.transport.abort()
                return
            connection = Connection(to_rank, to_actor)
            pumps = [
                asyncio.create_task(self.pump(connection, from_actor, 0)),
                asyncio.create_task(self.pump(connection, from_rank, 1)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            connection.cut()
            await asyncio.gather(*pumps, return_exceptions=True)

        return handle

    async def pump(self, connection: Connection, reader: asyncio.StreamReader, direction: int) -> None:
        writer = connection.writers[direction]
        held: bytes | None = None
        frames: list[bytes] = []
        with contextlib.suppress(OSError, EOFError):
            left = _GREETING_BYTES
            while left:
                # In pieces: each side waits for the beginning of the other's.
                piece = await reader.read(left)
                if not piece:
                    return
                left -= len(piece)
                writer.write(piece)
            while True:
                flags = (await reader.readexactly(1))[0]
                size = int.from_bytes(await reader.readexactly(8 if flags & _LONG else 1), "big")
                body = await reader.readexactly(size)
                if flags & _COMMAND:
                    if direction == 0:
                        self.introduce(connection, body)
                    writer.write(frame_bytes(body, flags))
                    continue
                frames.append(body)
                if flags & _MORE:
                    continue
                message, frames = frames, []
                what = self.choose()
                if what:
                    self.log.say(what, direction)
                if what == "reorder" and held is None:
                    held = message_bytes(message)
                    continue
                self.forward(connection, direction, message, what)
                if held is not None:
                    writer.write(held)
                    held = None
                await writer.drain()

    def introduce(self, connection: Connection, command: bytes) -> None:
        at = command.find(b"Identity")
        if command.startswith(b"\x05READY") and at >= 0:
            size = int.from_bytes(command[at + 8 : at + 12], "big")
            connection.identity = command[at + 12 : at + 12 + size]
            self.latest[connection.identity] = connection

    def choose(self) -> str:
        """Choose the fault of a message; mostly none."""
        if self.settings.calm.exists():
            return ""
        kinds = [*RATES, ""]
        return self.random.choices(kinds, [*RATES.values(), 1 - sum(RATES.values())])[0]

    def forward(self, connection: Connection, direction: int, message: list[bytes], what: str) -> None:
        writer = connection.writers[direction]
        whole = message_bytes(message)
        match what:
            case "drop":
                return
            case "duplicate":
                writer.write(whole + whole)
            case "replay":
                writer.write(whole)
                delay = self.random.uniform(0.1, MAX_DELAY_S)
                asyncio.get_running_loop().call_later(delay, self.replay, connection.identity, direction, whole)
            case "truncate":
                index = self.random.randrange(len(message))
                message[index] = message[index][: self.random.randrange(len(message[index]) + 1)]
                writer.write(message_bytes(message))
            case "flip":
                index = self.random.randrange(len(message))
                changed = bytearray(message[index])
                if changed:
                    changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
                message[index] = bytes(changed)
                writer.write(message_bytes(message))
            case "noise":
                # Both ends have lost the frames' borders for good: what follows is noise, too, until it is cut.
                writer.write(self.random.randbytes(self.random.randrange(1, 200)))
                asyncio.get_running_loop().call_later(self.random.uniform(*NOISE_S), connection.cut)
            case "cut":
                connection.cut()
            case "half":
                writer.write(whole[: len(whole) // 2])
                writer.close()
            case _:
                writer.write(whole)

    def replay(self, identity: bytes, direction: int, whole: bytes) -> None:
        connection = self.latest.get(identity)
        if connection is not None and not connection.writers[direction].is_closing():
            self.log.say("replayed", direction)
            connection.writers[direction].write(whole)


def main(arguments: list[str]) -> None:
    die_with_parent()
    asyncio.run(Proxy(Settings.load(Path(arguments[0]))).run())


if __name__ == "__main__":
    main(sys.argv[1:])
