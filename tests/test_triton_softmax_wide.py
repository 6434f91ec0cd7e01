"""Rows that the Triton softmax splits over programs, in one launch (on a GPU) and in two.

What they share with other rows is in test_softmax_contract.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from softmax_oracle import check, forward_backward, normal, oracle

from minitx.kernels import softmax_reference, supports_softmax
from minitx.testing import max_error

if not supports_softmax("triton", torch.zeros(1)).ok and not torch.cuda.is_available():
    pytest.skip(supports_softmax("triton", torch.zeros(1)).reason, allow_module_level=True)

from minitx.kernels import triton_cross_entropy, triton_groups, triton_softmax
from minitx.kernels import triton_softmax_wide as wide
from minitx.kernels.triton_runtime import launching_on

SMALL = wide.Chunks(BLOCK_N=16, num_warps=1, programs_per_sm=16)


@pytest.fixture
def split_small(monkeypatch):
    """Splits every row, into chunks of 16."""
    monkeypatch.setattr(triton_softmax, "_fits", lambda *_: False)
    monkeypatch.setattr(wide, "FWD", dict.fromkeys(wide.FWD, SMALL))
    monkeypatch.setattr(wide, "BWD", dict.fromkeys(wide.BWD, SMALL))


@pytest.fixture(params=["one launch", "few groups", "two launches"])
def split_anyhow(request, monkeypatch, split_small, device):
    """In each of the ways there are; the interpreter has the last alone."""
    if request.param == "two launches":
        monkeypatch.setattr(triton_groups, "programs_at_once", lambda *_: 0)
    elif device == "cpu":
        pytest.skip("programs that wait for one another need a GPU")
    elif request.param == "few groups":  # of up to 9 chunks, so that a group has many rows
        monkeypatch.setattr(triton_groups, "programs_at_once", lambda *_: 9)


@pytest.mark.parametrize("shape", [(1, 1), (1, 100), (7, 33), (2, 3, 4, 16)])
def test_split_rows(split_anyhow, device, shape):
    check("triton", normal(*shape, std=9).to(device))


@pytest.mark.parametrize("shape", [(20, 20), (5, 40), (20, 5), (2, 2, 6, 20)])
def test_split_causal_rows(split_anyhow, device, shape):
    check("triton", normal(*shape).to(device), is_causal=True)


def test_split_strided_rows(split_anyhow, device):
    check("triton", normal(40, 3, 5).to(device).permute(2, 1, 0))
    check("triton", normal(3, 4, 50).to(device)[::2, :, ::3])


def test_more_chunks_than_are_merged_together(split_anyhow, device, monkeypatch):
    monkeypatch.setattr(triton_groups, "MERGED_AT_ONCE", 32)
    x = normal(2, 16 * 70).to(device)  # 70 chunks, 32 partial results at a time
    x[1, -1] = 30.0  # the larger part is in what is merged last
    check("triton", x)


def test_chunks_past_the_visible_columns_wait_for_nobody(split_small, device):
    # What they write are zeros: not what a NaN elsewhere in the row makes of the rest.
    x = torch.zeros(40, 40, device=device)
    x[3, 0] = float("nan")
    y, dx = forward_backward("triton", x, torch.ones_like(x), is_causal=True)
    for result in (y, dx):
        assert result[3, :4].isnan().all()
        assert (result[3, 16:] == 0).all()
        assert result[4:].isfinite().all()


def test_a_program_holds_every_chunk_in_turn(device):
    # Two groups of three programs take five rows: each chunk is written, none is left out.
    x = normal(5, 40).to(device)
    y = torch.full_like(x, 7.0)
    words = torch.zeros(5 * 3, dtype=torch.int64, device=device)
    arguments = (x, y, words, (5,), (40,), (40,), 1, 1, 5, 40, 1, 3)
    constants = {"IS_CAUSAL": False, "SHIFTED": False, "BLOCK_N": 16, "MERGE": 32, "num_warps": 1}
    with launching_on(x.device):
        for publish in (True, False):
            wide._wide_fwd_kernel[(2 * 3,)](
                *arguments, PUBLISH=publish, WRITE=not publish, **constants
            )
            assert bool((y == 7.0).all()) == publish
    assert (words != 0).all()
    assert max_error(y, softmax_reference(x.double())) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_routes_agree_where_they_meet(device, dtype):
    n = triton_softmax.MAX_BYTES // 2 // dtype.itemsize  # of the backward, which reads two rows
    assert triton_softmax._fits(torch.empty(1, n, dtype=dtype), 2, False)
    check("triton", normal(1, n).to(device, dtype))
    check("triton", normal(1, n + 1).to(device, dtype))


def test_partial_results_are_never_the_word_that_means_not_there(split_small, device):
    # Whoever waits for it would wait for ever.
    for value in (0.0, -0.0, -float("inf"), float("nan"), torch.finfo(torch.float32).max):
        x = torch.full((2, 40), value, device=device)
        forward_backward("triton", x, torch.zeros_like(x))


def test_an_sm_has_room_for_the_programs_it_is_to_hold():
    # A cooperative launch of more than that is refused.
    for chunks in (*wide.FWD.values(), *wide.BWD.values()):
        threads = chunks.programs_per_sm * chunks.num_warps * 32
        assert threads <= 1536
        assert chunks.max_registers % 8 == 0  # else the hardware rounds up
        assert threads * chunks.max_registers <= 65536
        assert 40 <= chunks.max_registers <= 255


def test_what_the_compiler_makes_of_it(tmp_path):
    # The interpreter takes code that the compiler refuses. In a process of its own, since this one
    # may have the interpreter in the compiler's place.
    script = Path(__file__).with_name("compile_triton_softmax.py")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), "bfloat16", "131072", "100003"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [line.split()[:5] for line in done.stdout.splitlines()]
    # 16 bytes at a time, of rows that start anywhere too: were a mask to end inside a vector, none.
    for _, kernel, is_causal, loads, stores in found:
        n_read, table = (1, wide.FWD) if "fwd" in kernel else (2, wide.BWD)
        chunks = table[2, is_causal == "True"]
        vectors = chunks.BLOCK_N // (chunks.num_warps * 32) // 8
        assert int(loads) >= n_read * vectors
        assert int(stores) >= vectors
    assert len(found) == 2 * 2 * 2


@pytest.mark.parametrize(
    ("capability", "threads", "most"), [((8, 6), 1536, 16), ((8, 9), 1536, 24), ((9, 0), 2048, 32)]
)
def test_no_more_programs_than_an_sm_holds(monkeypatch, capability, threads, most):
    """Small programs run into a limit of their own: a larger cooperative grid would be refused. An
    RTX 3090 takes 16 an SM, where cross-entropy's have room for 28 on an H200."""
    sms = 82
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=sms,
        max_threads_per_multi_processor=threads,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(triton_groups, "IS_INTERPRETED", False)
    count = triton_groups.programs_at_once.__wrapped__
    for chunks in (*wide.FWD.values(), *wide.BWD.values(), *triton_cross_entropy.PIECES.values()):
        room = threads // (32 * chunks.num_warps)
        want = sms * min(chunks.programs_per_sm, room, most)
        assert count(torch.device("cuda", 0), chunks) == want


