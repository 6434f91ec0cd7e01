"""Hopper's products, issued with little work for the warps: for kernels scheduled by hand.

`T.wgmma_gemm` finds a warpgroup's part of a tile by threadIdx.x / 128, which to the compiler may
differ from thread to thread: it builds the descriptors of every instruction in each thread's
registers and moves them, with a wait, to the warp's. Here

- the part is found by a number that is the warp's, since it comes from a shuffle (`warpgroup_of`);
- that number is read anew for each product (`own_rows`), or the compiler would compute all
  descriptors ahead of a loop, run out of the warp's 63 registers, and give up on them;
- a descriptor's upper word, a constant, is passed off as a variable, or it would be written
  again before every instruction.

An instruction then takes two additions to the warp's registers.

A tile is of 16 bits and lies in shared memory, [rows, columns] with columns a multiple of 64, in
panels of 64 columns: rows of 128 bytes, swizzled. Nothing infers layouts from these products:
`lay_out` says them.
"""

from typing import Any, NamedTuple

HELPERS = r"""
__device__ __forceinline__ void settle() { asm volatile("" ::: "memory"); }
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ int read_anew(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <int leading, class Descriptor>
__device__ __forceinline__ void describe(Descriptor &descriptor, const void *tile, int offset) {
  unsigned start = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + offset;
  unsigned long long upper = 0x40000040u | start >> 18;  // 128-byte swizzle, 8 rows; | 0
  descriptor.desc_ = upper << 32 | ((leading << 16) + (start >> 4));
}
template <int panel, int columns>
__device__ __forceinline__ void store_own_rows(void *tile, const void *registers,
                                               unsigned thread = threadIdx.x) {
  const unsigned *words = static_cast<const unsigned *>(registers);
  unsigned lane = thread % 32, row = thread / 32 * 16 + lane % 16;
  unsigned start = static_cast<unsigned>(__cvta_generic_to_shared(tile)) + row * 128;
  start += (lane / 16 ^ row % 8) * 16;
#pragma unroll
  for (int i = 0; i < columns / 16; ++i)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"((start ^ i % 4 * 32) + i / 4 * panel), "r"(words[4 * i]),
                    "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                 : "memory");
}
"""

ROW_BYTES = 128  # of a panel
STEP = 16  # elements of a sum that one instruction takes
ABBREVIATIONS = {"float16": "fp16", "bfloat16": "bf16"}


class Operand(NamedTuple):
    """What a warpgroup reads of a tile [rows, columns] or [stages, rows, columns]: all from `start`
    on, in bytes. The product's sum runs along rows (`is_k_major`) or along columns."""

    tile: Any
    is_k_major: bool
    start: Any = 0

    def step(self, k: Any) -> Any:
        """Bytes from the start to the k-th instruction's share."""
        if self.is_k_major:
            return k // 4 * self._panel + k % 4 * (STEP * 2)
        return k * (STEP * ROW_BYTES)

    @property
    def leading(self) -> int:
        """The descriptor's leading stride, in 16 bytes; from panel to panel, if it is used."""
        return 1 if self.is_k_major else self._panel // 16

    @property
    def _panel(self) -> int:
        return int(self.tile.shape[-2]) * ROW_BYTES


def multiplies_by_hand(HEAD_DIM: int) -> bool:
    """Whether products are these, which take whole panels of columns."""
    return HEAD_DIM % 64 == 0


def warpgroup_of(tx: Any) -> Any:
    """The index of a thread's warpgroup; to be called where all threads of a warp are."""
    import tilelang.language as T

    return T.call_extern("int32", "uniform", T.truncdiv(tx, 128))  # type: ignore[attr-defined]


def own_rows(warpgroup: Any) -> Any:
    """Bytes from a tile's start to the 64 rows of a warpgroup."""
    import tilelang.language as T

    anew = T.call_extern("int32", "read_anew", warpgroup)  # type: ignore[attr-defined]
    return anew * (64 * ROW_BYTES)


