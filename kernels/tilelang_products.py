"""What the TileLang attention kernels say once for every target and dtype: products of tiles, the
base of the exponential, strides.

float32 is held to IEEE float32. Tensor cores would round it to TF32, so its products are loops of
multiply-adds, on a CPU summed in float64 and rounded once (plain x86-64 has no fused multiply-add).
Its exponentials are natural, because a base-2 exponent costs a rounding of scale * log2(e). 16-bit
inputs take tensor cores and base 2, which is what the GPU computes in one instruction.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from minitx.kernels.tilelang_runtime import Language

LOG2E = 1.4426950408889634


def make_gemm(lang: Language, dtype: str) -> Callable[..., Any]:
    """`gemm(A, B, C, transpose_B=False, clear=False)`: C += A @ B in float32 (C = A @ B with
    `clear`), for use in a prim_func."""
    import tilelang.language as T

    @T.macro
    def float64_gemm(A, B, C, transpose_B: bool = False, clear: bool = False):
        M, N = C.shape
        K = A.shape[1]
        # B's columns innermost, as C's are: what the C compiler vectorises.
        b = T.alloc_local((K, N), "float64")
        sums = T.alloc_local((N,), "float64")
        for k, j in lang.each(K, N):
            b[k, j] = T.cast(B[j, k] if transpose_B else B[k, j], "float64")
        for i in T.serial(M):
            for j in T.serial(N):
                sums[j] = 0.0 if clear else T.cast(C[i, j], "float64")
            for k in T.serial(K):
                for j in T.serial(N):
                    sums[j] += T.cast(A[i, k], "float64") * b[k, j]
            for j in T.serial(N):
                C[i, j] = T.cast(sums[j], "float32")

    @T.macro
    def multiply_add_gemm(A, B, C, transpose_B: bool = False, clear: bool = False):
        M, N = C.shape
        K = A.shape[1]
        # Registers cannot be indexed by a loop that is not unrolled: they go in one step.
        step = K if A.scope() == "local.fragment" else 32
        # Both operands k by k, so that a thread reads what it multiplies in vectors; the 4 columns
        # more spread the transposing stores over the banks.
        a = T.alloc_shared((step, M + 4), dtype)
        b = T.alloc_shared((step, N + 4), dtype) if transpose_B else B
        if clear:
            T.fill(C, 0)
        for chunk in T.serial(K // step):
            for i, k in T.Parallel(M, step):
                a[k, i] = A[i, chunk * step + k]
            if transpose_B:
                for j, k in T.Parallel(N, step):
                    b[k, j] = B[j, chunk * step + k]
            for k in T.serial(step):
                for i, j in T.Parallel(M, N):
                    C[i, j] += a[k, i] * b[k if transpose_B else chunk * step + k, j]

    def tensor_core_gemm(
        A: Any, B: Any, C: Any, transpose_B: bool = False, clear: bool = False
    ) -> Any:
        rows = T.GemmWarpPolicy.FullRow
        return T.gemm(A, B, C, transpose_B=transpose_B, policy=rows, clear_accum=clear)

    if lang.on_cpu:
        return float64_gemm
    return multiply_add_gemm if dtype == "float32" else tensor_core_gemm


def lay_out(lang: Language, dtype: str, threads: int, *tiles: Any) -> None:
    """Spreads the accumulators of float32 products over a GPU block: 16 threads to a row, each with
    neighbouring rows and columns, which it multiplies out of a few vectors. Tensor cores have
    layouts of their own."""
    import tilelang.language as T

    if lang.on_cpu or dtype != "float32":
        return

    def spread(M: int, N: int) -> Any:
        rows = M * 16 // threads
        vector = next(v for v in (4, 2, 1) if N // 16 % v == 0)

        def owner(i: Any, j: Any) -> tuple[Any, Any]:
            thread = i // rows * 16 + j // vector % 16
            return thread, (
                i % rows * (N // 16 // vector) + j // (16 * vector)
            ) * vector + j % vector

        return T.Fragment((M, N), forward_fn=owner)

    T.annotate_layout({tile: spread(*(int(extent) for extent in tile.shape)) for tile in tiles})


def make_row_dot(lang: Language) -> Callable[..., Any]:
    """`row_dot(A, B, out)`: out[i] = sum over d of A[i, d] * B[i, d] in float32, for use in a
    prim_func."""
    import tilelang.language as T

    @T.macro
    def cpu_row_dot(A, B, out):
        rows, columns = A.shape
        total = T.alloc_local((1,), "float64")
        for i in T.serial(rows):
            total[0] = 0.0
            for d in T.serial(columns):
                total[0] += T.cast(A[i, d], "float64") * T.cast(B[i, d], "float64")
            out[i] = T.cast(total[0], "float32")

    @T.macro
    def gpu_row_dot(A, B, out):
        rows, columns = A.shape
        product = T.alloc_fragment((rows, 32), "float32")  # every head dim is a multiple of 32
        T.fill(product, 0)
        for chunk in T.serial(columns // 32):
            for i, d in T.Parallel(rows, 32):
                a = T.cast(A[i, chunk * 32 + d], "float32")
                product[i, d] += a * T.cast(B[i, chunk * 32 + d], "float32")
        T.reduce_sum(product, out, dim=1)

    return cpu_row_dot if lang.on_cpu else gpu_row_dot


class Base(NamedTuple):
    """The base b that a kernel exponentiates: its functions, and log_b(e)."""

    exp: Callable[[Any], Any]
    log: Callable[[Any], Any]
    log_e: float


def make_base(dtype: str) -> Base:
    """e for float32, 2 for 16-bit inputs."""
    import tilelang.language as T

    return Base(T.exp, T.log, 1.0) if dtype == "float32" else Base(T.exp2, T.log2, LOG2E)


def exponent_scale(scale: float, dtype: str) -> float:
    """scale * log_b(e): what scores are multiplied by before they are exponentiated."""
    return scale if dtype == "float32" else scale * LOG2E


def compiler_options(dtype: str, num_stages: int) -> dict[str, Any]:
    """Pass configs for `T.annotate_pass_configs`.

    Where copies run ahead (num_stages > 0) a block splits into warps that copy and warps that
    compute. Without stages that split races (tile-ai/tilelang#2613), and float32's layouts
    (`lay_out`) count on every thread.
    """
    return {
        "tl.disable_warp_specialized": num_stages == 0,
        "tl.enable_fast_math": dtype != "float32",
    }


def sizes(*names: str) -> tuple[Any, ...]:
    """Sizes that arrive with the arguments. In 32 bits, as indices are; strides have 64."""
    import tilelang.language as T

    return tuple(T.dynamic(name, "int32") for name in names)


def make_tensor(lang: Language, dtype: str) -> Callable[..., Any]:
    """`tensor(name, B, H, S)`: the type of a [B, H, S, D] argument of any strides, D being one for
    the whole kernel. On a GPU the last stride is 1: TMA fetches whole rows."""
    import tilelang.language as T

    (D,) = sizes("D")

    def tensor(name: str, B: Any, H: Any, S: Any) -> Any:
        outer = [T.dynamic(f"{name}_{dim}", "int64") for dim in "bhs"]
        inner = T.dynamic(f"{name}_d", "int64") if lang.on_cpu else 1
        return T.StridedTensor((B, H, S, D), (*outer, inner), dtype)

    return tensor


def row_tensor(name: str, B: Any, H: Any, S: Any) -> Any:
    """The type of a float32 [B, H, S] argument of any strides."""
    import tilelang.language as T

    strides = tuple(T.dynamic(f"{name}_{dim}", "int64") for dim in "bhs")
    return T.StridedTensor((B, H, S), strides, "float32")


def part_tensors(P: Any, H: Any, S: Any, HEAD_DIM: int) -> tuple[Any, Any]:
    """The types of parts [P, H, S, HEAD_DIM] and stats [P, H, S, 2]: contiguous float32."""
    import tilelang.language as T

    return T.Tensor((P, H, S, HEAD_DIM), "float32"), T.Tensor((P, H, S, 2), "float32")


def place(block: Any, num_tiles: Any, heads: Any) -> tuple[Any, Any, Any]:
    """(tile, head, batch) of a block: tiles of one head are neighbours, and share its keys in L2.
    Everything lies on grid x, which has room for 2^31 blocks."""
    import tilelang.language as T

    row = T.truncdiv(block, num_tiles)
    return T.truncmod(block, num_tiles), T.truncmod(row, heads), T.truncdiv(row, heads)


def count_share(num_n: Any, num_parts: Any, B: Any) -> Any:
    """Of a batch's num_n tiles of keys those that are read for one of its num_parts / B parts, if
    there are as many."""
    import tilelang.language as T

    shares = T.truncdiv(num_parts, B)
    return T.truncdiv(num_n + shares - 1, shares)  # ceildiv would provide for negative numbers