# --- on a GPU, where programs wait for one another --------------------------------------------


@pytest.fixture
def one_launch(monkeypatch):
    """Fails where a call takes two launches."""
    programs_at_once = triton_groups.programs_at_once

    def enough(*arguments):
        assert programs_at_once(*arguments) >= 256
        return programs_at_once(*arguments)

    monkeypatch.setattr(triton_groups, "programs_at_once", enough)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (3, 33_000),  # fewer rows than groups
        (2000, 40_001),  # many more; rows that are not aligned, a ragged last chunk
        (200, 131_072),
        (2, 1_000_003),  # more chunks than are merged together
    ],
)
def test_wide_rows(one_launch, shape, dtype):
    check("triton", torch.randn(shape, device="cuda").to(dtype) * 3)


@pytest.mark.gpu
def test_rows_of_more_chunks_than_the_gpu_holds():
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    x = torch.randn(
        2,
        n_sms * wide.FWD[4, False].programs_per_sm * wide.FWD[4, False].BLOCK_N + 1,
        device="cuda",
    )
    y, dx = forward_backward("triton", x * 3, torch.ones_like(x))
    y_true, _ = oracle(x[1] * 3, torch.ones_like(x[1]))
    assert max_error(y[1] / y_true.max(), y_true / y_true.max()) < 1e-5
    assert dx.abs().max() < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "dtype"), [(20_000, torch.float32), (33_001, torch.bfloat16)], ids=str
)
def test_wide_causal_rows(one_launch, n, dtype):
    x, dy = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    dy.clamp_(-1, 1)
    y, dx = forward_backward("triton", x, dy, is_causal=True)
    for row in (0, 1, 4095, 4096, 8191, 8192, n // 2, n - 2, n - 1):
        seen = row + 1
        y_true, dx_true = oracle(x[row, :seen], dy[row, :seen])
        assert max_error(y[row, :seen], y_true) < 2 * torch.finfo(dtype).eps
        assert max_error(dx[row, :seen], dx_true) < 4 * torch.finfo(dtype).eps
        assert (y[row, seen:] == 0).all()
        assert (dx[row, seen:] == 0).all()


@pytest.mark.gpu
def test_two_streams_at_once(one_launch):
    # Were each of two grids half resident, both would wait for ever. And results do not vary.
    inputs = [torch.randn(500, n, device="cuda", dtype=torch.bfloat16) for n in (70_000, 131_072)]
    other = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    expected = [forward_backward("triton", x, x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        with torch.cuda.stream(streams[2]):
            other @ other
        for x, stream in zip(inputs, streams[:2], strict=True):
            with torch.cuda.stream(stream):
                results.append(forward_backward("triton", x, x))
        if len(results) == 8:  # ten gigabytes of results, otherwise
            torch.cuda.synchronize()
            for i, result in enumerate(results):
                for ours, theirs in zip(result, expected[i % 2], strict=True):
                    assert torch.equal(ours, theirs)
            results.clear()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_cuda_graph(one_launch):
    x, dy = (torch.randn(70, 70_000, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ops = torch.ops.minitx

    def run():
        y = ops.triton_softmax_fwd(x, False)
        return y, ops.triton_softmax_bwd(y, dy, False)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        x.normal_()
        dy.normal_()
        graph.replay()
        for ours, plain in zip(captured, run(), strict=True):
            assert torch.equal(ours, plain)
