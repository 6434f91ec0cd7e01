"""The Triton row softmax's own parts: blocks, strides, custom ops.

What it shares with the other kernels is in test_softmax_contract.py; rows that are split over
programs are in test_triton_softmax_wide.py.
"""

import os
import subprocess
import sys

import pytest
import torch

from minitx.kernels import KernelUnavailableError, softmax, softmax_reference, supports_softmax
from minitx.testing import max_error

if not supports_softmax("triton", torch.zeros(1)).ok and not torch.cuda.is_available():
    pytest.skip(supports_softmax("triton", torch.zeros(1)).reason, allow_module_level=True)

import triton
import triton.language as tl

from minitx.kernels import triton_rows, triton_softmax
from minitx.kernels.triton_runtime import launching_on


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_right(x: torch.Tensor, is_causal: bool = False, atol: float = 1e-6) -> None:
    """y and dx of x in float32, against float64."""
    dy = normal(*x.shape, seed=1).clamp(-1, 1).to(x.device)
    results = []
    for leaf in (x.detach().requires_grad_(), x.detach().double().requires_grad_()):
        if leaf.dtype == torch.float64:
            y = softmax_reference(leaf, is_causal=is_causal)
        else:
            y = softmax(leaf, is_causal=is_causal, kernel="triton")
        results.append((y, *torch.autograd.grad(y, leaf, dy.to(leaf.dtype))))
    for ours, truth in zip(*results, strict=True):
        assert max_error(ours, truth) <= atol


def test_a_row_in_a_block_with_lanes_to_spare(device):
    x = torch.tensor([[-10.0, -20.0]], device=device)
    y = torch.full((1, 4), 7.0, device=device)
    with launching_on(x.device):
        triton_softmax._softmax_fwd_kernel[(1,)](
            *(x, y, (1,), (2,), (4,), 1, 1, 1, 2, 1),
            IS_CAUSAL=False,
            SHIFTED=False,
            INDEX=tl.int32,
            HALVED=False,
            BLOCK_M=1,
            BLOCK_N=4,
        )
    assert y[0, :2].tolist() == pytest.approx([0.9999546, 0.0000454], abs=1e-7)
    assert y[0, 2:].tolist() == [7.0, 7.0]  # lanes past the row are not written


@triton.jit
def _padded_softmax_kernel(x_ptr, y_ptr, N, PADDING: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.arange(0, BLOCK_N)
    x = triton_rows.load_visible(x_ptr + cols, cols, 0, N, N, PADDING, False, False)
    p = triton_rows.exp_below(x, tl.max(x, axis=0), True)
    tl.store(y_ptr + cols, p / tl.sum(p, axis=0), mask=cols < N)


def test_only_minus_infinity_pads_a_negative_row_harmlessly(device):
    x = torch.tensor([-200.0, -201.0, -202.0], device=device)
    y_right, y_ruined = torch.empty_like(x), torch.empty_like(x)
    with launching_on(x.device):
        _padded_softmax_kernel[(1,)](x, y_right, 3, PADDING=-float("inf"), BLOCK_N=4)
        _padded_softmax_kernel[(1,)](x, y_ruined, 3, PADDING=0.0, BLOCK_N=4)
    assert y_right.tolist() == pytest.approx([0.66524, 0.24473, 0.09003], abs=1e-5)
    assert y_ruined.tolist() == [0.0, 0.0, 0.0]  # the padding took all of the probability


# --- strides ----------------------------------------------------------------------------------


def test_leading_dims_merge_where_every_tensor_allows():
    def merged(*tensors):
        return triton_rows.merge_leading_dims(*tensors)

    x = torch.empty(2, 3, 4, 5)
    assert merged(x) == ((24,), [(5,)])
    assert merged(x[..., :3]) == ((24,), [(5,)])
    assert merged(x[:, :2]) == ((2, 8), [(60, 5)])
    assert merged(x.transpose(1, 2)) == ((2, 4, 3), [(60, 5, 20)])
    assert merged(x, x.transpose(0, 1).contiguous().transpose(0, 1)) == (
        (2, 3, 4),
        [(60, 20, 5), (20, 40, 5)],
    )
    assert merged(x[:1, :, :1, ::2]) == ((3,), [(20,)])
    assert merged(x[0, 0, 0, ::2]) == ((1,), [(3,)])
    assert merged(torch.empty(1, 5).expand(3, 5)) == ((3,), [(0,)])


def test_rows_of_many_dims_that_do_not_merge(device):
    x = normal(2, 3, 2, 3, 2, 3, 4).to(device)
    assert_right(x.permute(5, 3, 1, 4, 2, 0, 6)[..., ::2, ::2, :])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 100, 1024, 1025, 16384, 32768])
