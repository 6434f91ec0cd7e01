"""How the warps of Hopper's attention backward pass tasks and tiles to one another, and the warp
that takes tasks and fetches their tiles: the producer's part.

What is in shared memory has two barriers: `full`, on which those who read wait, and `free`, on
which whoever fills it waits until all of them have read. Both flip once every time that the
buffers come round; a wait names the phase that has to be over. On `free` the first round waits for
the phase before the first, which counts as over. Steps and tasks are counted from the block's first
on: the count of what was before says buffer and phase.
"""

from typing import Any, NamedTuple

from minitx.kernels import tilelang_attention_bwd_order as order
from minitx.kernels.tilelang_attention_dq_sum import DQ_TILE

BLOCK_N = 128  # keys
Q_STAGES, DOUT_STAGES = 3, 2  # in flight; q is read for longer, by dk
WORKERS = 256  # threads that compute
ADDERS = 3  # warps that add tiles of dq to memory
# Named barriers; TileLang takes number 1 for its own.
FULL = 2  # at FULL + 2 * i + j adder i (a warp) waits for its half of dq from warpgroup j
GO = FULL + 2 * ADDERS  # at GO + i warpgroup i waits for the other one
MEET = GO + 2  # at MEET + i the warps of warpgroup i
# What a block's warps are told of a task, of which there are two at a time. A tile of -1: no more.
TILE, HEAD, BATCH, IS_LATE = range(4)

HELPERS = r"""
__device__ __forceinline__ void let_go(int is_it, int barrier) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p bar.arrive %1, 256; }"
               :: "r"(is_it), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_to_go(int barrier) {
  asm volatile("bar.sync %0, 256;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void meet(int barrier) {
  asm volatile("bar.sync %0, 128;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void hand_in(int barrier) {
  asm volatile("bar.arrive %0, 160;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_hand_in(int barrier) {
  asm volatile("bar.sync %0, 160;" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ int take_task(long long counter) {
  int number = 0;
  if (threadIdx.x % 32 == 0) number = atomicAdd(reinterpret_cast<int *>(counter), 1);
  return __shfl_sync(~0u, number, 0);
}
"""


class Shape(NamedTuple):
    """Of heads, and of tensors in a prim_func."""

    IS_CAUSAL: bool
    HEAD_DIM: int
    B: Any
    Hq: Any
    Hkv: Any
    Sq: Any
    Skv: Any

    @property
    def BLOCK_M(self) -> int:
        """Queries of a tile."""
        return DQ_TILE // self.HEAD_DIM

    @property
    def num_m(self) -> Any:
        """Tiles of queries of a head."""
        import tilelang.language as T

        return T.ceildiv(self.Sq, self.BLOCK_M)

    @property
    def num_n(self) -> Any:
        """Tiles of keys of a head."""
        import tilelang.language as T

        return T.ceildiv(self.Skv, BLOCK_N)

    @property
    def tasks(self) -> Any:
        return self.B * self.Hkv * self.num_n

    @property
    def diagonal(self) -> Any:
        """Query i reads keys below i + diagonal, by the causal rule."""
        return self.Skv - self.Sq + 1

    def first_tile(self, n_start: Any) -> Any:
        """The first tile of queries with one that reads keys from n_start on."""
        import tilelang.language as T

        if not self.IS_CAUSAL:
            return 0
        return T.truncdiv(T.max(n_start + 1 - self.diagonal, 0), self.BLOCK_M)

    def first_tile_of_next(self, tile: Any, n_start: Any) -> Any:
        """That of the keys behind a tile, which starts at n_start; past the end, if none are."""
        import tilelang.language as T

        of_next = self.first_tile(n_start + BLOCK_N)
        return T.Select(tile + 1 == self.num_n, self.num_m, of_next)

    def locate(self, task: Any, group: Any) -> tuple[Any, Any, Any, Any]:
        """(tile of keys, key head, batch element, whether it is late) of a task."""
        late = order.num_late(self.Hkv, group, self.Sq, self.HEAD_DIM) if self.IS_CAUSAL else 0
        sizes = (self.B, self.Hkv, late, self.Sq, self.HEAD_DIM)
        return order.locate(task, self.num_n, *sizes, _keep)


