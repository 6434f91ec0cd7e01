"""The TileLang row softmax's own parts: the online log-sum-exp, strides, compiles, failures, op.

What it shares with the other kernels is in test_softmax_contract.py. TileLang keeps what it
compiled in a folder: a test that is about compiling starts without one.
"""

import math
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from minitx.kernels import KernelUnavailableError, softmax, softmax_reference, supports_softmax
from minitx.testing import error_budget, max_error

if not supports_softmax("tilelang", torch.zeros(1)).ok and not torch.cuda.is_available():
    pytest.skip(supports_softmax("tilelang", torch.zeros(1)).reason, allow_module_level=True)

import tilelang

from minitx.kernels import tilelang_rows, tilelang_runtime, tilelang_softmax

INF, NAN = math.inf, math.nan
TILE_COLUMNS = tilelang_rows.CPU_TILE.BLOCK_M  # 256


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def check(x: torch.Tensor, is_causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Holds y and dx to the error budget, and returns them."""
    dy = normal(*x.shape, seed=1).clamp(-1, 1).to(x.device, x.dtype)
    y, dx = forward_backward("tilelang", x, dy, is_causal)
    baselines = forward_backward("eager", x, dy, is_causal)
    truths = forward_backward("reference", x.double(), dy.double(), is_causal)
    for ours, baseline, truth in zip((y, dx), baselines, truths, strict=True):
        assert ours.dtype == x.dtype
        assert max_error(ours, truth) <= error_budget(baseline, truth, x.dtype)
    return y, dx


def forward_backward(kernel, x, dy, is_causal=False):
    leaf = x.detach().requires_grad_()
    y = softmax(leaf, is_causal=is_causal, kernel=kernel)
    return y.detach(), *torch.autograd.grad(y, leaf, dy)


# --- the scan ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (3, 7),  # neither a whole block of rows nor a whole tile
        (16, 256),  # one whole tile
        (17, 513),  # a row and a column more than whole blocks and tiles
        (64, 4096),
    ],
)
def test_first_shapes(device, shape):
    check(normal(*shape, std=20).to(device))


def test_scores_a_thousand_apart(device):
    y, _ = check(torch.tensor([[-1000.0, 0.0, 1000.0, 1.0]], device=device))
    assert y.tolist() == [[0.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize("step", [-700.0, -130.0, 130.0, 700.0])
@pytest.mark.parametrize("n", [2 * TILE_COLUMNS, 5 * TILE_COLUMNS + 3, 40_000])
def test_tiles_that_differ_by_hundreds(device, n, step):
    # From the first tile to the last: falling, what was seen before dwarfs the tile; rising, the
    # tile dwarfs it.
    ramp = torch.linspace(0, step, n)
    cliff = torch.where(torch.arange(n) < n // 2, 0.0, step)
    check((torch.stack([ramp, cliff]) + normal(2, n)).to(device))


def textbook_softmax(x: np.ndarray, tile: int) -> np.ndarray:
    """The scan with lse' = m + log2(2^(lse - m) + s), m and s being the tile's, in float32."""
    z = x * np.float32(math.log2(math.e))
    lse = np.full((len(x), 1), -np.inf, np.float32)
    with np.errstate(over="ignore"):
        for first in range(0, x.shape[1], tile):
            columns = z[:, first : first + tile]
            m = columns.max(1, keepdims=True)
            s = np.exp2(columns - m).sum(1, keepdims=True)
            lse = m + np.log2(np.exp2(lse - m) + s)
        return np.exp2(z - lse)


def test_the_textbook_update_loses_rows_that_this_one_keeps(device):
    x = normal(17, 513, std=20)  # the last tile is one column, often far below the others
    rows = textbook_softmax(x.numpy(), tile=256).sum(1)
    assert (rows == 0).any(), "the input does not show the fault"
    np.testing.assert_allclose(rows[rows > 0], 1, rtol=1e-4)  # where it works, it is right
    y, _ = check(x.to(device))
    assert (y.sum(1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("scores", [0.0, 300.0, -300.0])
def test_thousands_of_tiles_do_not_drift(device, scores):
    x = torch.full((1, 600_001), scores, device=device)
    x[0, 0] += 12.0  # a quarter of the sum, which every later tile is merged into
    y = softmax(x, kernel="tilelang")
    truth = softmax_reference(x)
    assert ((y - truth) / truth).abs().max() < 1e-6


def test_nothing_to_see_in_the_first_tiles_or_in_the_last(device):
    n = 3 * TILE_COLUMNS + 5
    for column in (0, 3, TILE_COLUMNS - 1, TILE_COLUMNS, n - 1):
        x = torch.full((2, n), -INF, device=device)
        x[1, column] = torch.finfo(torch.float32).min
        y, dx = check(x)
        assert y[0].count_nonzero() == 0
        assert y[1].nonzero().tolist() == [[column]]
        assert dx.count_nonzero() == 0


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_nan_shows_wherever_it_stands(device, value):
    n = 3 * TILE_COLUMNS + 5
    for column in (0, TILE_COLUMNS, n - 1):
        for rest in (0.0, -INF, 500.0):  # the other lanes, which the NaN is merged with
            x = torch.full((2, n), rest, device=device)
            x[1, column] = value
            y = softmax(x, kernel="tilelang")
            assert not y[0].isnan().any()
            assert y[1].isnan().all()


@pytest.mark.parametrize("shape", [(300, 300), (2, 5, 600), (2, 600, 5), (3, 4, 261, 263)])
def test_causal_rows_end_in_every_tile(device, shape):
    x = normal(*shape).to(device)
    hidden = ~torch.ones(shape[-2:], dtype=torch.bool).tril(shape[-1] - shape[-2]).to(device)
    y, dx = check(x, is_causal=True)
    spoilt = x.masked_fill(hidden, NAN)
    dy = normal(*shape, seed=1).clamp(-1, 1).to(device)
    ours = forward_backward("tilelang", spoilt, dy.masked_fill(hidden, NAN), is_causal=True)
    assert torch.equal(y, ours[0])
    assert torch.equal(dx, ours[1])


@pytest.mark.parametrize("shape", [(300, 300), (2, 5, 600), (2, 600, 8), (3, 1024)])
def test_causal_rows_may_end_inside_a_vector(monkeypatch, device, shape):
    # A CPU never takes vectors by itself; the kernel that does is the same.
    monkeypatch.setattr(tilelang_softmax, "vector_width", lambda views: 4)
    x = normal(*shape).to(device)
    check(x)
    hidden = ~torch.ones(shape[-2:], dtype=torch.bool).tril(shape[-1] - shape[-2]).to(device)
    y, dx = check(x, is_causal=True)
    dy = normal(*shape, seed=1).clamp(-1, 1).to(device).masked_fill(hidden, NAN)
    ours = forward_backward("tilelang", x.masked_fill(hidden, NAN), dy, is_causal=True)
    assert torch.equal(y, ours[0])
    assert torch.equal(dx, ours[1])


# --- strides ---------------------------------------------------------------------------------


VIEWS = {
    "transposed": lambda: normal(70, 9).t(),
    "step": lambda: normal(9, 140)[:, ::2],
    "expanded row": lambda: normal(1, 70).expand(9, 70),
    "expanded column": lambda: normal(9, 1).expand(9, 70),
    "heads": lambda: normal(2, 5, 3, 70).transpose(1, 2),
    "offset": lambda: normal(631)[1:].view(9, 70),
    "pitch": lambda: normal(9, 80)[:, 5:75],
    "six dims": lambda: normal(2, 3, 2, 3, 2, 40).permute(3, 1, 4, 0, 2, 5),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(device, name, dtype):
    x = VIEWS[name]().to(device, dtype)
    before = x.clone()
    check(x)
    check(x, is_causal=True)
    assert torch.equal(x, before)


# --- compiling --------------------------------------------------------------------------------


@pytest.fixture
def compiles(monkeypatch) -> list[str]:
    """Names of the kernels compiled since the test began, each of them anew."""
    names: list[str] = []
    compile_ = tilelang.compile

    def counted(func, **options):
        names.append(func.attrs["global_symbol"])
        return compile_(func, **options)

    monkeypatch.setattr(tilelang, "compile", counted)
    monkeypatch.setattr(tilelang_runtime, "_kernels", {})
    monkeypatch.setattr(tilelang_runtime, "_locks", {})
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    return names


def test_one_compile_serves_every_shape_stride_and_causal_rule(compiles):
    for x in (normal(1, 1), normal(40, 3), normal(2, 3, 700), normal(600, 5).t()):
        check(x)
        check(x, is_causal=True)
        check(x.half())  # computed in float32
    assert sorted(compiles) == ["softmax_bwd", "softmax_fwd"]


def test_threads_that_meet_at_a_cold_start_wait_for_one_compile(compiles):
    together = threading.Barrier(8)

    def run(seed: int) -> None:
        together.wait()
        x = normal(5, 300, seed=seed)
        assert max_error(softmax(x, kernel="tilelang"), softmax_reference(x)) < 1e-6

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(run, seed) for seed in range(8)]:
            done.result()
    assert compiles == ["softmax_fwd"]


SOFTMAX_IN_A_NEW_PROCESS = """
import sys
import torch
from minitx.kernels import KernelUnavailableError, softmax
assert "tilelang" not in sys.modules and "triton" not in sys.modules
x = torch.arange(12.0).view(3, 4)
assert torch.allclose(softmax(x, kernel="eager"), torch.softmax(x, -1))
try:
    assert torch.allclose(softmax(x, kernel="tilelang"), torch.softmax(x, -1))
except KernelUnavailableError as error:
    print(error)
"""


def start(**environment: str | None) -> subprocess.Popen:
    env = {**os.environ, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", SOFTMAX_IN_A_NEW_PROCESS],
        env={name: value for name, value in env.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_share_a_cold_cache_folder(tmp_path):
    running = [start(TILELANG_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in running:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (0, ""), err
    assert list(tmp_path.rglob("kernel_lib.so"))


@pytest.mark.parametrize(
    "environment",
    [
        {"TILELANG_CACHE_DIR": "/dev/null/cache"},
        {"TILELANG_CACHE_DIR": None, "HOME": "/dev/null"},
        {"PATH": "/nowhere", "CXX": None, "CC": None},
    ],
    ids=["cache", "home", "compiler"],
)
def test_what_is_missing_is_said_in_one_line_and_eager_works(environment):
    process = start(**environment)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err == ""
    assert out.count("\n") == 1
    assert out.startswith("kernel 'tilelang' cannot run this softmax: ")
    assert "Kernels that can: " in out


def test_a_failing_compiler_is_named_in_one_line(compiles, monkeypatch):
    def fail(func, **options):
        raise RuntimeError("g++: no space left\non this device")

    monkeypatch.setattr(tilelang, "compile", fail)
    with pytest.raises(KernelUnavailableError) as caught:
        tilelang_softmax.tilelang_softmax(torch.zeros(2, 2), is_causal=False)
    assert str(caught.value) == (
        "TileLang kernel 'build_softmax_fwd' does not compile for c here: g++: no space left"
    )


# --- the op -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "step"])
def test_opcheck(device, dtype, layout):
    x, dy = (normal(2, 3, 4, seed=seed).to(device, dtype) for seed in range(2))
    if layout == "transposed":
        x, dy = x.transpose(0, 1), dy.transpose(0, 1)
    elif layout == "expanded":
        x, dy = (t[:, :1].expand(2, 3, 4) for t in (x, dy))
    elif layout == "step":
        x, dy = (t.transpose(1, 2)[..., ::2] for t in (x, dy))
    ops = torch.ops.minitx
    torch.library.opcheck(ops.tilelang_softmax_fwd.default, (x.requires_grad_(), True))
    y = ops.tilelang_softmax_fwd(x.detach(), True)
    torch.library.opcheck(ops.tilelang_softmax_bwd.default, (y, dy, True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_torch_compile_without_graph_breaks_or_a_recompile_a_length(device):
    graphs = 0

    def backend(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: softmax(x * 2, is_causal=True, kernel="tilelang"), backend=backend, fullgraph=True
    )
    for n in (64, 70, 71, 90):
        x = normal(2, n, n).to(device)
        assert max_error(compiled(x), softmax_reference(x.double() * 2, is_causal=True)) < 1e-6
    assert graphs <= 2  # the first length, then any length
    torch._dynamo.reset()


def test_torch_func_and_second_derivatives(device):
    def ours(x):
        return softmax(x, kernel="tilelang").square().sum()

    def truth(x):
        return torch.softmax(x, -1).square().sum()

    x = normal(3, 4, 5).to(device)
    for transform in (
        torch.func.grad,
        lambda f: torch.vmap(torch.func.grad(f), in_dims=1),
        lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sum()),
    ):
        assert max_error(transform(ours)(x), transform(truth)(x.double())) < 1e-6
    x.requires_grad_()
    (dx,) = torch.autograd.grad(ours(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="kernel 'tilelang' has no second derivative"):
        dx.sum().backward()


# --- on a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [128, 1024, 8192, 32_768, 131_072])  # a tile of TILES each
def test_every_tile_on_whole_vectors(dtype, n):
    rows = 37 if n < 10_000 else 5
    check(normal(rows, n, std=4).to("cuda", dtype))
    check(normal(2, rows, n, std=4).to("cuda", dtype), is_causal=True)
    check(normal(rows, n + 64).to("cuda", dtype)[:, 32:-32])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [127, 1023, 8191, 32_767, 131_071])
def test_every_tile_on_rows_that_are_not_aligned(n):
    rows = 37 if n < 10_000 else 5
    check(normal(rows, n, std=4).to("cuda", torch.bfloat16))
    check(normal(2, rows, n, std=4).to("cuda", torch.bfloat16), is_causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loads_and_stores_are_sixteen_bytes_wide(what, dtype):
    build = getattr(tilelang_softmax, f"build_softmax_{what}")
    vector = 8 if dtype == "bfloat16" else 4
    kernel = tilelang_runtime.compile_kernel(
        build,
        tilelang_runtime.Target("cuda", "sm_90a"),
        dtype=dtype,
        tile=tilelang_rows.Tile(4, 32, 16),
        vector=vector,
    )
    word = "uint4" if dtype == "bfloat16" else "float4"
    names = ("x", "y") if what == "fwd" else ("y", "dy", "dx")
    for name in names:
        assert f"*({word}*)({name} + " in kernel.source
        assert f" {name}[" not in kernel.source
