"""The Triton attention's own kernels for Hopper: memory, sizes, streams and devices."""

import math

import pytest
import torch
from triton_hopper import NAMES, both, causal_or_not, each_head_dim, on_hopper

from minitx.kernels import attention
from minitx.testing import check_attention, make_qkv, run_attention

NAN = math.nan


@pytest.mark.contract("NaN, inf and huge logits", "strides", kernel="triton")
@pytest.mark.gpu
@on_hopper
@causal_or_not
@each_head_dim
def test_memory_past_the_lengths_is_never_seen(launches, is_causal, D):
    values = make_qkv(1, 2, 2, 200, 200, D, device="cuda", dtype=torch.bfloat16)
    values = (*values, torch.randn_like(values[0]))
    buffers = torch.full((4, 1, 2, 256, D + 8), NAN, device="cuda", dtype=torch.bfloat16)
    padded = list(buffers[..., :200, :D])
    for view, value in zip(padded, values, strict=True):
        view.copy_(value)
    actual = run_attention("triton", *padded, is_causal=is_causal)
    expected = run_attention("triton", *values, is_causal=is_causal)
    for name in NAMES:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert launches == both(D) * 2


@pytest.mark.contract("determinism", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_same_bits_over_memory_full_of_nan(launches, D):
    q, k, v = make_qkv(2, 4, 2, 1000, 1100, D, device="cuda", dtype=torch.bfloat16)
    dout = torch.randn_like(q)
    first = run_attention("triton", q, k, v, dout, is_causal=True)
    for _ in range(10):
        poison = torch.full((64 << 20,), NAN, device="cuda")
        del poison  # its memory is what the kernels' outputs and buffers are made of
        again = run_attention("triton", q, k, v, dout, is_causal=True)
        for name in NAMES:
            assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert launches == both(D) * 11


# Sizes, and PyTorch around them


@pytest.mark.contract("sizes", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_more_heads_than_a_grid_has_in_y(launches, D):
    q, k = (torch.randn(10923, 6, 20, D, device="cuda", dtype=torch.half) for _ in range(2))
    v = torch.ones_like(k)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, is_causal=False, kernel="triton")
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=2e-3)
    out.backward(torch.ones_like(out))
    # out may be 2^-11 off 1, and delta 128 times that: times scale, and a key as large as 5.
    torch.testing.assert_close(q.grad, torch.zeros_like(q), rtol=0, atol=3e-2)
    total = torch.tensor(float(out.numel()), device="cuda")
    torch.testing.assert_close(v.grad.float().sum(), total, rtol=1e-2, atol=0)
    assert launches == both(D)


@pytest.mark.contract("sizes", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_one_compilation_serves_every_length(D):
    from minitx.kernels.triton_attention_bwd_hopper import attention_bwd_dq_hopper
    from minitx.kernels.triton_attention_dkdv_hopper import attention_bwd_dkdv_hopper
    from minitx.kernels.triton_attention_hopper import attention_fwd_hopper

    every = (attention_fwd_hopper, attention_bwd_dq_hopper, attention_bwd_dkdv_hopper)
    kernels = [kernel for kernel in every if kernel.__name__ in both(D)]

    def compiled() -> list[int]:
        return [sum(len(cache[0]) for cache in k.device_caches.values()) for k in kernels]

    def step(S: int) -> None:
        q, k, v = make_qkv(1, 2, 2, S, S, D, device="cuda", dtype=torch.float16)
        run_attention("triton", q, k, v, torch.randn_like(q), is_causal=True)

    step(64)
    before = compiled()
    assert min(before) > 0
    for S in (17, 70, 77, 129, 1024):
        step(S)
    assert compiled() == before


@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_current_stream(launches, D):
    q, k, v = make_qkv(2, 4, 4, 256, 256, D, device="cuda", dtype=torch.half)
    dout = torch.randn_like(q)
    expected = run_attention("triton", q, k, v, dout, is_causal=True)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    slow = torch.randn(8192, 8192, device="cuda")
    with torch.cuda.stream(stream):
        for _ in range(4):
            slow = slow @ slow  # what is launched on another stream runs before q is there
        late.copy_(q)
        actual = run_attention("triton", late, k, v, dout, is_causal=True)
    torch.cuda.synchronize()
    for name in NAMES:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert launches == both(D) * 2


@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="triton")
@pytest.mark.gpu
@on_hopper
# PyTorch's word on the leaves of this test, which are made outside of the capturing stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@each_head_dim
def test_cuda_graph(launches, D):
    q, k, v = make_qkv(2, 4, 2, 256, 256, D, device="cuda", dtype=torch.half)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    dout = torch.randn_like(q)

    def step():
        out = attention(q, k, v, kernel="triton")
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    for actual, expected in zip(captured, step(), strict=True):
        assert torch.equal(actual, expected)
    assert launches == both(D) * 3


@pytest.mark.contract("torch.compile and opcheck", "torch.func", kernel="triton")
@pytest.mark.gpu
@on_hopper
@each_head_dim
def test_compiled_and_under_vmap(launches, D):
    torch._dynamo.reset()
    q, k, v = make_qkv(3, 4, 2, 200, 200, D, device="cuda", dtype=torch.bfloat16)
    expected = attention(q, k, v, kernel="triton")
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, kernel="triton"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v), expected)
    each = torch.vmap(lambda *one: attention(*(t[None] for t in one), kernel="triton"))
    assert torch.equal(each(q, k, v)[:, 0], expected)
    assert launches == both(D)[:1] * 3


@pytest.mark.contract("CUDA graphs, streams, devices, threads", kernel="triton")
@pytest.mark.two_gpus
@on_hopper
@each_head_dim
def test_tensors_of_another_gpu(launches, D):
    torch.cuda.set_device(0)
    q, k, v = make_qkv(1, 4, 2, 130, 130, D, device="cuda:1", dtype=torch.half)
    check_attention("triton", q, k, v, is_causal=True)
    assert torch.cuda.current_device() == 0
    assert launches == both(D)