class Buffers(NamedTuple):
    """In shared memory."""

    task: Any  # int32 [2, 4]: TILE, HEAD, ...
    k: Any  # [BLOCK_N, HEAD_DIM], the task's
    v: Any  # the same; then dv and dk, on their way to memory
    q: Any  # [Q_STAGES, BLOCK_M, HEAD_DIM]
    dout: Any  # [DOUT_STAGES, BLOCK_M, HEAD_DIM]
    stats: Any  # float32 [DOUT_STAGES, 2, BLOCK_M]: lse and delta, with dout
    ds: Any  # [2, BLOCK_N, BLOCK_M]: of this step and of the last one, which dq is made of
    dq: Any  # float32 [128, 64]: both halves of a tile's part, of 64 x 64
    dq_rounded: Any  # 16 bits [1, 128, 64], of one stage, as store_own_rows wants them


class Barriers(NamedTuple):
    """Two for each buffer, but one `full` for what comes together; for dq's two of each half."""

    task_full: Any
    task_free: Any
    k_free: Any  # a task's first of q brings the keys,
    v_free: Any  # its first of dout the values
    q_full: Any
    q_free: Any
    dout_full: Any
    dout_free: Any
    dq_free: Any  # a half may be put down, and the sum so far is there if it was asked for
    # What was put down has been read. Each adder has its own: of shared ones it could take a phase
    # for another.
    dq_read: Any
    rounded_read: Any


def call(function: str, *arguments: Any) -> Any:
    """A statement that calls one of the helpers in CUDA."""
    import tilelang.language as T

    return T.evaluate(T.call_extern("void", function, *arguments))  # type: ignore[attr-defined]


def release(barriers: Any, index: Any) -> Any:
    """By the threads of a warp: one arrival."""
    import tilelang.language as T

    @T.macro
    def arrive(index):
        if T.shuffle_elect(32):
            T.barrier_arrive(barriers[index])

    return arrive(index)


class Step(NamedTuple):
    """What the producer fetches next. In a prim_func each is read where it is used; a macro that
    gave one a name of its own would copy the variable."""

    number: Any  # of the task's steps
    passed: Any  # steps of all tasks before it
    served: Any  # tasks before this one
    batch: Any
    head: Any  # of queries
    m_start: Any  # the first query
    n_start: Any  # the first key
    k_place: tuple[Any, Any]  # batch and head of k
    v_place: tuple[Any, Any]