def test_tiles_depend_on_the_width_only_by_its_power_of_two(n, itemsize, is_causal):
    block_m, block_n, num_warps = tile = triton_softmax._choose_tile(n, itemsize, True, is_causal)
    assert tile == triton_softmax._choose_tile(block_n, itemsize, True, is_causal)
    assert n <= block_n < 2 * n
    assert num_warps in (2, 4, 8, 16)
    assert block_m == max(2048 // itemsize // block_n, 1)  # short rows share a program
    assert 8 * 32 * num_warps <= block_m * block_n <= 64 * 32 * num_warps
    # Where columns are not adjacent, as many rows as fit.
    strided = triton_softmax._choose_tile(n, itemsize, False, is_causal)
    assert strided[0] == max(16384 // block_n, 1)


def test_rows_that_one_program_takes():
    def fits(n, dtype, n_read, is_causal=False):
        return triton_softmax._fits(torch.empty(1, n, dtype=dtype), n_read, is_causal)

    assert fits(32768, torch.bfloat16, 2)
    assert not fits(32769, torch.bfloat16, 1)  # a tile of 64K lanes
    assert fits(32768, torch.float32, 1)
    assert not fits(16385, torch.float32, 2)
    assert fits(16384, torch.bfloat16, 1, is_causal=True)
    assert not fits(16385, torch.bfloat16, 1, is_causal=True)


@pytest.mark.parametrize("n", [17, 20, 32])
def test_masked_columns_are_written(monkeypatch, nothing_remembered, device, n):
    # A program a row; of those that see half of the tile at most, the other half too.
    monkeypatch.setattr(triton_softmax, "TILE", {4: 1})
    x, dy = normal(n, n).to(device), normal(n, n, seed=1).to(device)
    y, dx = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    triton_softmax._launch_fwd(x, y, True)
    assert max_error(y, softmax_reference(x.double(), is_causal=True)) < 1e-6
    triton_softmax._launch_bwd(y, dy, dx, True)
    truth = y.double() * (dy - (y.double() * dy).sum(-1, keepdim=True))
    assert max_error(dx, truth) < 1e-6
    assert (dx.triu(1) == 0).all()


# --- custom ops -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_opcheck(device, is_causal, layout):
    x, dy = normal(2, 3, 4).to(device), normal(2, 3, 4, seed=1).to(device)
    if layout == "transposed":
        x = x.transpose(0, 1)
        dy = dy.transpose(0, 1)
    elif layout == "expanded":
        x, dy = (t[:, :1].expand(2, 3, 4) for t in (x, dy))
    ops = torch.ops.minitx
    torch.library.opcheck(ops.triton_softmax_fwd.default, (x.requires_grad_(), is_causal))
    y = ops.triton_softmax_fwd(x.detach(), is_causal)
    torch.library.opcheck(ops.triton_softmax_bwd.default, (y, dy, is_causal))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_compile_without_graph_breaks_or_a_recompile_a_length(device):
    compiles = 0

    def backend(graph, _):
        nonlocal compiles
        compiles += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: softmax(x * 2, is_causal=True, kernel="triton"), backend=backend, fullgraph=True
    )
    for n in (64, 70, 71, 90):
        x = normal(2, n, n).to(device)
        truth = softmax_reference(x.double() * 2, is_causal=True)
        assert max_error(compiled(x), truth) < 1e-6
    assert compiles <= 2  # the first length, then any length
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compile_backward(device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: softmax(x, kernel="triton"), fullgraph=True, backend="aot_eager"
    )
    x, dy = normal(4, 60).to(device).requires_grad_(), normal(4, 60, seed=1).to(device)
    (ours,) = torch.autograd.grad(compiled(x), x, dy)
    (plain,) = torch.autograd.grad(softmax(x, kernel="triton"), x, dy)
    assert torch.equal(ours, plain)
    torch._dynamo.reset()


def test_vmap(device):
    x = normal(3, 4, 5).to(device)
    y = torch.vmap(lambda x: softmax(x, kernel="triton"), in_dims=1, out_dims=1)(x)
    assert max_error(y, softmax_reference(x)) < 1e-6
    leaf = x[0].clone().requires_grad_()
    y = softmax(leaf, kernel="triton")
    basis = torch.eye(20, device=device).view(20, 4, 5)
    (jacobian,) = torch.autograd.grad(y, leaf, basis, is_grads_batched=True)
    truth = torch.autograd.functional.jacobian(softmax_reference, x[0].double())
    assert max_error(jacobian.view(4, 5, 4, 5), truth) < 1e-6


def test_torch_func(device):
    def ours(x):
        return softmax(x, kernel="triton").square().sum()

    def truth(x):
        return torch.softmax(x, -1).square().sum()

    x = normal(3, 4, 5).to(device)
    for transform in (
        torch.func.grad,
        lambda f: torch.vmap(torch.func.grad(f)),
        lambda f: torch.vmap(torch.func.grad(f), in_dims=1),
        lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum()),
        torch.func.jacrev,
    ):
        assert max_error(transform(ours)(x), transform(truth)(x.double())) < 1e-6
    with pytest.raises(RuntimeError, match="kernel 'triton' has no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(ours)(x).sum())(x)


def test_float64_is_refused(device):
    with pytest.raises(KernelUnavailableError, match="not float64"):
        softmax(torch.zeros(2, 3, device=device, dtype=torch.float64), kernel="triton")


# --- what the compiler makes of it ------------------------------------------------------------

COMPILE = """
import re, sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from minitx.kernels import triton_softmax

kernel = triton_softmax._softmax_{which}_kernel
tensors = {tensors!r}
signature = {{f"{{t}}_ptr": "*bf16" for t in tensors}} | {{"sizes": ("i32",)}}
signature |= {{f"{{t}}_strides": ("i32",) for t in tensors}}
signature |= {{f"{{t}}_step": "constexpr" for t in tensors}}
signature |= dict(n_rows="i32", n_cols="i32", Sq="i32")
constexprs = ["IS_CAUSAL", "SHIFTED", "INDEX", "HALVED", "BLOCK_M", "BLOCK_N"]
signature |= dict.fromkeys(constexprs, "constexpr")
assert list(signature) == kernel.arg_names, kernel.arg_names
names = list(signature)
for is_causal, is_shifted in ((False, False), (True, False), (False, True), (True, True)):
    aligned = []
    if not is_shifted:
        aligned += [(names.index(n),) for n in [f"{{t}}_ptr" for t in tensors] + ["n_cols"]]
        aligned += [(names.index(f"{{t}}_strides"), 0) for t in tensors]
    constants = {{f"{{t}}_step": 1 for t in tensors}}
    constants |= dict(IS_CAUSAL=is_causal, SHIFTED=is_shifted, INDEX=tl.int32, HALVED=False)
    constants |= dict(BLOCK_M=1, BLOCK_N=4096)
    source = ASTSource(
        kernel, signature, constants, {{path: [["tt.divisibility", 16]] for path in aligned}}
    )
    options = dict(num_warps=4)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    print(len(re.findall(r"ld.global.v4", ptx)), len(re.findall(r"st.global.v4", ptx)))
"""


@pytest.mark.parametrize(("which", "tensors"), [("fwd", ["x", "y"]), ("bwd", ["y", "dy", "dx"])])
def test_rows_are_loaded_and_stored_16_bytes_at_a_time(tmp_path, which, tensors):
    # In a process of its own: this one may have Triton's interpreter in place of its compiler.
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = COMPILE.format(which=which, tensors=tensors)
    # A file, since Triton reads the source of what it compiles; the kernels have theirs.
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # 4096 bfloat16 over 128 threads: 4 vectors of 8 a thread for each tensor.
    loads = 4 * (len(tensors) - 1)
    assert done.stdout.split() == [str(loads), "4"] * 4
