"""How many bytes does PyTorch's CUDA caching allocator count for a sequence of tensors?

vLLM prints as weights what `torch.cuda.memory_allocated` says, and that counts whole blocks, not
tensors. Rules of the default configuration (c10/cuda/CUDACachingAllocator.cpp):

- a size is rounded up to 512 B;
- up to 1 MiB comes from the small pool, cut from segments of 2 MiB; more from the large pool:
  below 10 MiB cut from segments of 20 MiB, from 10 MiB on a segment of its own, rounded up to 2 MiB;
- the smallest free block that is large enough is taken, the one of the lowest address among equals;
- a block is split where 512 B (small pool) or more than 1 MiB (large pool) would be left, else it is
  handed out and counted whole;
- a freed block joins its free neighbours of the same segment.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from rayserve.units import round_up

ROUND_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
OWN_SEGMENT_BYTES = 10 * 2**20
SEGMENT_ROUND_BYTES = 2 * 2**20


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class CachingAllocator:
    """The allocator's books for one GPU and stream; no memory is touched.

    A tensor is known by its address. Time per call: logarithmic in the number of free blocks, which
    stays at a few dozen while weights load.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, _Block] = {}
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._blocks: dict[int, _Block] = {}

    def allocate(self, size_bytes: int) -> int:
        """The address of a new tensor of `size_bytes`."""
        size = max(ROUND_BYTES, round_up(size_bytes, ROUND_BYTES))
        small = size <= SMALL_BYTES
        block = self._take(size, small=small) or self._segment(size, small=small)
        left = block.size - size
        if left >= ROUND_BYTES if small else left > SMALL_BYTES:
            rest = _Block(block.address + size, left, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._put(rest)
        block.free = False
        self._live[block.address] = block
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block.address

    def release(self, address: int) -> None:
        """Give back the tensor at `address`."""
        block = self._live.pop(address)
        self.allocated_bytes -= block.size
        if block.before is not None and block.before.free:
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            self._forget(block.after)
            block = self._join(block, block.after, known=False)
        self._put(block)

    def _join(self, first: _Block, second: _Block, *, known: bool = True) -> _Block:
        if known:
            self._forget(first)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _take(self, size: int, *, small: bool) -> _Block | None:
        free = self._free[small]
        at = bisect.bisect_left(free, (size, 0))
        if at == len(free):
            return None
        return self._blocks.pop(free.pop(at)[1])

    def _segment(self, size: int, *, small: bool) -> _Block:
        if small:
            segment = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = round_up(size, SEGMENT_ROUND_BYTES)
        block = _Block(self.reserved_bytes, segment, small)
        self.reserved_bytes += segment
        return block

    def _put(self, block: _Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.address))
        self._blocks[block.address] = block

    def _forget(self, block: _Block) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.address))]
        del self._blocks[block.address]
