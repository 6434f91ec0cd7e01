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
    """`gemm(A, B, C, transpose_A=False, transpose_B=False, clear=False)`: C += A @ B in float32
    (C = A @ B with `clear`), for use in a prim_func."""
    import tilelang.language as T

    if lang.on_cpu:

        @T.macro
        def float64_gemm(
            A, B, C, transpose_A: bool = False, transpose_B: bool = False, clear: bool = False
        ):
            M, N = C.shape
            K = A.shape[0] if transpose_A else A.shape[1]
            # B's columns innermost, as C's are: what the C compiler vectorises.
            b = T.alloc_local((K, N), "float64")
            sums = T.alloc_local((N,), "float64")
            for k, j in T.grid(K, N):
                b[k, j] = T.cast(B[j, k] if transpose_B else B[k, j], "float64")
            for i in T.serial(M):
                for j in T.serial(N):
                    sums[j] = 0.0 if clear else T.cast(C[i, j], "float64")
                for k in T.serial(K):
                    for j in T.serial(N):
                        sums[j] += T.cast(A[k, i] if transpose_A else A[i, k], "float64") * b[k, j]
                for j in T.serial(N):
                    C[i, j] = T.cast(sums[j], "float32")

        return float64_gemm

    if dtype == "float32":

        @T.macro
        def multiply_add_gemm(
            A, B, C, transpose_A: bool = False, transpose_B: bool = False, clear: bool = False
        ):
            M, N = C.shape
            K = A.shape[0] if transpose_A else A.shape[1]
            a = T.alloc_shared(A.shape, dtype)
            b = T.alloc_shared((K, N), dtype)
            T.copy(A, a)
            for k, j in T.Parallel(K, N):
                b[k, j] = B[j, k] if transpose_B else B[k, j]
            if clear:
                T.fill(C, 0)
            for k in T.serial(K):
                for i, j in T.Parallel(M, N):
                    C[i, j] += (a[k, i] if transpose_A else a[i, k]) * b[k, j]

        return multiply_add_gemm

    def tensor_core_gemm(
        A: Any,
        B: Any,
        C: Any,
        transpose_A: bool = False,
        transpose_B: bool = False,
        clear: bool = False,
    ) -> Any:
        rows = T.GemmWarpPolicy.FullRow
        return T.gemm(A, B, C, transpose_A, transpose_B, rows, clear_accum=clear)

    return tensor_core_gemm


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
        product = T.alloc_fragment((rows, columns), "float32")
        for i, d in T.Parallel(rows, columns):
            product[i, d] = T.cast(A[i, d], "float32") * T.cast(B[i, d], "float32")
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


def tile_strides(lang: Language, name: str) -> list[Any]:
    """Dynamic strides of a [B, H, S, D] tensor. On a GPU the last is 1: TMA copies whole rows."""
    import tilelang.language as T

    outer = [T.dynamic(f"{name}_{dim}", "int64") for dim in "bhs"]
    return [*outer, T.dynamic(f"{name}_d", "int64") if lang.on_cpu else 1]
