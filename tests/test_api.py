"""The public functions: one validation, one refusal, one answer from supports()."""

import logging

import pytest
import torch

from minitx.kernels import (
    ATTENTION_KERNELS,
    SOFTMAX_KERNELS,
    KernelUnavailableError,
    api,
    attention,
    checks,
    softmax,
    supports,
    supports_softmax,
)
from minitx.testing import make_qkv


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(k=torch.zeros(1, 2, 4, 8, device="meta")),
            ValueError,
            "on one device, got cpu, meta",
        ),
        (dict(q=torch.zeros(1, 2, 4, 8).int()), TypeError, "one dtype, got torch.int32"),
        (dict(v=torch.zeros(1, 2, 4, 8).half()), TypeError, "one dtype, got torch.float32"),
        (dict(scale=float("nan")), ValueError, "scale must be a finite number or None, got nan"),
        (dict(scale=float("inf")), ValueError, "scale must be a finite number or None, got inf"),
    ],
    ids=["device", "int", "mixed", "nan scale", "inf scale"],
)
def test_bad_input_is_named_before_any_launch(kernel, change, error, message):
    settings = dict(zip("qkv", make_qkv(1, 2, 2, 4, 4, 8), strict=True)) | change
    with pytest.raises(error, match=message):
        attention(**settings, kernel=kernel)
    support = supports(kernel, **settings)
    assert not support.ok
    assert message.split(",")[0] in support.reason


def test_all_integer_inputs_are_refused_by_dtype():
    q = torch.zeros(1, 1, 2, 4, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"must be float32, float16 or bfloat16, got torch\.int64"):
        attention(q, q, q, kernel="eager")


def test_unknown_names_are_refused():
    q, k, v = make_qkv(1, 1, 1, 2, 2, 4)
    for call in (
        lambda: attention(q, k, v, kernel="flash"),
        lambda: supports("flash", q, k, v),
        lambda: softmax(q, kernel="sdpa"),
        lambda: supports_softmax("sdpa", q),
    ):
        with pytest.raises(
            ValueError, match=r"unknown kernel '(flash|sdpa)'; expected auto or one of"
        ):
            call()


def test_a_refusal_names_the_kernel_the_reason_and_what_can():
    q, k, v = make_qkv(1, 1, 1, 2, 2, 4)
    with pytest.raises(KernelUnavailableError) as caught:
        attention(q, k, v, kernel="sdpa", return_lse=True)
    message = str(caught.value)
    assert message.startswith("kernel 'sdpa' cannot run this attention: it does not return lse. ")
    able = message.split("Kernels that can: ")[1].split(", ")
    assert "eager" in able
    assert "sdpa" not in able
    for name in able:  # what is promised is kept
        attention(q, k, v, kernel=name, return_lse=True)
    assert supports("sdpa", q, k, v, return_lse=True) == (False, "it does not return lse")
    assert supports("sdpa", q, k, v) == (True, "")


@pytest.mark.parametrize("kernel", [k for k in ATTENTION_KERNELS if k != "reference"])
def test_float64_is_real_float64_or_refused(kernel):
    q, k, v = make_qkv(1, 1, 1, 2, 2, 4, dtype=torch.float64)
    assert attention(q, k, v, kernel="reference").dtype == torch.float64
    with pytest.raises(KernelUnavailableError, match=r"not float64. Kernels that can: reference"):
        attention(q, k, v, kernel=kernel)


def test_a_library_that_cannot_run_is_refused_and_others_work(monkeypatch):
    monkeypatch.setattr(checks, "library_problem", lambda *_: "the compiler is on holiday")
    q, k, v = make_qkv(1, 1, 1, 2, 2, 4)
    for kernel in ("triton", "tilelang", "triton-softmax", "tilelang-softmax"):
        with pytest.raises(KernelUnavailableError, match=f"'{kernel}'.*on holiday.*eager, sdpa$"):
            attention(q, k, v, kernel=kernel)
    for kernel in ("triton", "tilelang"):
        with pytest.raises(KernelUnavailableError, match=f"'{kernel}'.*on holiday.*eager$"):
            softmax(q, kernel=kernel)
    attention(q, k, v, kernel="eager")


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_autocast_casts_as_pytorch_does(kernel, device):
    """float32 q, bfloat16 k and v: cast inside autocast, refused outside; gradients keep dtypes."""
    q, k, v = make_qkv(1, 2, 2, 5, 5, 8, device=device)
    k, v = k.bfloat16(), v.bfloat16()
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    with torch.autocast(device, torch.bfloat16):
        out = attention(q, k, v, kernel=kernel)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert [t.grad.dtype for t in (q, k, v)] == [torch.float32, torch.bfloat16, torch.bfloat16]
    with pytest.raises(TypeError, match="one dtype"):
        attention(q, k, v, kernel=kernel)


def test_auto_says_what_it_chose_once(device, caplog):
    api._announced.clear()
    q, k, v = make_qkv(1, 1, 1, 2, 2, 4, device=device)
    with caplog.at_level(logging.INFO, logger="minitx"):
        for _ in range(3):
            out = attention(q, k, v, kernel="auto")
    lines = [r.message for r in caplog.records if r.message.startswith("auto:")]
    assert len(lines) == 1
    chosen = lines[0].split("'")[1]
    assert torch.equal(out, attention(q, k, v, kernel=chosen))
    # sdpa has no lse; auto must choose one that does.
    assert attention(q, k, v, kernel="auto", return_lse=True)[1].shape == (1, 1, 2)


@pytest.mark.parametrize("kernel", SOFTMAX_KERNELS)
@pytest.mark.parametrize(
    ("x", "settings", "error", "message"),
    [
        (torch.zeros(2, 3), dict(dim=2), ValueError, "dim must be from -2 to 1, got 2"),
        (torch.zeros(2, 3), dict(dim=-3), ValueError, "dim must be from -2 to 1, got -3"),
        (torch.zeros(()), dict(), ValueError, "at least one dim"),
        (torch.zeros(2, 3).int(), dict(), TypeError, r"got torch\.int32"),
        (torch.zeros(2, 3), dict(dim=0, is_causal=True), ValueError, "is_causal reads x as"),
        (torch.zeros(3), dict(is_causal=True), ValueError, "is_causal reads x as"),
    ],
)
def test_bad_softmax_input_is_named(kernel, x, settings, error, message):
    with pytest.raises(error, match=message):
        softmax(x, kernel=kernel, **settings)
    assert not supports_softmax(kernel, x, **settings).ok


def test_auto_compiles_without_a_break():
    torch._dynamo.reset()
    api._announced.clear()
    q, k, v = make_qkv(1, 2, 2, 5, 5, 8)
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, kernel="auto"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v), attention(q, k, v, kernel="auto"))
