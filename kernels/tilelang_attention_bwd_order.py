"""In which order the backward for Hopper takes keys and queries: for kernels in TileLang.

A task is a tile of keys of one key head; blocks take tasks in the order of their numbers. By the
causal rule queries from some tile on read the keys, of the first keys all do: tasks differ in
length, and those that add to one tile of dq do so in turn (`tilelang_attention_dq_sum.py`). A head
is taken in one of two orders:

    early   last keys first, queries from the first to the last
    late    first keys first, queries from the last to the first

Early, no turn is waited for: a task comes to each tile of queries some steps after the one before
it. But the longest tasks start last, and at the end most multiprocessors have nothing to do. Late,
a task runs a step behind the one before it, which costs as many steps as tasks of a head run at
once, but the shortest start last. So of each batch element's key heads all are early but for a few,
which follow once those of the whole batch have started, and fill the gaps.

All heads are late where early tasks would share too little in L2: those that run at once are at
queries all over the head, late ones at the same. That is so of heads with many queries, and of
grouped ones: a task goes past the queries of every query head that reads its keys.

Of early heads those go together whose queries fit in L2. Late tasks share a few tiles, not the
head, so that more heads may: of each head fewer tasks then run at once, and fewer stand behind one
that is held up, or are to start a step apart. Each time that a head's tasks at work have gone past
its queries, though, these have left L2, and the fewer tasks, the more often they come again.

What a head's order is does not depend on the batch: a batch element's bits do not, either.
"""

from collections.abc import Callable
from typing import Any

L2_BYTES = 2**25  # of q, dout and dq_sum for tasks that run at once to share
LATE_HEADS = 4  # that go together at least, if there are as many (measured: benchmarks/NOTES.md)


def num_late(Hkv: Any, group: Any, Sq: Any, HEAD_DIM: int) -> Any:
    """How many of a batch element's key heads are late: the last of them.

    All of grouped and of long ones; of others an eighth, as simulated and measured
    (benchmarks/NOTES.md), but two of four heads to sixteen, and one of fewer.
    """
    import tilelang.language as T

    few = T.max(T.truncdiv(Hkv + 7, 8), T.min(T.truncdiv(Hkv, 2), 2))
    return T.Select((group > 1) | (Sq > _queries_in_l2(HEAD_DIM)), Hkv, few)


def locate(
    task: Any,
    num_n: Any,
    B: Any,
    Hkv: Any,
    late: Any,
    Sq: Any,
    HEAD_DIM: int,
    keep: Callable[[Any], Any] = lambda value: value,
) -> tuple[Any, Any, Any, Any]:
    """(tile of keys, key head, batch element, whether it is late) of a task. As many heads as are
    to go together take turns; of a head the tasks are in the order of its turns.

    keep: makes a variable of a number. What is read several times would be computed as often, and
    dozens of divisions take longer than a trip of the loop.
    """
    import tilelang.language as T

    late = keep(late)
    num_early = keep((Hkv - late) * B)  # heads of all batch elements
    is_late = task >= num_early * num_n
    rest = keep(task - T.Select(is_late, num_early * num_n, 0))
    num_heads = keep(T.Select(is_late, late * B, num_early))
    of_element = keep(T.max(T.Select(is_late, late, Hkv - late), 1))

    width = T.max(T.truncdiv(_queries_in_l2(HEAD_DIM), Sq), T.Select(is_late, LATE_HEADS, 1))
    width = keep(T.max(T.min(width, num_heads), 1))  # or width * num_n might not fit in 32 bits
    turn = keep(T.truncdiv(rest, width * num_n))
    rest = keep(rest - turn * width * num_n)
    together = keep(T.max(T.min(width, num_heads - turn * width), 1))
    place = keep(T.truncdiv(rest, together))
    head = keep(turn * width + rest - place * together)
    element = keep(T.truncdiv(head, of_element))
    return (
        T.Select(is_late, place, num_n - 1 - place),
        head - element * of_element + T.Select(is_late, Hkv - late, 0),
        element,
        is_late,
    )


def step_at(step: Any, group: Any, first_m: Any, num_m: Any, is_late: Any) -> tuple[Any, Any]:
    """(query head of the group, tile of queries) of a task's step: all heads take one tile after
    the other, so that a task with fewer tiles is at the same heads as those before it."""
    import tilelang.language as T

    m = T.truncdiv(step, group)
    return T.truncmod(step, group), T.Select(is_late, num_m - 1 - m, first_m + m)


def turn_of(tile: Any, num_n: Any, is_late: Any) -> Any:
    """How many tasks of a head are before that of a tile of keys."""
    import tilelang.language as T

    return T.Select(is_late, tile, num_n - 1 - tile)


def first_and_last_steps(
    tile: Any, group: Any, first_m: Any, next_m: Any, num_m: Any, is_late: Any
) -> tuple[Any, Any]:
    """Of the tasks that add to a tile of dq that of a tile of keys is the first in steps below
    this, and the last in steps from that on. next_m: the first tile of queries that reads the next
    keys."""
    import tilelang.language as T

    steps = group * (num_m - first_m)
    with_first_keys = T.Select(tile == 0, steps, 0)  # steps in which it has the first keys
    return (
        T.Select(is_late, with_first_keys, group * (next_m - first_m)),
        T.Select(is_late, group * (num_m - next_m), steps - with_first_keys),
    )


def _queries_in_l2(HEAD_DIM: int) -> int:
    # Of a query q and dout have 16 bits an element, dq_sum 32.
    return L2_BYTES // (8 * HEAD_DIM)
