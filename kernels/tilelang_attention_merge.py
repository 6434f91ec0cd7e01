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

Parts lie in float32 [shares * B, Hq, Sq, D], their statistics in [2 * shares * B, Hq, Sq], maxima
first. One query of grouped heads lies there as Hkv heads of Hq / Hkv queries, as which it is asked:
it reads all keys, so the heads of a group are to the kernel queries of one tile, and their keys are
read once. In memory that is the same.
"""

from typing import Any, NamedTuple

from minitx.kernels.tilelang_products import make_base, make_tensor, place, row_tensor, sizes
from minitx.kernels.tilelang_runtime import Language

# The annotations of a prim_func are values, not types:
# pyright: reportInvalidTypeForm=false


class Sharing(NamedTuple):
    """Into how many shares keys are cut, by lengths alone. How many it takes to keep a GPU busy
    hangs on batch and heads too, but a row's bits must not change with what is computed beside it.
    """

    max_queries: int
    min_keys: int  # of a share: below, what a block begins and ends with costs more than it gains
    max_shares: int  # for a tile of queries; for more tiles in all


# Parts of a single query are nothing to its keys; of a full tile of queries they are 64 KiB, as
# much as 128 keys and values of 128, and the more heads there are the less sharing gains.
SHARINGS = (Sharing(1, 512, 128), Sharing(64, 512, 32), Sharing(1024, 2048, 8))
FEW_TILE = 64  # queries, for which the forward has tiles of their own
CHUNK_TILE = 128  # queries


class MergeTile(NamedTuple):
    """BLOCK_M queries of a head, and at once `lanes` parts of each."""

    max_shares: int
    BLOCK_M: int
    lanes: int


ONE_QUERY, MORE_QUERIES = MergeTile(128, 1, 8), MergeTile(32, 8, 1)
UNROLLED = 8  # parts of a lane whose loads are in flight together


def count_shares(Sq: int, Skv: int, BLOCK_N: int) -> int:
    """Into how many shares, none of them empty, the keys are cut; 1 if that does not pay."""
    sharing = next((s for s in SHARINGS if s.max_queries >= Sq), None)
    if sharing is None or Skv < 2 * sharing.min_keys:
        return 1
    tiles, most = -(-Skv // BLOCK_N), max(sharing.max_shares // -(-Sq // CHUNK_TILE), 1)
    share = max(-(-sharing.min_keys // BLOCK_N), -(-tiles // most))
    return -(-tiles // share)


def build_attention_merge(
    lang: Language, *, dtype: str, HEAD_DIM: int, max_shares: int, BLOCK_M: int, lanes: int
) -> Any:
    """out [B, Hq, Sq, D] and lse [B, Hq, Sq] from contiguous parts and stats, as above."""
    import tilelang.language as T

    base = make_base(dtype)
    tensor = make_tensor(lang, dtype)
    B, Hq, Sq, P, Hp, Sp = sizes("B", "Hq", "Sq", "P", "Hp", "Sp")
    minus_inf = -T.infinity("float32")
    SLOTS = BLOCK_M * lanes
    threads = min(SLOTS * HEAD_DIM, 256)

    def spread(*tiles: Any) -> None:
        """Over the threads, neighbours side by side: TileLang would take long to find that out."""

        def owner(slot: Any, d: Any) -> tuple[Any, Any]:
            return (slot * HEAD_DIM + d) % threads, (slot * HEAD_DIM + d) // threads

        if not lang.on_cpu:
            layout = T.Fragment((SLOTS, HEAD_DIM), forward_fn=owner)
            T.annotate_layout(dict.fromkeys(tiles, layout))

    def finite(top: Any) -> Any:
        """With no key seen, -inf - -inf would be NaN."""
        return T.if_then_else(top == minus_inf, 0.0, top)

    @T.prim_func
    def attention_merge(
        parts: tensor("parts", P, Hp, Sp, "float32"),
        stats: row_tensor("stats", 2 * P, Hp, Sp),
        out: tensor("out", B, Hq, Sq),
        lse: row_tensor("lse", B, Hq, Sq),
    ):
        T.annotate_pass_configs(
            {
                "tl.disable_warp_specialized": True,
                # Every load and store stands under a condition of its own.
                "tl.disable_safe_memory_legalize": True,
            }
        )
        with T.Kernel(B * Hq * T.ceildiv(Sq, BLOCK_M), threads=threads) as block:
            # Of the parts that one of a query's lanes adds up; then of all of them.
            top = lang.tile((SLOTS, HEAD_DIM), "float32")
            total = lang.tile((SLOTS, HEAD_DIM), "float32")
            acc = lang.tile((SLOTS, HEAD_DIM), "float32")
            spread(top, total, acc)
            tops = lang.shared((SLOTS, HEAD_DIM), "float32")
            totals = lang.shared((SLOTS, HEAD_DIM), "float32")
            accs = lang.shared((SLOTS, HEAD_DIM), "float32")

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
            rounds = T.ceildiv(num_shares, lanes * UNROLLED)

            T.fill(top, minus_inf)
            T.fill(total, 0)
            T.fill(acc, 0)
            for n in T.serial(rounds):
                for slot, d in lang.each(SLOTS, HEAD_DIM):
                    i = slot // lanes
                    for u in T.unroll(UNROLLED):
                        s = (n * UNROLLED + u) * lanes + slot % lanes
                        if (s < num_shares) & (m_start + i < Sq):
                            top[slot, d] = T.max(top[slot, d], stats[s * B + batch, h, m + i])
            for n in T.serial(rounds):
                for slot, d in lang.each(SLOTS, HEAD_DIM):
                    i = slot // lanes
                    for u in T.unroll(UNROLLED):
                        s = (n * UNROLLED + u) * lanes + slot % lanes
                        if (s < num_shares) & (m_start + i < Sq) & (d < out.shape[3]):
                            part = s * B + batch
                            weight = base.exp(stats[part, h, m + i] - finite(top[slot, d]))
                            part_sum = stats[P + part, h, m + i]
                            total[slot, d] += weight * part_sum
                            # Of no key the sums may be NaN, from a masked one among the values.
                            acc[slot, d] += T.if_then_else(
                                part_sum == 0.0, 0.0, weight * parts[part, h, m + i, d]
                            )
            for slot, d in lang.each(SLOTS, HEAD_DIM):
                tops[slot, d] = top[slot, d]
                totals[slot, d] = total[slot, d]
                accs[slot, d] = acc[slot, d]
            for slot, d in lang.each(SLOTS, HEAD_DIM):
                first = slot // lanes * lanes
                total[slot, d] = 0
                acc[slot, d] = 0
                for lane in T.unroll(lanes):
                    top[slot, d] = T.max(top[slot, d], tops[first + lane, d])
                for lane in T.unroll(lanes):
                    weight = base.exp(tops[first + lane, d] - finite(top[slot, d]))
                    total[slot, d] += weight * totals[first + lane, d]
                    acc[slot, d] += weight * accs[first + lane, d]
            for slot, d in lang.each(SLOTS, HEAD_DIM):
                i = slot // lanes
                if (slot % lanes == 0) & (m_start + i < Sq) & (d < out.shape[3]):
                    out[batch, head, m_start + i, d] = T.if_then_else(
                        total[slot, d] == 0.0, 0.0, acc[slot, d] / total[slot, d]
                    )
                    if d == 0:
                        lse[batch, head, m_start + i] = (
                            top[slot, d] + base.log(total[slot, d])
                        ) / base.log_e

    return attention_merge
