"""How every attention kernel must behave: integration with PyTorch, refusals, devices."""

import pytest
import torch
from attention_contract import NAN, check
from torch.utils.checkpoint import checkpoint

from minitx.kernels import KernelUnavailableError, attention
from minitx.testing import make_qkv, max_error, oracle_attention, run_attention


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


# Integration


@pytest.mark.contract("autocast and checkpointing")
def test_autocast_casts_all_three(kernel, device):
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=device)
    q.requires_grad_()
    k, v = k.bfloat16(), v.bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(q, k, v, kernel=kernel)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    with pytest.raises(TypeError, match=r"float32, torch\.bfloat16"):
        attention(q, k, v, kernel=kernel)


@pytest.mark.contract("autocast and checkpointing")
def test_autocast_casts_another_half_precision_too(kernel, device):
    q, k, v = make_qkv(1, 2, 2, 20, 20, 16, device=device, dtype=torch.float16)
    q.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(q, k, v, kernel=kernel)
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), kernel=kernel))
    out.float().sum().backward()
    assert q.grad.dtype == torch.float16


@pytest.mark.contract("autocast and checkpointing")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_under_autocast(kernel, device, use_reentrant):
    x = torch.randn(2, 20, 32, device=device, requires_grad=True)
    weight = torch.randn(32, 96, device=device, requires_grad=True)

    def block(x):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, kernel=kernel).transpose(1, 2).flatten(2)

    with torch.autocast(device, dtype=torch.bfloat16):
        plain = torch.autograd.grad(block(x).float().square().sum(), (x, weight))
        out = checkpoint(block, x, use_reentrant=use_reentrant)
        out.float().square().sum().backward()
    torch.testing.assert_close(x.grad, plain[0])
    torch.testing.assert_close(weight.grad, plain[1])


@pytest.mark.contract("torch.func")
@pytest.mark.parametrize("transform", ["grad", "grad of each", "grad of all"])
# PyTorch's word on its own kernels under vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func(kernel, device, transform):
    q, k, v = (t[:, None] for t in make_qkv(3, 4, 2, 20, 20, 16, device=device))

    def run(name: str) -> torch.Tensor:
        def loss(q, k, v):
            return attention(q, k, v, kernel=name).square().sum()

        match transform:
            case "grad":
                return torch.func.grad(loss)(q[0], k[0], v[0])
            case "grad of each":  # keys and values shared by all
                return torch.vmap(torch.func.grad(loss), in_dims=(0, None, None))(q, k[0], v[0])
            case "grad of all":
                return torch.func.grad(lambda q: torch.vmap(loss)(q, k, v).sum())(q)

    torch.testing.assert_close(run(kernel), run("reference"))


@pytest.mark.contract("torch.compile and opcheck")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_compiled_without_a_break_or_a_compile_per_length(kernel, device, layout):
    torch._dynamo.reset()

    def block(q, k, v):
        return attention(q * 2, k, v, kernel=kernel) + 1

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, S in enumerate((64, 70, 33)):
        q, k, v = (
            t.requires_grad_() for t in make_qkv(2, 4, 2, S, S, 16, device=device, layout=layout)
        )
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(q, k, v)
        expected = block(q, k, v)
        torch.testing.assert_close(out, expected)
        dout = torch.randn_like(out)
        for actual, wanted in zip(
            torch.autograd.grad(out, (q, k, v), dout),
            torch.autograd.grad(expected, (q, k, v), dout),
            strict=True,
        ):
            torch.testing.assert_close(actual, wanted)


# Refusals


@pytest.mark.contract("refusals")
@pytest.mark.parametrize(
    ("q_shape", "k_shape", "v_shape", "message"),
    [
        ((1, 2, 8, 64), (1, 2, 8, 32), (1, 2, 8, 32), "head dim"),
        ((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 7, 16), "one shape"),
        ((1, 4, 8, 16), (1, 3, 8, 16), (1, 3, 8, 16), "multiple of key heads"),
        ((2, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16), "batch"),
        ((2, 8, 16), (2, 8, 16), (2, 8, 16), "4-D"),
        ((1, 1, 8, 257), (1, 1, 8, 257), (1, 1, 8, 257), "from 1 to 256"),
    ],
)
def test_shapes_that_do_not_fit(kernel, q_shape, k_shape, v_shape, message):
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(s) for s in (q_shape, k_shape, v_shape)), kernel=kernel)


@pytest.mark.contract("refusals")
def test_dtypes_that_do_not_fit(kernel, device):
    x = torch.zeros(1, 1, 8, 16, device=device)
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        attention(*[x.long()] * 3, kernel=kernel)
    with pytest.raises(KernelUnavailableError, match=f"'{kernel}'.*float64.*can: "):
        attention(*[x.double()] * 3, kernel=kernel)


