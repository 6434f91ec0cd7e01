"""Input makers and error budgets, shared by the tests, the parity check and the benchmarks.

An error budget is not a tolerance picked by hand. With the float64 oracle as truth, a kernel may
err twice as much as eager attention in the same dtype does on the same input, and by one rounding
of that dtype:

    max |x - oracle|  <=  2 * max |eager - oracle|  +  eps(dtype) * max(1, max |oracle|)

A gradient may err by one rounding more. A backward that keeps no scores recomputes p = exp(score -
lse) from the float32 lse that attention returns, and half a unit in lse's last place is a relative
error of p:

    eps(float32) * max |lse| * max(1, max |oracle|)

Next to the rounding of a 16-bit dtype that is nothing; in float32 it is about as much as all else
together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from minitx.kernels import attention, attention_reference

LAYOUTS = ("bhsd", "bshd", "qkv", "step2", "offset")


def make_qkv(
    B: int = 2,
    Hq: int = 2,
    Hkv: int | None = None,
    Sq: int = 33,
    Skv: int | None = None,
    D: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "bhsd",
    seed: int = 0,
    std: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random normal q [B, Hq, Sq, D] and k, v [B, Hkv, Skv, D], leaves that require no gradient.

    layout: "bhsd" contiguous; "bshd" a transposed view of [B, S, H, D]; "qkv" slices of one fused
    projection (Sq must equal Skv); "step2" every other element of a wider tensor (stride 2 inside);
    "offset" a contiguous view that starts one element into its storage.
    """
    Hkv = Hq if Hkv is None else Hkv
    Skv = Sq if Skv is None else Skv
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device, dtype)

    if layout == "qkv":
        assert Sq == Skv, "a fused projection has one length"
        fused = normal(B, Sq, Hq + 2 * Hkv, D).transpose(1, 2)
        return fused[:, :Hq], fused[:, Hq : Hq + Hkv], fused[:, Hq + Hkv :]

    def one(H: int, S: int) -> torch.Tensor:
        match layout:
            case "bhsd":
                return normal(B, H, S, D)
            case "bshd":
                return normal(B, S, H, D).transpose(1, 2)
            case "step2":
                return normal(B, H, S, 2 * D)[..., ::2]
            case "offset":
                return normal(B * H * S * D + 1)[1:].view(B, H, S, D)
        raise ValueError(f"unknown layout '{layout}'; expected one of {', '.join(LAYOUTS)}")

    return one(Hq, Sq), one(Hkv, Skv), one(Hkv, Skv)


@dataclass
class AttentionResult:
    """What attention gives: out, lse (None where the kernel has none) and the three gradients."""

    out: torch.Tensor
    lse: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def run_attention(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    dlse: torch.Tensor | None = None,
    return_lse: bool = True,
) -> AttentionResult:
    """Forward and backward of `attention` on a kernel; `dlse` also sends a gradient through lse."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    result = attention(
        q, k, v, is_causal=is_causal, scale=scale, kernel=kernel, return_lse=return_lse
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    outputs, grads = [out], [dout]
    if dlse is not None:
        assert lse is not None
        outputs, grads = [out, lse], [dout, dlse]
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return AttentionResult(out.detach(), None if lse is None else lse.detach(), dq, dk, dv)


def oracle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    dlse: torch.Tensor | None = None,
) -> AttentionResult:
    """The same in float64, by the reference and autograd."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    out, lse = attention_reference(q, k, v, is_causal=is_causal, scale=scale)
    outputs, grads = [out], [dout.double()]
    if dlse is not None:
        # A row without keys has lse -inf for ever: whatever gradient it is sent ends there.
        outputs, grads = [out, lse], [dout.double(), dlse.double()]
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return AttentionResult(out.detach(), lse.detach(), dq, dk, dv)


def max_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities differ by 0, and NaN on one side alone by
    inf."""
    if actual.numel() == 0:
        return 0.0
    actual, truth = actual.double(), truth.double()
    same = (actual == truth) | (actual.isnan() & truth.isnan())
    error = (actual - truth).abs().masked_fill(same, 0.0)
    return error.nan_to_num(nan=math.inf, posinf=math.inf).max().item()


def error_budget(
    eager: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, lse_size: float = 0.0
) -> float:
    """The largest error that the module's formulas allow; `dtype` is the inputs'.

    lse_size: of a gradient, the largest finite |lse|.
    """
    if truth.numel() == 0:
        return 0.0
    finite = truth.double()[truth.isfinite()]
    size = finite.abs().max().item() if finite.numel() else 0.0
    rounding = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * lse_size
    return 2.0 * max_error(eager, truth) + rounding * max(size, 1.0)


def assert_within_budget(
    actual: AttentionResult, eager: AttentionResult, truth: AttentionResult, dtype: torch.dtype
) -> None:
    """Fails with the name of the first tensor whose error is beyond its budget, and both
    figures."""
    assert truth.lse is not None
    finite = truth.lse[truth.lse.isfinite()]
    lse_size = finite.abs().max().item() if finite.numel() else 0.0
    for field in fields(AttentionResult):
        got, want = getattr(actual, field.name), getattr(truth, field.name)
        if got is None:
            continue
        baseline = getattr(eager, field.name)
        # lse is float32 whatever the inputs are, but its scores were rounded to them.
        budget = error_budget(
            baseline if baseline is not None else want,
            want,
            dtype,
            lse_size if field.name in ("dq", "dk", "dv") else 0.0,
        )
        error = max_error(got, want)
        assert got.shape == want.shape, f"{field.name}: shape {got.shape}, expected {want.shape}"
        assert error <= budget, f"{field.name}: error {error:.3e} beyond its budget {budget:.3e}"


def check_attention(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    return_lse: bool = True,
    with_dlse: bool = False,
    seed: int = 1,
) -> AttentionResult:
    """Runs a kernel forward and backward and holds all five results to the budget; returns them."""
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(q.shape, generator=generator).to(q.device, q.dtype)
    dlse = None
    if with_dlse:
        dlse = torch.randn(q.shape[:-1], generator=generator).to(q.device)
    truth = oracle_attention(q, k, v, dout, is_causal=is_causal, scale=scale, dlse=dlse)
    run: Callable[[str, bool], AttentionResult] = lambda name, lse: run_attention(  # noqa: E731
        name, q, k, v, dout, is_causal=is_causal, scale=scale, dlse=dlse, return_lse=lse
    )
    actual = run(kernel, return_lse)
    assert_within_budget(actual, run("eager", True), truth, q.dtype)
    return actual
