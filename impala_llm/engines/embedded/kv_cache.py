"""Keys and values of every session, in blocks of a fixed number of tokens out of one preallocated pool.

Invariant: all values in the pool are finite, used or not. Attention reads the unused end of a block too and gives it
probability 0, and 0 x NaN would be NaN; after a write that may have been NaN the session must be cleared (`clear`).

The unit is a block and not one range a session, because decoding is bound by the bytes it reads: with blocks a step
reads only what the sessions' lengths need, and not all of them padded to the longest.
"""

import heapq

import numpy as np
import torch

BLOCK = 64
"""Tokens in a block."""


class KVCache:
    """Pool [layers, 2, blocks + 1, kv_heads, BLOCK, head_dim]; 2: keys, values.

    It has room for `slots` sessions of `max_length` tokens. The last block belongs to no session: the padding of a
    batch is written there.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        max_length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        blocks_per_slot = -(-max_length // BLOCK)
        self.num_blocks = slots * blocks_per_slot
        shape = (layers, 2, self.num_blocks + 1, kv_heads, BLOCK, head_dim)
        if device.type == "cpu" and dtype == torch.float32:
            # numpy's zeros take no memory until a session writes there: most are far shorter than max_length.
            self._pool = torch.from_numpy(np.zeros(shape, np.float32))
        else:
            self._pool = torch.zeros(shape, dtype=dtype, device=device)
        self._flat = [layer.view(-1, head_dim) for layer in self._pool]
        self._by_head = [tuple(part.view(-1, BLOCK, head_dim) for part in layer) for layer in self._pool]
        self._arrays = list(self._pool.numpy()) if device.type == "cpu" and dtype == torch.float32 else []
        self.slots = slots
        self.max_length = max_length
        self.kv_heads = kv_heads
        self.dtype = dtype
        self.table = np.full((slots, blocks_per_slot), self.num_blocks, dtype=np.int64)
        """int64[slots, blocks of a slot]: the blocks of each session, in order; `num_blocks` where there is none."""
        self._owned = np.zeros(slots, dtype=np.int64)
        # A heap, so that the lowest free block is used first and used blocks lie close together.
        self._free = list(range(self.num_blocks))
        heads = np.arange(kv_heads, dtype=np.int64) * BLOCK
        self._head_rows = np.concatenate([heads, heads + (self.num_blocks + 1) * kv_heads * BLOCK])

    def layer_array(self, layer: int) -> np.ndarray:
        """View a layer's part of a CPU's pool, writable: [2, blocks + 1, kv_heads, BLOCK, head_dim]."""
        array: np.ndarray = self._arrays[layer]
        return array

    @property
    def nbytes(self) -> int:
        """Size of the pool in bytes."""
        return self._pool.nbytes

    def reserve(self, slot: int, length: int) -> None:
        """Give a session blocks for `length` tokens, length <= max_length."""
        for index in range(int(self._owned[slot]), -(-length // BLOCK)):
            self.table[slot, index] = heapq.heappop(self._free)
            self._owned[slot] = index + 1

    def free(self, slot: int) -> None:
        """Free a session's blocks."""
        for block in self.table[slot, : self._owned[slot]]:
            heapq.heappush(self._free, int(block))
        self.table[slot] = self.num_blocks
        self._owned[slot] = 0

    def drop(self) -> None:
        """Give the memory of the pool back. Blocks can still be freed, and nothing else be done."""
        self._pool, self._flat, self._by_head, self._arrays = torch.empty(0), [], [], []

    def clear(self, slot: int) -> None:
        """Zero a session's blocks, which may hold values that are not finite."""
        self._pool[:, :, torch.from_numpy(self.table[slot, : self._owned[slot]])] = 0

    def rows(self, slots: np.ndarray, positions: np.ndarray, padding: int) -> np.ndarray:
        """Compute the rows for `write`.

        Args:
            slots, positions: int64[N], of each token.
            padding: further tokens, which go to the last block.

        Returns:
            int64[(N + padding) * 2 * kv_heads].
        """
        blocks = np.concatenate([self.table[slots, positions // BLOCK], np.full(padding, self.num_blocks)])
        offsets = np.concatenate([positions % BLOCK, np.zeros(padding, dtype=np.int64)])
        rows: np.ndarray = (blocks * (self.kv_heads * BLOCK) + offsets)[:, None] + self._head_rows
        return rows.reshape(-1)

    def write(self, layer: int, rows: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store the keys and values of N tokens, contiguous [N, 2 * kv_heads, head_dim] with the keys first."""
        flat = keys_values.view(-1, keys_values.shape[-1])
        self._flat[layer].index_copy_(0, rows, flat.to(self.dtype))

    def first_blocks(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks 0 .. count - 1: views [count * kv_heads, BLOCK, head_dim]."""
        keys, values = self._by_head[layer]
        return keys[: count * self.kv_heads], values[: count * self.kv_heads]

    def gather_blocks(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Copy [2, len(blocks), kv_heads, BLOCK, head_dim] of the blocks int64[...]."""
        return self._pool[layer].index_select(1, blocks)