def own_columns(warpgroup: Any, tile: Any) -> Any:
    """Bytes from a tile's start to the 64 columns of a warpgroup."""
    return own_rows(warpgroup) * (int(tile.shape[-2]) // 64)


def issue_product(sums: Any, a: Any, b: Operand, depth: int, clear: bool = False) -> Any:
    """sums (+)= a @ b, not awaited: a warpgroup's [64, n], over `depth` elements.

    sums: a fragment of float32, laid out by `lay_out`. a: an `Operand`, or a fragment of 16 bits
    laid out so.
    """
    import tilelang.language as T

    in_registers = not isinstance(a, Operand)
    dtype = ABBREVIATIONS[str(b.tile.dtype)]
    columns = int(sums.shape[1])
    shape = f"m64n{columns}k{STEP}"

    def describe(descriptor, operand):
        function = f"describe<{operand.leading}>"
        tile = operand.tile.access_ptr("r")
        arguments = (function, descriptor.data, tile, operand.start)
        return T.evaluate(T.call_extern("void", *arguments))  # type: ignore[attr-defined]

    @T.macro
    def issue(sums):
        desc_a = T.alloc_wgmma_desc()
        desc_b = T.alloc_wgmma_desc()
        if not in_registers:
            describe(desc_a, a)
        describe(desc_b, b)
        T.warpgroup_fence_operand(sums, num_regs=columns // 2)
        T.warpgroup_arrive()
        for k in T.unroll(depth // STEP):
            adds = T.Select(k == 0, 0, 1) if clear else 1
            to = (desc_b.data, b.step(k) >> 4, sums.data, 0, adds, 1, 1)
            if in_registers:
                types = (b.is_k_major, dtype, dtype, "fp32")
                T.ptx_wgmma_rs("float32", shape, *types, a.data, k * 8, *to)
            else:
                types = (a.is_k_major, b.is_k_major, dtype, dtype, "fp32")
                T.ptx_wgmma_ss("float32", shape, *types, desc_a.data, a.step(k) >> 4, *to)
        T.warpgroup_commit_batch()
        T.warpgroup_fence_operand(sums, num_regs=columns // 2)

    return issue(sums)


def hold(index: Any) -> Any:
    """A thread's index, for a variable: kept in a register. threadIdx is read anew wherever it is
    used, which waits until the products that were issued before have begun."""
    import tilelang.language as T

    return T.call_extern("int32", "read_anew", index)  # type: ignore[attr-defined]


def store_own_rows(
    fragment: Any, tile: Any, stage: Any, is_hidden: bool = False, thread: Any = None
) -> Any:
    """A fragment of 16 bits, 64 rows a warpgroup, to tile[stage]: four 8 x 8 matrices at a time.

    `T.copy` does that for tiles without stages alone, and stores 4 bytes at a time elsewhere.

    is_hidden: from TileLang, which would fence ahead of the next product, whatever that reads.
    thread: its index, if that is held."""
    import tilelang.language as T

    rows, columns = (int(extent) for extent in fragment.shape)
    function = f"store_own_rows<{rows * ROW_BYTES}, {columns}>"
    if is_hidden:
        start = tile.access_ptr("r", offset=stage * (rows * columns))
    else:
        start = T.address_of(tile[stage, 0, 0])
    held = () if thread is None else (thread,)
    arguments = (function, start, fragment.data, *held)
    return T.evaluate(T.call_extern("void", *arguments))  # type: ignore[attr-defined]


def fence_stores() -> Any:
    """What this thread has stored in shared memory is there for products and the copy engine, once
    a barrier has told who asks for them. TileLang's fence alone orders nothing for the compiler,
    which might move stores past it."""
    import tilelang.language as T

    @T.macro
    def fence():
        T.evaluate(T.call_extern("void", "settle"))  # type: ignore[attr-defined]
        T.fence_proxy_async()

    return fence()


def lay_out(tiles: tuple, fragments: tuple) -> None:
    """Says how tiles lie in shared memory, and fragments [64 * warpgroups, n] in the registers of
    warpgroups, 64 rows each."""
    import tilelang.language as T
    from tilelang.layout import make_full_bank_swizzled_layout

    def owner(i: Any, j: Any) -> tuple[Any, Any]:
        warpgroup, i = i // 64, i % 64
        thread = warpgroup * 128 + i // 16 * 32 + i % 8 * 4 + j % 8 // 2
        return thread, j // 8 * 4 + i % 16 // 8 * 2 + j % 2

    def in_registers(fragment: Any) -> Any:
        return T.Fragment([int(extent) for extent in fragment.shape], forward_fn=owner)

    T.annotate_layout({tile: make_full_bank_swizzled_layout(tile) for tile in tiles})
    T.annotate_layout({fragment: in_registers(fragment) for fragment in fragments})


def by_row(rows: int) -> Any:
    """The layout of a loop over rows of products: each by the four threads that hold it."""
    import tilelang.language as T

    def owners(i: Any, quarter: Any) -> tuple[Any, Any]:
        return i // 16 * 32 + i % 8 * 4 + quarter, i % 16 // 8

    return T.Fragment([rows], forward_fn=owners, replicate=4)