def make_fetch_step(shape: Shape) -> Any:
    """The macro of a step's tiles and, of a task's first step, keys and values: (step, tensors,
    buffers, barriers)."""
    import tilelang.language as T

    BLOCK_M, HEAD_DIM = shape.BLOCK_M, shape.HEAD_DIM

    def fetch(region, tile, barrier):
        """By the threads of a warp, who arrive at the barrier once all is asked for."""
        return T.tma_copy(region, tile, barrier=barrier, leader_scope_threads=32)

    @T.macro
    def fetch_step(step, tensors, buffers, barriers):
        q, k, v, dout, stats = tensors
        q_full, dout_full = barriers.q_full, barriers.dout_full
        queries = slice(step.m_start, step.m_start + BLOCK_M)
        keys = slice(step.n_start, step.n_start + BLOCK_N)
        k_batch, k_head = step.k_place
        v_batch, v_head = step.v_place
        stage = step.passed % Q_STAGES
        T.barrier_wait(barriers.q_free[stage], 1 - step.passed // Q_STAGES % 2)
        of_q = q[step.batch, step.head, queries, 0:HEAD_DIM]
        fetch(of_q, buffers.q[stage, :, :], q_full[stage])
        if step.number == 0:
            T.barrier_wait(barriers.k_free[0], 1 - step.served % 2)
            fetch(k[k_batch, k_head, keys, 0:HEAD_DIM], buffers.k, q_full[stage])
        T.barrier_arrive(q_full[stage])
        other = step.passed % DOUT_STAGES
        T.barrier_wait(barriers.dout_free[other], 1 - step.passed // DOUT_STAGES % 2)
        of_dout = dout[step.batch, step.head, queries, 0:HEAD_DIM]
        fetch(of_dout, buffers.dout[other, :, :], dout_full[other])
        of_stats = stats[step.batch, step.head, 0:2, queries]
        fetch(of_stats, buffers.stats[other, :, :], dout_full[other])
        if step.number == 0:
            T.barrier_wait(barriers.v_free[0], 1 - step.served % 2)
            fetch(v[v_batch, v_head, keys, 0:HEAD_DIM], buffers.v, dout_full[other])
        T.barrier_arrive(dout_full[other])

    return fetch_step


def make_producer(shape: Shape) -> Any:
    """The macro of the warp that takes tasks and fetches their tiles: (block, taken, blocks, group,
    tensors q, k, v, dout and stats, buffers, barriers)."""
    import tilelang.language as T

    BLOCK_M, num_m, tasks = shape.BLOCK_M, shape.num_m, shape.tasks
    fetch_step = make_fetch_step(shape)

    def take(taken):
        """By the threads of a warp, one task's number for all."""
        return T.call_extern("int32", "take_task", taken)  # type: ignore[attr-defined]

    @T.macro
    def produce(block, taken, blocks, group, tensors, buffers, barriers):
        k, v = tensors[1:3]
        task, task_full, task_free = buffers.task, barriers.task_full, barriers.task_free
        # Variables: an expression would be computed anew wherever it is read.
        served, tile, kv_head, batch, is_late, first_m = task_variables()
        steps = T.alloc_var("int32", init=0)  # one at least: the last query reads every key
        passed = T.alloc_var("int32", init=0)  # steps
        number = T.alloc_var("int32", init=block)
        if tasks > blocks:
            number = take(taken)
        while number < tasks:
            place = shape.locate(number, group)
            tile = place[0]
            kv_head = place[1]
            batch = place[2]
            is_late = place[3]
            T.barrier_wait(task_free[served % 2], 1 - served // 2 % 2)
            if T.shuffle_elect(32):
                task[served % 2, TILE] = tile
                task[served % 2, HEAD] = kv_head
                task[served % 2, BATCH] = batch
                task[served % 2, IS_LATE] = T.Select(is_late, 1, 0)
                T.barrier_arrive(task_full[served % 2])
            n_start = tile * BLOCK_N
            first_m = shape.first_tile(n_start)
            steps = group * (num_m - first_m)
            # Of expanded keys and values there is one batch or head.
            k_batch, k_head = T.min(batch, k.shape[0] - 1), T.min(kv_head, k.shape[1] - 1)
            v_batch, v_head = T.min(batch, v.shape[0] - 1), T.min(kv_head, v.shape[1] - 1)
            for step in T.serial(steps):
                at = order.step_at(step, group, first_m, num_m, is_late)
                head, m_start = kv_head * group + at[0], at[1] * BLOCK_M
                queries = (batch, head, m_start)
                keys = (n_start, (k_batch, k_head), (v_batch, v_head))
                now = Step(step, passed, served, *queries, *keys)
                fetch_step(now, tensors, buffers, barriers)
                passed += 1
            served += 1
            number = tasks
            if tasks > blocks:
                number = take(taken)
        T.barrier_wait(task_free[served % 2], 1 - served // 2 % 2)
        if T.shuffle_elect(32):
            task[served % 2, TILE] = -1
            T.barrier_arrive(task_full[served % 2])

    return produce


def task_variables() -> tuple[Any, ...]:
    """What each part of a block keeps of its task, as variables that take its values in turn: how
    many tasks were served before, tile of keys, key head, batch, whether it is late, and its first
    tile of queries."""
    import tilelang.language as T

    served, tile, kv_head, batch = (T.alloc_var("int32", init=0) for _ in range(4))
    is_late, first_m = T.alloc_var("bool", init=False), T.alloc_var("int32", init=0)
    return served, tile, kv_head, batch, is_late, first_m


def _keep(value: Any) -> Any:
    """A variable of it: an expression would be computed anew wherever it is read."""
    import tilelang.language as T

    return T.alloc_var("int32", init=value)[0]
