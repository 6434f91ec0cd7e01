"""Keys that blocks share out, where queries are few: into how many shares, and the builder of the
kernel that makes one output of the parts that they give.

A block of the forward reads all keys of its queries. A single query of 16 heads then keeps 16
multiprocessors busy, however many keys it has. So a head's keys are cut into shares of neighbouring
tiles; the forward gives a part of each (its `IS_SHARED`), and another launch puts them together
(Dao et al. 2023, "Flash-Decoding"):

    top = max_s m_s,  w_s = b^(m_s - top),  total = sum_s w_s sum_s
    out = (sum_s w_s acc_s) / total,  lse = (top + log_b(total)) / log_b(e)

with a part's sums acc_s and sum_s relative to its maximum m_s. That is exact where an lse of each
part would not be: of huge scores it rounds thousands away, and with them how much each part weighs.
A row whose total is 0, without keys or with scores of -inf alone, is 0 as in a forward that shares
nothing. NaN of a part is in the sum whatever the part weighs, and so is what overflowed in it: its
sums are relative to its own maximum, not to the row's.

Parts lie in float32 [shares * B, Hq, Sq, HEAD_DIM], maxima and sums in [shares * B, Hq, Sq, 2]. One
query of grouped heads lies there as Hkv heads of Hq / Hkv queries, as which it is asked: it reads
all keys, so the heads of a group are to the kernel queries of one tile, and their keys are read
once. In memory that is the same.
"""

from typing import Any, NamedTuple

from minitx.kernels.tilelang_products import (
    make_base,
    make_tensor,
    part_tensors,
    place,
    row_tensor,
    sizes,
)
from minitx.kernels.tilelang_runtime import Language

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false


class Sharing(NamedTuple):
    """Into how many shares keys are cut, by lengths alone. How many it takes to keep a GPU busy
    hangs on batch and heads too, but a row's bits must not change with what is computed beside it.
    """

    max_queries: int
    min_keys: int  # of a share: below, what a block begins and ends with costs more than it gains
    keys_a_query: int  # of a share, at least: a part is written and read, as large as its queries
    max_shares: int  # for a tile of queries; for more tiles in all


# A single query's part is nothing to its keys. Where there are heads enough, as in batches of 8,
# sharing gains nothing and costs a pass of the parts: 18 % for 256 queries at 16,384 keys. With one
# batch it gains most of the time there (both measured: benchmarks/NOTES.md). Few queries wait for
# their keys, and keep the memory busy with half of the shares.
SHARINGS = (Sharing(1, 512, 0, 128), Sharing(64, 512, 32, 32), Sharing(512, 2048, 16, 8))
# Of fewer keys one block is done before the host has launched twice.
FEWEST_KEYS = 4096
FEW_TILE = 64  # queries, for which the forward has tiles of their own
CHUNK_TILE = 128  # queries


class MergeTile(NamedTuple):
    """BLOCK_M queries of a head, and at once `lanes` parts of each."""

    max_shares: int
    BLOCK_M: int
    lanes: int


ONE_QUERY, MORE_QUERIES = MergeTile(128, 1, 8), MergeTile(32, 8, 1)
UNROLLED = 4  # parts of a lane whose loads are in flight together


