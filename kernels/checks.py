"""What is asked of a kernel, checked before any runs: names, shapes, dtypes, libraries."""

import math

import torch

from minitx.kernels import runtime

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REFERENCE_DTYPES = (*DTYPES, torch.float64)
MAX_HEAD_DIM = 256
# What kernels that are not PyTorch's own functions are written in.
LIBRARIES = {
    "triton": "triton",
    "triton-softmax": "triton",
    "tilelang": "tilelang",
    "tilelang-softmax": "tilelang",
}


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as autocast, where it is on, would hand them to a function of PyTorch's own."""
    where = device_type(tensors[0])
    if not torch.is_autocast_enabled(where):
        return tensors
    dtype = torch.get_autocast_dtype(where)
    # float64 stays: autocast leaves it alone there too.
    return tuple(t.to(dtype) if t.dtype in DTYPES else t for t in tensors)


def device_type(x: torch.Tensor) -> str:
    return "cuda" if x.is_cuda else x.device.type  # makes a string, slowly


def check_name(kernel: str, names: tuple[str, ...]) -> None:
    if kernel != "auto" and kernel not in names:
        raise ValueError(f"unknown kernel '{kernel}'; expected auto or one of {', '.join(names)}")


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> None:
    """Raises what `attention` says it raises, for arguments that no kernel takes."""
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


def check_softmax(x: torch.Tensor, dim: int, is_causal: bool) -> int:
    """Returns dim counted from 0. Raises what `softmax` says it raises."""
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


def library_problem(library: str, where: str, device_index: int | None) -> str | None:
    """Why "triton" or "tilelang" does not run on a device of type `where`, or None."""
    if library == "triton":
        return runtime.triton_problem(where, device_index)
    return runtime.tilelang_problem(where, device_index)


# Dynamo then calls it while tracing and bakes the answer in: it looks at the machine, not at data.
# This is what torch.compiler.assume_constant_result does; to call that here would import all of
# dynamo, and triton with it.
library_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]


def device_problem(kernel: str, x: torch.Tensor) -> str | None:
    library = LIBRARIES.get(kernel)
    if library is None:
        return None
    return library_problem(library, device_type(x), x.get_device() if x.is_cuda else None)
