"""Programs that share a row too wide for one of them: each holds a chunk, all wait for the sums.

The programs of a row are a group, and groups walk over the rows:

    group 0   chunk 0, 1, 2, ...    rows 0, n_groups, 2 n_groups, ...
    group 1   chunk 0, 1, 2, ...    rows 1, n_groups + 1, ...

A program publishes its chunk's partial result, and waits for those of the other chunks. Programs
that wait for one another must all be running. So the grid is no larger than what the GPU holds at
once (a limit of registers a thread makes sure of `programs_per_sm`), and it is launched as a
cooperative grid: the GPU starts all of it or none, whatever else is running. Within a group every
program takes the rows in the same order and publishes before it waits, so no one waits for ever.

Where a row has more chunks than the GPU holds programs, and in Triton's interpreter, whose programs
run one after the other, a kernel is launched twice: first to publish, then to merge and write.

A partial result is two float32 in one 64-bit word, so it is seen whole or not at all, and no fence
is needed. 0 means not there yet, and must be the word of no partial result: a sum of 0 goes with a
maximum of -inf. They are merged in the same order every time, so results do not vary from run to
run.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton.language as tl

from minitx.kernels.triton_rows import exp_below
from minitx.kernels.triton_runtime import IS_INTERPRETED, device_function, launching_on


class Chunks(NamedTuple):
    """How rows are cut, and how many programs every SM can hold at once."""

    BLOCK_N: int
    num_warps: int
    programs_per_sm: int

    @property
    def max_registers(self) -> int:
        """What a thread may use for that: an SM has 65536, given to threads in eights."""
        return 65536 // (self.programs_per_sm * self.num_warps * 32) // 8 * 8


# Programs that an SM holds however small they are, by compute capability (CUDA's cuda_occupancy.h);
# the least of those that there are where it is not listed.
MOST_PROGRAMS = {(8, 0): 32, (8, 9): 24, (9, 0): 32, (10, 0): 32, (10, 3): 32}
LEAST_OF_MOST = 16
MERGED_AT_ONCE = 128  # partial results at least: a wide row has hundreds


@device_function
def publish(word_ptr, a, b):
    """Stores two float32 scalars as one word."""
    high = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_xchg(word_ptr, high | low, sem="relaxed")


@device_function
def await_partials(words_ptr, first, end, a_padding, b_padding, MERGE: tl.constexpr):
    """The partial results of chunks `first` to `end` - 1, two float32 tensors of [MERGE].

    MERGE is a word for each thread, not less: several threads that load the same word may not see
    it change at the same time, and would leave the loop at different times.
    """
    chunks = first + tl.arange(0, MERGE)
    mask = chunks < end
    words = tl.load(words_ptr + chunks, mask=mask, other=1, volatile=True)
    while tl.min(tl.where(words == 0, 0, 1)) == 0:
        words = tl.load(words_ptr + chunks, mask=mask, other=1, volatile=True)
    a = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    b = words.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(mask, a, a_padding), tl.where(mask, b, b_padding)


@device_function
def merge_partials(words_ptr, end, MERGE: tl.constexpr, EXACT: tl.constexpr):
    """(maximum, sum of exponentials relative to it) of chunks 0 to `end` - 1, of which each has
    published its own."""
    row_max = -float("inf")
    row_sum = 0.0
    for first in range(0, end, MERGE):
        m, s = await_partials(words_ptr, first, end, -float("inf"), 0.0, MERGE)
        larger = tl.maximum(row_max, tl.max(m))
        row_sum *= exp_below(row_max, larger, EXACT)
        row_sum += tl.sum(s * exp_below(m, larger, EXACT))
        row_max = larger
    return row_max, row_sum


@device_function
def chunk_of(row, n_chunks):
    """The chunk of `row` that this program holds, in 64 bits.

    It is another one in each of the program's rows: causal rows leave more to do in the first.
    """
    n_groups = tl.num_programs(0) // n_chunks
    return tl.cast((tl.program_id(0) + row // n_groups) % n_chunks, tl.int64)


@functools.cache
def programs_at_once(device: torch.device, chunks: Chunks) -> int:
    """How many programs may wait for one another; none in the interpreter."""
    if IS_INTERPRETED:
        return 0
    properties = torch.cuda.get_device_properties(device)
    room = properties.max_threads_per_multi_processor // (32 * chunks.num_warps)
    most = MOST_PROGRAMS.get((properties.major, properties.minor), LEAST_OF_MOST)
    return properties.multi_processor_count * min(chunks.programs_per_sm, room, most)


def launch_groups(
    launch: Callable[..., None], n_rows: int, n_chunks: int, chunks: Chunks, device: torch.device
) -> None:
    """launch(n_groups, PUBLISH=, WRITE=, BLOCK_N=, MERGE=, num_warps=, ...) once where all of a
    row's chunks can be held at once, twice where they cannot. The grid is n_groups * n_chunks."""
    options = dict(
        BLOCK_N=chunks.BLOCK_N,
        MERGE=max(32 * chunks.num_warps, MERGED_AT_ONCE),
        num_warps=chunks.num_warps,
    )
    n_groups = programs_at_once(device, chunks) // n_chunks
    with launching_on(device):
        if n_groups > 0:
            launch(
                min(n_groups, n_rows),
                PUBLISH=True,
                WRITE=True,
                maxnreg=chunks.max_registers,
                launch_cooperative_grid=True,
                **options,
            )
        else:
            launch(n_rows, PUBLISH=True, WRITE=False, **options)
            launch(n_rows, PUBLISH=False, WRITE=True, **options)
