"""Inputs of the fuzzer for decoders: the same for the same seed."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from impala_llm.pipeline.shm.record import record_bytes
from impala_llm.trajectory import Trajectory

VOCAB_SIZE = 1000
INTEGERS = [0, 1, 2, 3, 7, 8, 10, 11, 16, 63, 64, 127, 128, 255, 256, 4095, 4096, 2**15, 2**16, 2**24, 2**24 + 1]
INTEGERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8]
DEEP = "nested deep"
"""Stands for a value that msgpack can say, and that many a function cannot go through."""
_PACKED_DEEP = msgpack.packb(DEEP)
SPECIAL_FLOATS = [0.0, -0.0, 1.0, -1.0, 1.5, float("nan"), float("inf"), float("-inf"), 1e-320, 1e308]


@dataclass
class Decoder:
    """make: the next input. decode: raises one of `errors` to refuse it, and nothing else. share: of all inputs."""

    make: Callable[[], bytes]
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]


class Source:
    """Random inputs; the same for the same seed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def noise(self, longest: int = 300) -> bytes:
        return self.rng.randbytes(self.rng.randrange(longest))

    def changed(self, valid: bytes, other: bytes = b"", keep_size: bool = False, changes: int = 4) -> bytes:
        """A valid input with a few changes; `other` is what a piece may come from."""
        rng = self.rng
        data = bytearray(valid)
        for _ in range(rng.randint(1, changes)):
            if not data:
                break
            index = rng.randrange(len(data))
            match rng.randrange(5 if keep_size else 9):
                case 0:
                    data[index] ^= 1 << rng.randrange(8)
                case 1:
                    data[index] = rng.randrange(256)
                case 2 | 3:
                    width = rng.choice((2, 4, 8, 8))
                    index -= index % width
                    value = (rng.choice(INTEGERS) * rng.choice((1, 1, -1)) + rng.choice((0, 0, 1, -1))) % (
                        1 << 8 * width
                    )
                    data[index : index + width] = value.to_bytes(width, "little")[: len(data) - index]
                case 4:
                    index -= index % 8
                    data[index : index + 8] = struct.pack("<d", rng.choice(SPECIAL_FLOATS))[: len(data) - index]
                case 5:
                    del data[index:]
                case 6:
                    data += rng.randbytes(rng.choice((1, 8, 64)))
                case 7:
                    del data[index : index + rng.choice((1, 2, 8))]
                case 8:
                    piece = other or valid
                    begin = rng.randrange(len(piece))
                    data[index : index + rng.choice((0, 8))] = piece[begin : begin + rng.randint(1, 40)]
        return bytes(data)

    def value(self, depth: int = 0) -> object:
        """Something that msgpack and JSON can say, mostly."""
        rng = self.rng
        match rng.randrange(12 if depth < 3 else 8):
            case 0:
                return None
            case 1:
                return rng.random() < 0.5
            case 2 | 3:
                return rng.choice(INTEGERS) * rng.choice((1, -1)) if rng.random() < 0.9 else rng.randrange(1 << 63)
            case 4:
                return rng.choice(SPECIAL_FLOATS)
            case 5:
                return rng.choice(("", "a", "toy", DEEP, "../x", "\0", "\u00e9", "x" * 5000, "model.safetensors"))
            case 6:
                return rng.randbytes(rng.randrange(60))
            case 7:
                return rng.randrange(50)
            case 8 | 9 | 10:
                return [self.value(depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 5, 6)))]
        return {rng.choice(("a", "b", "", "version", 3)): self.value(depth + 1) for _ in range(rng.randrange(3))}

    def packed(self, values: object) -> bytes:
        """msgpack; what cannot be said becomes noise, and DEEP an array in an array in an array ..."""
        try:
            data: bytes = msgpack.packb(values)
        except (ValueError, OverflowError):
            return self.noise()
        deep = b"\x91" * self.rng.choice((10, 500, 995, 1010, 1022, 1500)) + b"\x90"
        data = data.replace(_PACKED_DEEP, deep, 1)
        return data

    def said_in_json(self, values: object) -> bytes:
        """As `packed`, and bytes as their hexadecimal digits."""
        depth = self.rng.choice((500, 960, 970, 980, 985, 990, 995, 100_000))
        text = json.dumps(values, default=lambda value: value.hex())
        return text.replace(json.dumps(DEEP), "[" * depth + "]" * depth, 1).encode()

    def replaced(self, values: Sequence[object], first: int = 0) -> list[object]:
        """With another value, or one more or less, here or further inside; mostly not below the index `first`."""
        rng = self.rng
        new = list(values)
        if rng.random() < 0.1:
            first = 0
        if first >= len(new) or rng.random() < 0.1:
            new.insert(rng.randint(min(first, len(new)), len(new)), self.value())
            return new
        index = rng.randrange(first, len(new))
        old = new[index]
        if rng.random() < 0.1:
            del new[index]
        elif isinstance(old, list) and rng.random() < 0.6:
            new[index] = self.replaced(old)
        elif isinstance(old, dict) and rng.random() < 0.6:
            new[index] = {**old, rng.choice(["a", *old]): self.value()}
        else:
            new[index] = self.value()
        return new


def sample_trajectory(rng: random.Random, ticket_id: int = 3) -> Trajectory:
    size = rng.randrange(6, 40)
    mask = np.zeros(size, np.bool_)
    turns = np.array([[2, 2 + size // 4], [size // 2, size]], np.int32)
    for start, end in turns:
        mask[start:end] = True
    return Trajectory(
        tokens=np.arange(size, dtype=np.int32) * 7 % VOCAB_SIZE,
        action_mask=mask,
        behaviour_log_probs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 4, -1).astype(np.int32),
        rewards=np.where(mask, 0.25, 0).astype(np.float32),
        turns=turns,
        bootstrap=False,
        episode_id="episode",
        group_id=1,
        task_id=2,
        env="toy",
        actor_id="actor-0",
        ticket_id=ticket_id,
        signature="r\u00f6d shoes",
        score=0.5,
        success=True,
        stats={"steps": 2.0, "reward": 0.5},
    )


def changed_record(source: Source) -> bytes:
    """A record, mostly of the length that its header says."""
    valid = record_bytes(sample_trajectory(source.rng))
    kind = source.rng.random()
    if kind < 0.05:
        return source.noise()
    if kind < 0.2:
        return source.changed(valid)
    if kind < 0.5:
        return source.changed(valid[:88], keep_size=True) + valid[88:]
    data = source.changed(valid[88:], keep_size=True)
    return valid[:88] + data
