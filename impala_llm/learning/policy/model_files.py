"""Files of a Hugging Face directory: those beside its weights, and checksums that tell models apart. No torch here."""

import zlib
from pathlib import Path

VALUE_HEAD_FILE = "value_head.safetensors"
_PIECES, _PIECE = 1024, 4096
"""Number of pieces of a weights file that its fingerprint is computed from, and bytes of each: a file of up to 4 MB is
read as a whole."""


def policy_files(directory: Path) -> dict[str, bytes]:
    """Files of a policy's directory beside the weights: configuration and tokenizer, by name."""
    suffixes = {".json", ".jinja", ".txt", ".model"}
    skipped = {"training.json", "evaluation.json"}  # of other weights, as an index of their shards is
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.is_file() and path.suffix in suffixes and path.name not in skipped
        if not path.name.endswith(".index.json")
    }


def weight_files(directory: Path) -> list[Path]:
    """Files of the weights in a Hugging Face directory, but for those of a value head."""
    files = sorted((*directory.glob("*.safetensors"), *directory.glob("*.bin")))
    return [path for path in files if path.name != VALUE_HEAD_FILE]


def base_checksum(directory: Path) -> int:
    """Checksum of the weights in a Hugging Face directory, by pieces of each file: quick for any size."""
    found = 0
    for path in weight_files(directory):
        size = path.stat().st_size
        found = zlib.crc32(f"{path.name} {size}".encode(), found)
        with path.open("rb") as file:
            for number in range(_PIECES):
                file.seek(number * size // _PIECES)
                found = zlib.crc32(file.read(_PIECE), found)
    return found


def model_checksum(directory: Path) -> int:
    """Checksum of the model in a Hugging Face directory: of its weights, see `base_checksum`, its configuration and its
    tokenizer. It is the same wherever the directory lies."""
    found = base_checksum(directory)
    for name, content in policy_files(directory).items():
        found = zlib.crc32(content, zlib.crc32(name.encode(), found))
    return found
