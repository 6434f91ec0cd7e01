"""PyTorch's own attention where its causal rule is not this project's: fewer queries than keys.

There the flash kernel is asked without a mask, which takes a GPU; tests of results run on a CPU as
well, where a mask is made.
"""

from types import SimpleNamespace

import pytest
import torch
from attention_contract import NAN, check
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitx.kernels import attention, sdpa
from minitx.testing import make_qkv, run_attention


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("Hq", "Hkv", "Sq", "Skv", "D", "layout"),
    [
        pytest.param(2, 2, 2, 3, 64, "bhsd", id="few"),
        pytest.param(4, 1, 70, 333, 20, "bshd", id="padded-gqa"),  # a head dim that flash pads
        pytest.param(4, 2, 129, 1000, 128, "bhsd", id="gqa"),  # tiles that end unevenly
        pytest.param(2, 2, 30, 4000, 64, "bhsd", id="split"),  # keys are shared out and summed up
        pytest.param(1, 1, 40, 100, 256, "offset", id="widest"),  # and from an odd address
        pytest.param(2, 2, 40, 100, 16, "step2", id="step2"),  # strides that flash does not take
    ],
)
def test_values_and_gradients_of_the_last_queries(device, dtype, Hq, Hkv, Sq, Skv, D, layout):
    q, k, v = make_qkv(2, Hq, Hkv, Sq, Skv, D, dtype=dtype, device=device, layout=layout)
    check("sdpa", False, q, k, v, is_causal=True)
    check("sdpa", False, q, k, v, is_causal=True, scale=-0.3)


@pytest.mark.gpu  # to a mask of -inf PyTorch adds the score, so that a NaN stays one
def test_a_nan_key_reaches_only_the_last_queries_that_see_it():
    q, k, v = make_qkv(1, 2, 1, 40, 70, 16, device="cuda", dtype=torch.bfloat16)
    clean = attention(q, k, v, kernel="sdpa")
    k[:, :, 50] = NAN  # query 20 sees keys up to 50
    out = attention(q, k, v, kernel="sdpa")
    torch.testing.assert_close(out[:, :, :20], clean[:, :, :20])
    assert out[:, :, 20:].isnan().all()


def test_dout_of_the_last_queries_from_an_odd_address(device):
    q, k, v = make_qkv(1, 2, 2, 20, 50, 16, device=device, dtype=torch.bfloat16)
    dout = torch.randn(q.numel() + 1, device=device, dtype=q.dtype)[1:].view(q.shape)
    kwargs = {"is_causal": True, "return_lse": False}
    actual = run_attention("sdpa", q, k, v, dout, **kwargs)
    expected = run_attention("sdpa", q, k, v, dout.clone(), **kwargs)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name))


# PyTorch's word on its own kernels under vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_of_the_last_queries(device):
    q, k, v = (t[:, None] for t in make_qkv(3, 4, 2, 7, 20, 16, device=device))
    q, k, v = (t.bfloat16() for t in (q, k, v))

    def loss(q, k, v):
        return attention(q, k, v, kernel="sdpa").float().square().sum()

    actual = torch.vmap(torch.func.grad(loss))(q, k, v)
    for i in range(3):
        torch.testing.assert_close(actual[i], torch.func.grad(loss)(q[i], k[i], v[i]))


def test_the_last_queries_compiled_without_a_break_or_a_compile_per_length(device):
    torch._dynamo.reset()

    def block(q, k, v):
        return attention(q * 2, k, v, kernel="sdpa") + 1

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, (Sq, Skv) in enumerate(((30, 64), (33, 70), (5, 50))):
        q, k, v = make_qkv(2, 4, 2, Sq, Skv, 16, device=device, dtype=torch.bfloat16)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(q, k, v)
        torch.testing.assert_close(out, block(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH])
def test_a_backend_that_is_asked_for_runs(backend):
    q, k, v = make_qkv(1, 2, 2, 40, 100, 64, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(backend):
        assert not sdpa._flash_takes(q, k, v)
        check("sdpa", False, q, k, v, is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(65536, 1, 2, 16), (10923, 6, 2, 16)])
def test_last_queries_of_more_heads_than_a_grid_has_in_y(shape):
    q = torch.randn(shape, device="cuda", dtype=torch.float16)
    k = torch.randn(*shape[:2], 3, 16, device="cuda", dtype=torch.float16)
    out = attention(q, k, k, kernel="sdpa")
    last = attention(q[-1:, -1:], k[-1:, -1:], k[-1:, -1:], kernel="reference")
    torch.testing.assert_close(out[-1:, -1:], last, rtol=0, atol=4e-3)


@pytest.mark.gpu
def test_no_mask_is_made_for_flash():
    Sq, Skv = 1024, 65536
    q, k, v = make_qkv(1, 4, 1, Sq, Skv, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, kernel="sdpa")
    assert torch.cuda.max_memory_allocated() - before < Sq * Skv


@pytest.mark.parametrize(
    ("Sq", "Skv", "is_causal", "is_asked"),
    [
        (2, 3, True, True),
        (2, 3, False, False),  # all keys: no causal rule at all
        (1, 3, True, False),  # the last query sees them all as well
        (3, 3, True, False),  # there both rules are one
    ],
)
def test_flash_is_asked_where_the_rules_differ(monkeypatch, Sq, Skv, is_causal, is_asked):
    asked = []

    def flash(q, k, v, scale):
        asked.append(scale)
        return torch.zeros_like(q)

    monkeypatch.setattr(sdpa, "_flash_takes", lambda q, k, v: True)
    monkeypatch.setattr(sdpa, "_flash_bottom_right", flash)
    q, k, v = make_qkv(1, 1, 1, Sq, Skv, 8)
    attention(q, k, v, is_causal=is_causal, scale=0.7, kernel="sdpa")
    assert asked == [0.7] * is_asked


def test_what_flash_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(sdpa, "SDPAParams", lambda *parts: parts)
    monkeypatch.setattr(sdpa, "can_use_flash_attention", lambda _: True)

    def on_a_gpu(*shape: int) -> SimpleNamespace:
        return SimpleNamespace(is_cuda=True, shape=shape)

    few, many = on_a_gpu(1, 2, 4, 8), on_a_gpu(256, 256, 4, 8)
    assert sdpa._flash_takes(few, few, few)
    assert not sdpa._flash_takes(many, many, many)
    assert not sdpa._flash_takes(*make_qkv(1, 2, 2, 4, 8, 8))
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "6.4")
        assert not sdpa._flash_takes(few, few, few)
    within = []
    torch.vmap(lambda x: within.append(sdpa._flash_takes(few, few, few)) or x)(torch.zeros(2))
    assert within == [False]


@pytest.mark.parametrize("ones", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("stray", [7, 2**40 + 1])
def test_strides_that_mean_nothing_are_what_a_contiguous_tensors_are(ones, stray):
    """PyTorch's kernels on a GPU refuse others; the other strides stay, and so do the numbers."""
    shape = [1 if dim in ones else size for dim, size in enumerate((2, 3, 5))]
    x = torch.randn(*shape, 16)
    strides = [stray if dim in ones else x.stride(dim) for dim in range(3)]
    plain = sdpa._without_stray_strides(x.as_strided(x.shape, (*strides, 1)))
    assert plain.stride() == x.stride()
    assert torch.equal(plain, x)
    assert plain.data_ptr() == x.data_ptr()
