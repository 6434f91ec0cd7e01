"""attention() and softmax(): validate once, choose, call.

The only place that knows every kernel's name. A kernel's module is imported when the kernel is
asked for; an explicit choice never falls back to another.
"""

import logging
import math
from typing import NamedTuple

import torch

from minitx.kernels import runtime
from minitx.kernels.attention_ops import PACKED, unpack
from minitx.kernels.auto_choice import choose_kernel
from minitx.kernels.errors import KernelUnavailableError
from minitx.kernels.reference import attention_reference, softmax_reference

ATTENTION_KERNELS = (
    "reference",
    "eager",
    "sdpa",
    "triton-softmax",
    "tilelang-softmax",
    "triton",
    "tilelang",
)
SOFTMAX_KERNELS = ("reference", "eager", "triton", "tilelang")

logger = logging.getLogger("minitx")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REFERENCE_DTYPES = (*DTYPES, torch.float64)
MAX_HEAD_DIM = 256
LSE_KERNELS = ("reference", "eager", "triton", "tilelang")
# What kernels that are not PyTorch's own functions are written in.
LIBRARIES = {
    "triton": "triton",
    "triton-softmax": "triton",
    "tilelang": "tilelang",
    "tilelang-softmax": "tilelang",
}


class Support(NamedTuple):
    """Whether a kernel can do what is asked, and if not, why. Use `.ok`: a tuple is always true."""

    ok: bool
    reason: str


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    kernel: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T + causal mask) v, on the kernel of your choice.

    Args:
        q: [B, Hq, Sq, D], 1 <= D <= 256.
        k, v: [B, Hkv, Skv, D]; Hq must be a multiple of Hkv (grouped-query attention: query head h
            reads key head h // (Hq // Hkv)).
        is_causal: bottom-right aligned: query i reads key j when j <= i + Skv - Sq. A query with no
            key gives out 0, lse -inf and gradients of 0.
        scale: factor on q k^T, any finite number; None means D ** -0.5.
        kernel: one of ATTENTION_KERNELS, or "auto".
        return_lse: also return the natural-log sum of exponentials of the scaled, masked scores.

    All three have one dtype, float32, float16 or bfloat16 (`reference` also takes float64), any
    strides, and one device. Under autocast they are cast to its dtype first, as PyTorch does with
    its own.

    Returns:
        out [B, Hq, Sq, D] in q's dtype; with `return_lse` also lse [B, Hq, Sq] in float32. Both are
        differentiable, once.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or names that do not fit.
        KernelUnavailableError: the kernel cannot do this here; the message says which can.
    """
    q, k, v = _autocast(q, k, v)
    _check_attention(q, k, v, scale)
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    kernel = _resolve(kernel, q, k, v, is_causal, return_lse)
    out, lse = _run_attention(kernel, q, k, v, is_causal, float(scale), return_lse)
    if lse is not None and return_lse:
        return out, lse
    return out


def packed_attention(
    qkv: torch.Tensor,
    n_head: int,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """attention(q, k, v) of views of one tensor, whose gradient is one tensor, too.

    Args:
        qkv: [B, S, Hq + 2 Hkv, D]: the query heads, the key heads and the value heads of each
            token, as one projection makes them.
        n_head: Hq.
        is_causal, scale, kernel: as in `attention`, and so are dtypes and errors.

    Returns:
        out [B, Hq, S, D]. `triton` and `tilelang` write the gradients of q, k and v where they
        belong in that of qkv; of other kernels autograd puts them together, by a copy.
    """
    if isinstance(n_head, float):  # NumPy's integers and torch.jit.trace's are as good as an int
        raise TypeError(f"n_head must be an int, got {n_head!r}")
    if qkv.dim() != 4 or not 0 <= n_head <= qkv.shape[2] or (qkv.shape[2] - n_head) % 2:
        raise ValueError(
            "qkv must be [B, S, n_head + 2 n_kv_head, D], got shape "
            f"{tuple(qkv.shape)} for n_head {n_head}"
        )
    (qkv,) = _autocast(qkv)
    q, k, v = unpack(qkv, n_head)
    _check_attention(q, k, v, scale)
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    kernel = _resolve(kernel, q, k, v, is_causal, False)
    match kernel:
        case "triton":
            import minitx.kernels.triton_attention
        case "tilelang":
            import minitx.kernels.tilelang_attention  # noqa: F401
        case _:
            return _run_attention(kernel, q, k, v, is_causal, float(scale), False)[0]
    return PACKED[kernel](qkv, n_head, is_causal, float(scale))[0]


def _resolve(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    return_lse: bool,
) -> str:
    """The kernel that runs these inputs. Raises KernelUnavailableError for one that cannot."""
    if kernel == "auto":
        kernel, why = choose_kernel(
            q, k, v, is_causal, return_lse, lambda name: _attention_problem(name, q, return_lse)
        )
        _announce_auto(kernel, why)
    reason = _attention_problem(kernel, q, return_lse)
    if reason is not None:
        others = [n for n in ATTENTION_KERNELS[1:] if _attention_problem(n, q, return_lse) is None]
        raise KernelUnavailableError(
            f"kernel '{kernel}' cannot run this attention: {reason}. "
            f"Kernels that can: {', '.join(others or ['reference'])}"
        )
    return kernel


def softmax(
    x: torch.Tensor, dim: int = -1, *, is_causal: bool = False, kernel: str = "auto"
) -> torch.Tensor:
    """Row softmax along `dim`, computed in float32.

    Args:
        x: any shape and strides, float32, float16 or bfloat16 (`reference` also takes float64).
        dim: the dimension that sums to 1.
        is_causal: read x as scores [..., Sq, Skv] (dim must be the last) under attention's causal
            rule. A masked score is never trusted, NaN included; its result is 0.
        kernel: one of SOFTMAX_KERNELS, or "auto".

    Returns:
        x's shape and dtype. A row of -inf alone (or one with no visible score) gives zeros, and its
        gradient is zero; a row with a visible NaN or +inf gives NaN, as torch.softmax does.

    Raises:
        ValueError, TypeError: a bad dim, dtype or name.
        KernelUnavailableError: the kernel cannot run here; the message says which can.
    """
    dim = _check_softmax(x, dim, is_causal)
    if kernel == "auto":
        kernel = "eager" if x.device.type != "cuda" else "triton"
    reason = _softmax_problem(kernel, x)
    if reason is not None:
        others = [name for name in SOFTMAX_KERNELS[1:] if _softmax_problem(name, x) is None]
        raise KernelUnavailableError(
            f"kernel '{kernel}' cannot run this softmax: {reason}. "
            f"Kernels that can: {', '.join(others or ['reference'])}"
        )
    if dim == x.dim() - 1:  # the usual case, without two views for autograd to remember
        return _run_softmax(kernel, x, is_causal)
    return _run_softmax(kernel, x.movedim(dim, -1), is_causal).movedim(-1, dim)


def supports(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    return_lse: bool = False,
) -> Support:
    """Whether `attention` would run these inputs on `kernel`. Raises only for a kernel that is
    unknown."""
    q, k, v = _autocast(q, k, v)
    _known(kernel, ATTENTION_KERNELS)
    try:
        _check_attention(q, k, v, scale)
    except (TypeError, ValueError) as error:
        return Support(False, str(error))
    if kernel == "auto":
        return Support(True, "")
    reason = _attention_problem(kernel, q, return_lse)
    return Support(reason is None, reason or "")


def supports_softmax(
    kernel: str, x: torch.Tensor, dim: int = -1, *, is_causal: bool = False
) -> Support:
    """Whether `softmax` would run this input on `kernel`. Raises only for a kernel that is
    unknown."""
    _known(kernel, SOFTMAX_KERNELS)
    try:
        _check_softmax(x, dim, is_causal)
    except (TypeError, ValueError) as error:
        return Support(False, str(error))
    reason = None if kernel == "auto" else _softmax_problem(kernel, x)
    return Support(reason is None, reason or "")


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    device_type = _device_type(tensors[0])
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    # float64 stays: autocast leaves it alone in PyTorch's own functions too.
    return tuple(t.to(dtype) if t.dtype in DTYPES else t for t in tensors)


def _device_type(x: torch.Tensor) -> str:
    return "cuda" if x.is_cuda else x.device.type  # makes a string, slowly


def _known(kernel: str, names: tuple[str, ...]) -> None:
    if kernel != "auto" and kernel not in names:
        raise ValueError(f"unknown kernel '{kernel}'; expected auto or one of {', '.join(names)}")


def _check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> None:
    q_shape, k_shape, v_shape, dtype = q.shape, k.shape, v.shape, q.dtype
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        named = (("q", q_shape), ("k", k_shape), ("v", v_shape))
        name, shape = next((name, shape) for name, shape in named if len(shape) != 4)
        raise ValueError(f"{name} must be 4-D [B, H, S, D], got shape {tuple(shape)}")
    if not dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {dtype}, {k.dtype} and {v.dtype}")
    if dtype not in REFERENCE_DTYPES:
        raise TypeError(f"q, k and v must be float32, float16 or bfloat16, got {dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}"
        )
    if k_shape != v_shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k_shape)} and {tuple(v_shape)}")
    B, Hq, _, D = q_shape
    B_kv, Hkv, _, D_kv = k_shape
    if B_kv != B or D_kv != D:
        raise ValueError(
            f"q and k must agree in batch and head dim, got q {tuple(q_shape)} and "
            f"k {tuple(k_shape)}"
        )
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"head dim must be from 1 to {MAX_HEAD_DIM}, got {D}")
    if (Hkv == 0 and Hq != 0) or (Hkv != 0 and Hq % Hkv != 0):
        raise ValueError(
            f"query heads must be a multiple of key heads, got {Hq} query and {Hkv} key heads"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale}")


def _check_softmax(x: torch.Tensor, dim: int, is_causal: bool) -> int:
    """Returns dim counted from 0."""
    if x.dtype not in REFERENCE_DTYPES:
        raise TypeError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("x must have at least one dim, got a scalar")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be from {-x.dim()} to {x.dim() - 1}, got {dim}")
    dim = dim % x.dim()
    if is_causal and (x.dim() < 2 or dim != x.dim() - 1):
        raise ValueError(
            "is_causal reads x as [..., Sq, Skv] and needs the last dim of at least two, "
            f"got dim {dim} of shape {tuple(x.shape)}"
        )
    return dim


def _library_problem(library: str, device_type: str, device_index: int | None) -> str | None:
    if library == "triton":
        return runtime.triton_problem(device_type, device_index)
    return runtime.tilelang_problem(device_type, device_index)


# Dynamo then calls it while tracing and bakes the answer in: it looks at the machine, not at data.
# This is what torch.compiler.assume_constant_result does; to call that here would import all of
# dynamo, and triton with it.
_library_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _device_problem(kernel: str, x: torch.Tensor) -> str | None:
    library = LIBRARIES.get(kernel)
    if library is None:
        return None
    return _library_problem(library, _device_type(x), x.get_device() if x.is_cuda else None)


def _attention_problem(kernel: str, q: torch.Tensor, return_lse: bool) -> str | None:
    _known(kernel, ATTENTION_KERNELS)
    if q.dtype == torch.float64 and kernel != "reference":
        return "it computes float32, float16 and bfloat16, not float64"
    if return_lse and kernel not in LSE_KERNELS:
        return "it does not return lse"
    return _device_problem(kernel, q)


def _softmax_problem(kernel: str, x: torch.Tensor) -> str | None:
    _known(kernel, SOFTMAX_KERNELS)
    if x.dtype == torch.float64 and kernel != "reference":
        return "it computes float32, float16 and bfloat16, not float64"
    return _device_problem(kernel, x)


def _announce_auto(kernel: str, why: str) -> None:
    """Says once what auto chose."""
    if kernel not in _announced:
        _announced.add(kernel)
        logger.info("auto: attention runs on '%s' (%s)", kernel, why)


_announced: set[str] = set()
# As above: it logs, and must not break a graph.
_announce_auto._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _run_attention(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    match kernel:
        case "reference":
            out, lse = attention_reference(q, k, v, is_causal=is_causal, scale=scale)
            return out.to(q.dtype), lse.float()
        case "eager":
            from minitx.kernels.eager import eager_attention

            return eager_attention(q, k, v, is_causal=is_causal, scale=scale, return_lse=return_lse)
        case "sdpa":
            from minitx.kernels.sdpa import sdpa_attention

            return sdpa_attention(q, k, v, is_causal=is_causal, scale=scale), None
        case "triton-softmax" | "tilelang-softmax":
            from minitx.kernels.softmax_attention import softmax_attention

            row_softmax = kernel.removesuffix("-softmax")
            return softmax_attention(
                q, k, v, is_causal=is_causal, scale=scale, kernel=row_softmax
            ), None
        case "triton":
            # From the module itself, for `from minitx.kernels import` looks for it in the package.
            from minitx.kernels.triton_attention import triton_attention

            return triton_attention(q, k, v, is_causal=is_causal, scale=scale)
        case "tilelang":
            from minitx.kernels.tilelang_attention import tilelang_attention

            return tilelang_attention(q, k, v, is_causal=is_causal, scale=scale)
    raise AssertionError(f"kernel '{kernel}' passed validation but has no branch")


def _run_softmax(kernel: str, rows: torch.Tensor, is_causal: bool) -> torch.Tensor:
    match kernel:
        case "reference":
            return softmax_reference(rows, is_causal=is_causal).to(rows.dtype)
        case "eager":
            from minitx.kernels.eager import eager_softmax

            return eager_softmax(rows, is_causal=is_causal)
        case "triton":
            from minitx.kernels import triton_softmax

            return triton_softmax.triton_softmax(rows, is_causal=is_causal)
        case "tilelang":
            from minitx.kernels import tilelang_softmax

            return tilelang_softmax.tilelang_softmax(rows, is_causal=is_causal)
    raise AssertionError(f"kernel '{kernel}' passed validation but has no branch")
