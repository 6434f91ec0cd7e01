"""attention() and softmax(): validate once, choose, call.

The only place that knows every kernel's name. A kernel's module is imported when the kernel is
asked for; an explicit choice never falls back to another.
"""

import logging
from typing import NamedTuple

import torch

from minitx.kernels.attention_ops import PACKED, unpack
from minitx.kernels.auto_choice import choose_kernel
from minitx.kernels.checks import (
    autocast,
    check_attention,
    check_name,
    check_softmax,
    device_problem,
)
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

LSE_KERNELS = ("reference", "eager", "triton", "tilelang")


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
    q, k, v = autocast(q, k, v)
    check_attention(q, k, v, scale)
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
    (qkv,) = autocast(qkv)
    q, k, v = unpack(qkv, n_head)
    check_attention(q, k, v, scale)
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
    dim = check_softmax(x, dim, is_causal)
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
    q, k, v = autocast(q, k, v)
    check_name(kernel, ATTENTION_KERNELS)
    try:
        check_attention(q, k, v, scale)
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
    check_name(kernel, SOFTMAX_KERNELS)
    try:
        check_softmax(x, dim, is_causal)
    except (TypeError, ValueError) as error:
        return Support(False, str(error))
    reason = None if kernel == "auto" else _softmax_problem(kernel, x)
    return Support(reason is None, reason or "")


def _attention_problem(kernel: str, q: torch.Tensor, return_lse: bool) -> str | None:
    check_name(kernel, ATTENTION_KERNELS)
    if q.dtype == torch.float64 and kernel != "reference":
        return "it computes float32, float16 and bfloat16, not float64"
    if return_lse and kernel not in LSE_KERNELS:
        return "it does not return lse"
    return device_problem(kernel, q)


def _softmax_problem(kernel: str, x: torch.Tensor) -> str | None:
    check_name(kernel, SOFTMAX_KERNELS)
    if x.dtype == torch.float64 and kernel != "reference":
        return "it computes float32, float16 and bfloat16, not float64"
    return device_problem(kernel, x)


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