def count_shares(Sq: int, Skv: int, BLOCK_N: int) -> int:
    """Into how many shares, none of them empty, the keys are cut; 1 if that does not pay."""
    sharing = next((s for s in SHARINGS if s.max_queries >= Sq), None)
    if sharing is None:
        return 1
    min_keys = max(sharing.min_keys, sharing.keys_a_query * Sq)
    if Skv < max(2 * min_keys, FEWEST_KEYS):
        return 1
    tiles, most = -(-Skv // BLOCK_N), max(sharing.max_shares // -(-Sq // CHUNK_TILE), 1)
    share = max(-(-min_keys // BLOCK_N), -(-tiles // most))
    return -(-tiles // share)


def build_attention_merge(
    lang: Language, *, dtype: str, HEAD_DIM: int, max_shares: int, BLOCK_M: int, lanes: int
) -> Any:
    """out [B, Hq, Sq, D] and lse [B, Hq, Sq] from contiguous parts and stats, as above."""
    import tilelang.language as T

    base = make_base(dtype)
    tensor = make_tensor(lang, dtype)
    B, Hq, Sq, P, Hp, Sp = sizes("B", "Hq", "Sq", "P", "Hp", "Sp")
    of_parts, of_stats = part_tensors(P, Hp, Sp, HEAD_DIM)
    minus_inf = -T.infinity("float32")
    threads = BLOCK_M * lanes * 32

    def spread(tile: Any) -> None:
        """A warp for each lane; every head dim is a multiple of 32."""
        if not lang.on_cpu:

            def owner(i: Any, lane: Any, d: Any) -> tuple[Any, Any]:
                return (i * lanes + lane) * 32 + d % 32, d // 32

            layout = T.Fragment((BLOCK_M, lanes, HEAD_DIM), forward_fn=owner)
            T.annotate_layout({tile: layout})

    @T.prim_func
    def attention_merge(
        parts: of_parts,
        stats: of_stats,
        out: tensor("out", B, Hq, Sq),
        lse: row_tensor("lse", B, Hq, Sq),
    ):
        T.annotate_pass_configs(
            {
                "tl.disable_warp_specialized": True,
                # Loads stand under conditions of their own.
                "tl.disable_safe_memory_legalize": True,
            }
        )
        with T.Kernel(B * Hq * T.ceildiv(Sq, BLOCK_M), threads=threads) as block:
            row_max = lang.tile((BLOCK_M, max_shares), "float32")
            row_sum = lang.tile((BLOCK_M, max_shares), "float32")
            top = lang.tile((BLOCK_M,), "float32")
            shift = lang.tile((BLOCK_M,), "float32")
            total = lang.tile((BLOCK_M,), "float32")
            weights = lang.shared((BLOCK_M, max_shares), "float32")
            sums = lang.tile((BLOCK_M, lanes, HEAD_DIM), "float32")
            acc = lang.tile((BLOCK_M, HEAD_DIM), "float32")
            spread(sums)

            tile, block_head, block_batch = place(block, T.ceildiv(Sq, BLOCK_M), Hq)
            # Variables: TileLang would prove things of the divisions wherever these are used.
            num_shares = T.alloc_var("int32", init=T.truncdiv(P, B))
            batch = T.alloc_var("int32", init=block_batch)
            head = T.alloc_var("int32", init=block_head)
            m_start = T.alloc_var("int32", init=tile * BLOCK_M)
            # Of one query the heads may lie as queries of fewer heads.
            is_one = BLOCK_M == 1
            h = T.alloc_var("int32", init=T.truncdiv(head, Sp) if is_one else head)
            m = T.alloc_var("int32", init=T.truncmod(head, Sp) if is_one else m_start)

            T.fill(row_max, minus_inf)
            T.fill(row_sum, 0)
            for i, s in lang.each(BLOCK_M, max_shares):
                if (s < num_shares) & (m_start + i < Sq):
                    row_max[i, s] = stats[s * B + batch, h, m + i, 0]
                    row_sum[i, s] = stats[s * B + batch, h, m + i, 1]
            T.reduce_max(row_max, top, dim=1)
            for i in lang.each(BLOCK_M):
                # With no key seen, -inf - -inf would be NaN.
                shift[i] = T.if_then_else(top[i] == minus_inf, 0.0, top[i])
            for i, s in lang.each(BLOCK_M, max_shares):
                row_max[i, s] = base.exp(row_max[i, s] - shift[i])
                row_sum[i, s] *= row_max[i, s]
            T.reduce_sum(row_sum, total, dim=1)
            for i in lang.each(BLOCK_M):
                top[i] = (top[i] + base.log(total[i])) / base.log_e
            for i, s in lang.each(BLOCK_M, max_shares):
                weights[i, s] = row_max[i, s] / total[i]

            T.fill(sums, 0)
            for n in T.serial(T.ceildiv(num_shares, lanes * UNROLLED)):
                for i, lane, d in lang.each(BLOCK_M, lanes, HEAD_DIM):
                    for u in T.unroll(UNROLLED):
                        s = (n * UNROLLED + u) * lanes + lane
                        if (s < num_shares) & (m_start + i < Sq):
                            sums[i, lane, d] += weights[i, s] * parts[s * B + batch, h, m + i, d]
            T.reduce_sum(sums, acc, dim=1)
            for i, d in lang.each(BLOCK_M, HEAD_DIM):
                # Not by a product with 0: NaN may be among values whose scores are all -inf.
                acc[i, d] = T.if_then_else(total[i] == 0.0, 0.0, acc[i, d])
            T.copy(acc, out[batch, head, m_start : m_start + BLOCK_M, 0:HEAD_DIM])
            T.copy(top, lse[batch, head, m_start : m_start + BLOCK_M])

    return attention_merge
