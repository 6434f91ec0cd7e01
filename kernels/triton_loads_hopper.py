"""The warp that loads, in Triton's attention forward on Hopper.

It takes blocks of queries, tells the warpgroups that compute (triton_attention_hopper.py) which
they are, and has TMA bring what those read; triton_hopper_tiles.py says how loads are handed over.
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from minitx.kernels.triton_hopper_tiles import (
    ROWS,
    advance,
    block_and_head,
    key_tiles,
    load_tile,
    write_number,
)

Q_STAGES = gl.constexpr(2)  # blocks of queries: this one and the next
BLOCK = gl.constexpr(3)  # what is told of a block: first query (-1: no more), batch and head


@gluon.jit
def load_blocks(
    loads, given, IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp's work: for block after block which it is, and its queries; then keys and values,
    from the last tile to the first."""
    q_desc, k_desc, v_desc, taken_ptr, GROUP_HEADS = loads
    _pointers, bars, tiles, sizes, _scales = given
    q_full, q_empty, full, empty, work_full, work_empty = bars
    q_tiles, k_tiles, v_tiles, work = tiles
    Hq, Sq, Skv, n_blocks, n_heads, heads_per_wave, n_work = sizes
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    TILE_BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * 2
    stage = 0
    phase = 1  # every stage is empty at first
    q_stage = 0
    q_phase = 1
    place = gl.program_id(0)
    while place < n_work:
        block, head = block_and_head(place, n_blocks, n_heads, heads_per_wave)
        b = head // Hq
        h = head % Hq
        start_m = (n_blocks - 1 - block) * BLOCK_M  # the last queries see most keys
        mbarrier.wait(work_empty.index(q_stage), q_phase)
        write_number(work, q_stage * BLOCK, start_m)
        write_number(work, q_stage * BLOCK + 1, b)
        write_number(work, q_stage * BLOCK + 2, h)
        mbarrier.arrive(work_full.index(q_stage), count=1)
        mbarrier.wait(q_empty.index(q_stage), q_phase)
        bar = q_full.index(q_stage)
        mbarrier.expect(bar, BLOCK_M * HEAD_DIM * 2)
        for g in gl.static_range(GROUPS):
            load_tile(
                q_desc, [b, h, start_m + g * ROWS, 0], bar, q_tiles.index(q_stage * GROUPS + g)
            )
        q_stage, q_phase = advance(q_stage, q_phase, Q_STAGES)
        if n_work > gl.num_programs(0):
            place = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1)
        else:  # none is left to take
            place = n_work
        kv_h = h // GROUP_HEADS
        _n_bulk, n_tiles = key_tiles(start_m, BLOCK_M, Sq, Skv, IS_CAUSAL, BLOCK_N)
        for i in range(n_tiles + 1):
            first = (n_tiles - 1 - i) * BLOCK_N
            has_keys = i < n_tiles
            has_values = i > 0
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, 2 * TILE_BYTES, pred=has_keys & has_values)
            mbarrier.expect(bar, TILE_BYTES, pred=has_keys != has_values)
            load_tile(k_desc, [b, kv_h, first, 0], bar, k_tiles.index(stage), pred=has_keys)
            at = [b, kv_h, first + BLOCK_N, 0]
            load_tile(v_desc, at, bar, v_tiles.index(stage), pred=has_values)
            stage, phase = advance(stage, phase, STAGES)
    mbarrier.wait(work_empty.index(q_stage), q_phase)
    write_number(work, q_stage * BLOCK, -1)
    mbarrier.arrive(work_full.index(q_stage), count=1)
