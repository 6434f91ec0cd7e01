"""Attention by torch.nn.functional.scaled_dot_product_attention, under this project's causal rule.

PyTorch picks the backend (cuDNN, flash, memory-efficient, math). Its `is_causal` is aligned
top-left, so it is used only where top-left and bottom-right agree. Where they do not, its flash
kernel is asked itself, which means bottom-right by the word; whatever flash does not take is given
a mask.
"""

import functools

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitx.kernels.reference import causal_mask
from minitx.kernels.runtime import is_eager

# cuDNN puts batch and heads on a grid axis of 65535 and fails beyond it (torch 2.11, cuDNN 9);
# flash gives each an axis of its own.
MAX_HEADS = 65535
# PyTorch's CPU kernel finds the largest of fewer scores than a vector holds (16 at most) with a
# maximum that drops NaN: a row of NaN alone came out 0 (torch 2.13).
MIN_CPU_KEYS = 16
MIN_SCALE = 2.0**-126  # below it float32 is not normal, and may be taken for 0


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> torch.Tensor:
    """out [B, Hq, Sq, D] in q's dtype. Shapes as in `attention`.

    With 1 < Sq < Skv and `is_causal` a boolean mask of Sq * Skv bytes is made, of which PyTorch
    may make one in q's dtype, but for what flash takes: 16 bits on a GPU of NVIDIA's, not compiled
    and not within torch.func, where `sdpa_kernel` has not switched flash off. PyTorch adds such a
    mask to the scores: a masked one that is NaN stays NaN. With a scale that is not positive q is
    copied, and so are, on a GPU, inputs whose rows do not start at multiples of 16 bytes; a head
    dim that is not a multiple of 8 is padded. With `is_causal` and Sq == Skv inputs whose last dim
    is strided are copied, and on a CPU those of less than MIN_CPU_KEYS keys. On a GPU tensors of
    2^31 elements and more are taken in parts, and out is copied together from theirs.
    """
    Sq, Skv = q.shape[2], k.shape[2]
    if q.numel() == 0 or Skv == 0:  # zeros, with gradients of 0 for q and empty ones for k and v
        group = q.shape[1] // k.shape[1] if k.shape[1] else 1
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return (q @ k.transpose(-1, -2)) @ v
    if is_causal and Sq > Skv:  # the first Sq - Skv queries see no key
        out = sdpa_attention(q[:, :, Sq - Skv :], k, v, is_causal=True, scale=scale)
        return F.pad(out, (0, 0, Sq - Skv, 0))
    # PyTorch multiplies a masked score of -inf by the scale, which gives NaN unless it is positive.
    if scale <= -MIN_SCALE:
        q, scale = -q, -scale
    elif scale < MIN_SCALE:
        q, scale = q * 0.0, 1.0
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    if q.is_cuda and not (_in_32_bits(q) and _in_32_bits(k) and _in_32_bits(v)):
        dim = 0 if q.shape[0] > 1 else 1
        if k.shape[dim] > 1:
            parts = [
                t.split(t.shape[dim] // k.shape[dim] * (k.shape[dim] // 2), dim) for t in (q, k, v)
            ]
            outs = [
                sdpa_attention(*part, is_causal=is_causal, scale=scale)
                for part in zip(*parts, strict=True)
            ]
            return torch.cat(outs, dim)
    mask = None
    if is_causal and 1 < Sq < Skv:
        if _flash_takes(q, k, v):
            return _with_aligned_gradient(_flash_bottom_right(q, k, v, scale))
        mask = causal_mask(Sq, Skv, q.device)
    # Where torch.compile keeps sizes symbolic, a comparison is a bool only once it was branched on.
    is_square_causal = True if is_causal and Sq == Skv else False  # noqa: SIM210
    is_grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210
    if is_square_causal:
        q, k, v = _for_fused(q), _for_fused(k), _for_fused(v)
    call = functools.partial(
        F.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=is_square_causal,
        scale=scale,
        enable_gqa=is_grouped,
    )
    if q.shape[0] * q.shape[1] > MAX_HEADS and q.is_cuda:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return _with_aligned_gradient(call(q, k, v))
    if not is_square_causal and not q.is_cuda and Skv < MIN_CPU_KEYS:
        with sdpa_kernel(SDPBackend.MATH):
            return call(q, k, v)
    out = call(q, k, v)
    return _with_aligned_gradient(out if out.shape[2] == Sq else out[:, :, :Sq])


def _for_fused(x: torch.Tensor) -> torch.Tensor:
    """q, k or v of a causal square, as PyTorch's fused kernels take it: with rows that are
    contiguous and, on a CPU, of MIN_CPU_KEYS at least.

    Those kernels leave a masked score out. PyTorch's math, which takes what they do not, adds -inf
    to it, and a NaN stays one. The zeros that follow are keys that no query sees but those that
    follow, too.
    """
    if x.stride(3) != 1:
        x = x.clone(memory_format=torch.contiguous_format)
    missing = MIN_CPU_KEYS - x.shape[2]
    return x if x.is_cuda or missing <= 0 else F.pad(x, (0, 0, 0, missing))


def _flash_takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether PyTorch's flash kernel can be asked for these inputs.

    Dynamo does not trace the question but after the import of `torch.nn.attention.bias`, which
    takes 2 s and imports triton. Within torch.func wrappers stand for what a kernel would get, of
    which neither the addresses nor the number of heads is known. On AMD's GPUs the op is another
    library's kernel, whose causal rule need not be FlashAttention's.
    """
    if not q.is_cuda or torch.version.hip is not None or not is_eager():
        return False
    if q.shape[0] * q.shape[1] > MAX_HEADS:
        return False
    is_grouped = q.shape[1] != k.shape[1]
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, is_grouped))


def _flash_bottom_right(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """out [B, Hq, Sq, D] under the bottom-right causal rule.

    What PyTorch's `causal_lower_right` comes to where flash can run, without its module's import.
    The op's `is_causal` is FlashAttention's own, aligned bottom-right since its version 2.1;
    scaled_dot_product_attention, whose own is not, passes it on for squares alone.
    """
    D = q.shape[3]
    if D % 8:  # which the op, unlike that function, leaves to its caller
        q, k, v = (F.pad(t, (0, 8 - D % 8)) for t in (q, k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out = flash(q, k, v, is_causal=True, scale=scale)[0]
    return out[..., :D] if D % 8 else out


def _with_aligned_gradient(out: torch.Tensor) -> torch.Tensor:
    """out, whose gradient is handed on aligned: it may come with any strides, from any address."""
    if out.is_cuda and out.requires_grad and is_eager():
        out.register_hook(_aligned)
    return out


def _in_32_bits(x: torch.Tensor) -> bool:
    """Whether 32 bits hold every offset in x. Where they do not, PyTorch gave wrong results (torch
    2.11 on an H200, [2048, 16, 1024, 72] in bfloat16)."""
    (B, H, S, D), (b, h, s, d) = x.shape, x.stride()
    return (B - 1) * b + (H - 1) * h + (S - 1) * s + (D - 1) * d < 2**31


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where PyTorch's kernels would load 16 bytes from an address that is no multiple.

    They check strides, not addresses: a view that starts at an odd offset ends the process's CUDA
    context with "misaligned address" (seen with torch 2.11 on an H200).
    """
    # Compiled code sees to it by itself, and dynamo cannot read a storage offset.
    if not x.is_cuda or torch.compiler.is_compiling():
        return x
    x = _without_stray_strides(x)
    starts = x.storage_offset()
    if not x.is_contiguous():  # PyTorch pads head dims of its own accord
        b, h, s, _ = x.stride()
        starts |= b | h | s  # a power of two divides them all if it divides their bits together
    if starts * x.element_size() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _without_stray_strides(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D], where dims of one with strides that PyTorch's kernels might refuse have those
    that a contiguous tensor's would.

    Theirs mean nothing and may be any number, and is_contiguous() does not ask for them. PyTorch's
    kernels do: they refuse an odd one, and one beyond 32 bits (torch 2.11 on an H200).
    """
    for dim in (2, 1, 0):
        # Others stay, as a view takes the host longer than to look.
        if x.shape[dim] == 1 and (x.stride(dim) * x.element_size() % 16 or x.stride(dim) >= 2**31):
            x = x.squeeze(dim).unsqueeze(dim)
    return x
