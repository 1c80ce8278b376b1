"""Numbers in float32 become those that torch makes of them in bfloat16."""

from pathlib import Path

import numpy as np
import pytest
import torch

from impala_llm.pipeline.shm.copy_kernels import bytes_checksum
from impala_llm.pipeline.weights.bfloat16 import convert_bytes
from impala_llm.pipeline.weights.board import WeightPublisher, WeightReader, WeightsError
from impala_llm.pipeline.weights.tensor_writing import TensorPart, TensorSource

SPECIAL = [
    *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000),  # zeros, infinities
    *(0x7F800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001),  # not a number
    *(0x00000001, 0x80000001, 0x00008000, 0x00008001, 0x007FFFFF, 0x807FFFFF),  # denormal
    *(0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFF7F8000),  # half ways, and up to infinity
]


def numbers(count: int) -> np.ndarray:
    bits = np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)
    bits[::3] = np.resize(np.array(SPECIAL, np.uint32), len(bits[::3]))
    return bits.view(np.float32)


def as_torch(source: np.ndarray) -> np.ndarray:
    """The conversion by torch; NaN has many forms."""
    return torch.from_numpy(source).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def assert_converted(target: np.ndarray, source: np.ndarray) -> None:
    found, expected = target.view(np.uint16), as_torch(source)
    is_number = ~np.isnan(source)
    assert np.array_equal(found[is_number], expected[is_number])
    assert (found[~is_number] & 0x7FFF > 0x7F80).all()


@pytest.mark.parametrize("count", [*range(0, 12), 63, 64, 65, 127, 160, 255, 1000, 1023, 100_003])
@pytest.mark.parametrize("offset", [0, 2, 8, 24, 31])
def test_numbers_are_those_of_torch_wherever_they_are_written(count: int, offset: int) -> None:
    source = numbers(count)
    memory = np.full(2 * count + 128, 7, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    target = memory[begin : begin + 2 * count]
    assert convert_bytes(target, source) == bytes_checksum(target)
    assert_converted(np.array(target), source)
    assert (memory[:begin] == 7).all() and (memory[begin + 2 * count :] == 7).all()


def test_all_upper_halves_and_their_half_ways_are_those_of_torch() -> None:
    upper = np.arange(2**16, dtype=np.uint32) << 16
    source = (upper[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1)
    target = np.empty(2 * source.size, np.uint8)
    convert_bytes(target, source.view(np.float32))
    assert_converted(target, source.view(np.float32))


def test_checksums_of_pieces_add_up() -> None:
    source, target = numbers(1003), np.empty(2006, np.uint8)
    cut = 400
    sums = [convert_bytes(target[: 2 * cut], source[:cut]), convert_bytes(target[2 * cut :], source[cut:], cut // 4)]
    assert sum(sums) % 2**64 == bytes_checksum(target)


def test_sizes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in size"):
        convert_bytes(np.empty(7, np.uint8), numbers(4))


def sources(arrays: dict[str, np.ndarray]) -> dict[str, TensorSource]:
    """Converted in one piece, or in several, or written as they are."""
    found: dict[str, TensorSource] = {}
    for i, (name, array) in enumerate(arrays.items()):
        if i % 3 == 2:
            found[name] = ("F32", array.shape, array.view(np.uint8))
        else:
            pieces = [array[j : j + 40] for j in range(0, array.size, 40)]
            found[name] = ("BF16", array.shape, TensorPart(0, 2 * array.size, pieces.__iter__ if i % 3 else array))
    return found


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_version_is_converted_on_its_way_and_damage_to_it_is_noticed(tmp_path: Path, num_threads: int) -> None:
    arrays = {f"{i:02}": numbers(37 * i + 5) for i in range(20)}
    WeightPublisher(tmp_path).publish(sources(arrays), 1, num_threads=num_threads)
    with WeightReader(tmp_path).lease() as lease:
        for i, (name, (dtype, shape, data)) in enumerate(sorted(lease.tensors(verify=True).items())):
            assert shape == arrays[name].shape
            if i % 3 == 2:
                assert dtype == "F32" and np.array_equal(data, arrays[name].view(np.uint8))
            else:
                assert dtype == "BF16"
                assert_converted(np.array(data), arrays[name])
        with (lease.path / "model.safetensors").open("r+b") as file:
            file.seek(-3, 2)
            byte = file.read(1)
            file.seek(-3, 2)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(WeightsError, match="checksum of tensor '19'"):
            lease.tensors(verify=True)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_part_that_does_not_fit_is_an_error_of_any_thread(tmp_path: Path, num_threads: int) -> None:
    tensors = sources({f"{i:02}": numbers(50) for i in range(8)})
    tensors["03"] = ("BF16", (50,), TensorPart(0, 100, numbers(49)))
    with pytest.raises(ValueError, match="a part of 100 bytes came in 98"):
        WeightPublisher(tmp_path).publish(tensors, 1, num_threads=num_threads)