# On a GPU


@pytest.mark.contract("dtypes")
@pytest.mark.gpu
def test_float32_is_not_tf32(kernel, has_lse):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 128, 64, generator=generator).cuda() for _ in range(4))
    truth = oracle_attention(q, k, v, dout, is_causal=True)
    actual = run_attention(kernel, q, k, v, dout, is_causal=True, return_lse=has_lse)
    for name in ("out", "dq", "dk", "dv"):
        assert max_error(getattr(actual, name), getattr(truth, name)) <= 2e-5, name


@pytest.mark.contract("NaN, inf and huge logits")
@pytest.mark.gpu
def test_uninitialised_memory_is_never_read(kernel, has_lse):
    q, k, v = make_qkv(2, 4, 2, 65, 65, 40, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        poison = torch.full((64 << 20,), NAN, device="cuda")
        del poison  # its memory is what the kernel's outputs and buffers are made of
        check(kernel, has_lse, q, k, v, is_causal=True)


@pytest.mark.contract("sizes")
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(65536, 1, 2, 16), (10923, 6, 2, 16), (1, 1, 1200000, 16)])
def test_more_programs_than_a_grid_has_in_y(kernel, shape):
    if shape[2] > 2 and kernel == "eager":
        pytest.skip("its scores do not fit")
    q, k = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(2))
    if shape[2] > 2:  # many tiles, but few keys
        k = k[:, :, :100]
    v = torch.ones_like(k)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, is_causal=False, kernel=kernel)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=2e-3)
    out.sum().backward()
    torch.testing.assert_close(q.grad, torch.zeros_like(q), rtol=0, atol=2e-2)
    torch.testing.assert_close(
        v.grad.float().sum(), torch.tensor(float(out.numel()), device="cuda"), rtol=1e-2, atol=0
    )


@pytest.mark.contract("sizes")
@pytest.mark.gpu
@pytest.mark.huge
def test_offsets_beyond_32_bits(kernel):
    if kernel == "eager":
        pytest.skip("its scores do not fit")
    shape = (2048, 16, 1024, 72)  # 2.4e9 elements
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = attention(q, k, v, kernel=kernel)
    last = [t.detach()[-1:, -1:].clone().requires_grad_() for t in (q, k, v)]
    expected = attention(*last, kernel=kernel)
    torch.testing.assert_close(out[-1:, -1:], expected, rtol=0, atol=1.6e-2)
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(out[-1:, -1:], (q, k, v), dout)
    wanted = torch.autograd.grad(expected, last, dout)
    for actual, value in zip(grads, wanted, strict=True):
        torch.testing.assert_close(actual[-1:, -1:], value, rtol=0, atol=3e-2)


@pytest.mark.contract("sizes")
@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_long_enough_to_fill_the_pipeline(kernel, has_lse, dtype, D):
    q, k, v = make_qkv(1, 4, 2, 1000, 1100, D, device="cuda", dtype=dtype)
    for is_causal in (True, False):
        check(kernel, has_lse, q, k, v, is_causal=is_causal)


@pytest.mark.contract("CUDA graphs, streams, devices, threads")
@pytest.mark.gpu
def test_current_stream(kernel):
    q, k, v = make_qkv(2, 4, 4, 256, 256, 64, device="cuda", dtype=torch.float16)
    expected = attention(q, k, v, kernel=kernel)
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    slow = torch.randn(8192, 8192, device="cuda")
    with torch.cuda.stream(stream):
        for _ in range(4):
            slow = slow @ slow  # what is launched on another stream runs before q is there
        late.copy_(q)
        out = attention(late, k, v, kernel=kernel)
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected)


@pytest.mark.contract("CUDA graphs, streams, devices, threads")
@pytest.mark.gpu
# PyTorch's word on the leaves of this test, which are made outside of the capturing stream.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_cuda_graph(kernel):
    q, k, v = make_qkv(2, 4, 4, 256, 256, 64, device="cuda", dtype=torch.float16)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    dout = torch.randn_like(q)

    def step():
        out = attention(q, k, v, kernel=kernel)
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
        torch.testing.assert_close(actual, expected)


@pytest.mark.contract("CUDA graphs, streams, devices, threads")
@pytest.mark.two_gpus
def test_tensors_of_another_gpu(kernel, has_lse):
    torch.cuda.set_device(0)
    q, k, v = make_qkv(1, 4, 2, 130, 130, 64, device="cuda:1", dtype=torch.float16)
    check(kernel, has_lse, q, k, v, is_causal=True)
    assert torch.cuda.current_device() == 0
