"""linear_cross_entropy against softmax written out in float64."""

import math

import pytest
import torch
from cross_entropy_oracle import (
    DTYPES,
    KERNELS,
    REDUCTIONS,
    assert_within_budget,
    make,
    oracle,
    run,
)

from minitx.kernels import linear_cross_entropy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_loss_and_gradients_stay_within_the_budget(kernel, reduction, dtype, device):
    hidden, weight, targets = make(dtype=dtype, device=device)
    dnll = torch.linspace(-1, 2, len(targets)).to(device)
    dnll = dnll if reduction == "none" else torch.tensor(0.5, device=device)
    truth = oracle(hidden, weight, targets, reduction, dnll)
    eager = run("eager", hidden, weight, targets, reduction, dnll)
    got = run(kernel, hidden, weight, targets, reduction, dnll, chunk_tokens=8)
    assert got[0].dtype == torch.float32
    assert (got[1].dtype, got[2].dtype) == (dtype, dtype)
    assert_within_budget(got, eager, truth, dtype)


def test_both_row_passes_round_to_the_nearest_bfloat16(device):
    hidden, weight, targets = make(dtype=torch.bfloat16, device=device)
    results = [run(kernel, hidden, weight, targets)[1].float() for kernel in KERNELS]
    assert (results[0] - results[1]).norm() < 1e-3 * results[0].norm()


@pytest.mark.parametrize(
    ("N", "V", "chunk_tokens"),
    [
        pytest.param(1, 1, 1, id="one token, one word: loss 0"),
        pytest.param(5, 3, 1, id="a chunk a token"),
        pytest.param(16, 7, 8, id="whole chunks: no empty one behind them"),
        pytest.param(17, 7, 8, id="a last chunk of one token"),
        pytest.param(9, 8200, 1000, id="a chunk beyond N, a row in two pieces"),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_any_shape_and_chunk(kernel, N, V, chunk_tokens, device):
    hidden, weight, targets = make(N, 4, V, device=device, ignored=())
    truth = oracle(hidden, weight, targets, "sum", torch.ones((), device=device))
    eager = run("eager", hidden, weight, targets)
    got = run(kernel, hidden, weight, targets, chunk_tokens=chunk_tokens)
    assert_within_budget(got, eager, truth, torch.float32)


@pytest.mark.parametrize("at_once", [None, 70, 0], ids=["one launch", "few groups", "two launches"])
def test_rows_in_more_pieces_than_are_merged_together(monkeypatch, device, at_once):
    from minitx.kernels import triton_cross_entropy, triton_groups

    if at_once != 0 and device == "cpu":
        pytest.skip("programs that wait for one another need a GPU")
    # 34 pieces a row, of 16 words, and 32 merged at a time; 70 programs are two groups.
    pieces = triton_groups.Chunks(BLOCK_N=16, num_warps=1, programs_per_sm=16)
    monkeypatch.setattr(triton_cross_entropy, "PIECES", dict.fromkeys((2, 4), pieces))
    monkeypatch.setattr(triton_groups, "MERGED_AT_ONCE", 32)
    if at_once is not None:
        monkeypatch.setattr(triton_groups, "programs_at_once", lambda *_: at_once)
    hidden, weight, targets = make(5, 4, 16 * 33 + 5, device=device, ignored=(3,))
    weight[-1] = 4 * hidden[0]  # the larger part of a row is in what is merged last
    targets[1] = len(weight) - 1
    truth = oracle(hidden, weight, targets, "sum", torch.ones((), device=device))
    eager = run("eager", hidden, weight, targets)
    assert_within_budget(run("triton", hidden, weight, targets), eager, truth, torch.float32)


def test_the_reference_is_the_oracle():
    hidden, weight, targets = make(dtype=torch.float64)
    truth = oracle(hidden, weight, targets, "mean", torch.ones(()))
    got = run("reference", hidden, weight, targets, "mean")
    for a, b in zip(got, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float64_stays_float64(reduction):
    hidden, weight, targets = make(5, 3, 7, dtype=torch.float64, ignored=(2,))

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk_tokens=2)

    inputs = hidden.requires_grad_(), weight.requires_grad_()
    assert loss(*inputs).dtype == torch.float64
    torch.autograd.gradcheck(loss, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 alone everywhere
        assert loss(*inputs).dtype == torch.float64


@pytest.mark.parametrize("kernel", KERNELS)
def test_tiny_probabilities_have_a_finite_loss(kernel, device):
    z = torch.tensor([[0.0, -88.0, -95.0, -100.0, -104.0]], device=device)
    one = torch.ones(1, 1, device=device)
    target = torch.tensor([4], device=device)
    loss, dhidden, dweight = run(kernel, one, z.T.contiguous(), target)
    assert loss.item() == pytest.approx(104.0, abs=1e-5)
    assert dhidden.item() == pytest.approx(104.0, abs=1e-5)  # -z_target + sum p z
    torch.testing.assert_close(dweight[:, 0], torch.tensor([1.0, 0, 0, 0, -1.0], device=device))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [0.0, 1e4, -1e4, 3e38])
def test_equal_logits_of_any_size_give_log_v(kernel, size, device):
    hidden = torch.full((2, 1), size, device=device)
    weight = torch.ones(11, 1, device=device)
    loss = run(kernel, hidden, weight, torch.tensor([0, 10], device=device), "none")[0]
    torch.testing.assert_close(loss.cpu(), torch.full((2,), math.log(11)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_words_that_are_impossible(kernel, device):
    """A logit of -inf has probability and gradient 0; a first step of -inf alone is no NaN."""
    weight = torch.full((5000, 1), -math.inf, device=device)
    weight[[4500, 4999], 0] = 1.0
    hidden = torch.ones(1, 1, device=device)
    loss, _, dweight = run(kernel, hidden, weight, torch.tensor([4999], device=device))
    assert loss.item() == pytest.approx(math.log(2))
    assert (dweight[4500].item(), dweight[4999].item(), dweight[0].item()) == (0.5, -0.5, 0.0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_reaches_the_loss(kernel, device):
    hidden, weight, targets = make(device=device)
    hidden[5] = math.nan
    loss = run(kernel, hidden, weight, targets, "none", torch.ones(37, device=device))[0]
    assert loss.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("kernel", ["eager", *KERNELS])
def test_nothing_but_ignored_targets(kernel, device):
    hidden, weight, targets = make(device=device)
    targets[:] = -100
    loss, dhidden, dweight = run(kernel, hidden, weight, targets, chunk_tokens=10)
    assert loss.item() == 0.0
    assert not dhidden.any()
    assert not dweight.any()
    mean = linear_cross_entropy(hidden, weight, targets, kernel=kernel)
    assert mean.isnan()


@pytest.mark.parametrize("kernel", KERNELS)
def test_another_ignore_index_and_int32_targets(kernel, device):
    hidden, weight, targets = make(device=device)
    truth = oracle(hidden, weight, targets, "sum", torch.ones((), device=device))
    moved = targets.masked_fill(targets == -100, 7).int()
    kept = targets != 7  # a 7 that was a target is ignored now
    truth = oracle(
        hidden, weight, targets.masked_fill(~kept, -100), "sum", torch.ones((), device=device)
    )
    got = run(kernel, hidden, weight, moved, ignore_index=7)
    for a, b in zip(got, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_tokens(kernel, device):
    hidden, weight, targets = make(0, ignored=(), device=device)
    loss, dhidden, dweight = run(kernel, hidden, weight, targets)
    assert (loss.item(), dhidden.shape, dweight.any().item()) == (0.0, (0, 16), False)


@pytest.mark.parametrize("bad", [-1, 53, -101])
@pytest.mark.parametrize("kernel", ["reference", "eager", *KERNELS])
def test_a_target_outside_of_the_vocabulary_is_refused_on_a_cpu(kernel, bad, device):
    if kernel == "triton" and device != "cpu":
        pytest.skip("on a machine with a GPU the interpreter is off")
    hidden, weight, targets = make()
    targets[7] = bad
    with pytest.raises(ValueError, match=f"from 0 to 52, or -100 .* got {bad}"):
        linear_cross_entropy(hidden, weight, targets, kernel=kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_target_outside_of_the_vocabulary_is_nan_on_a_gpu(kernel):
    hidden, weight, targets = make(device="cuda")
    targets[7] = 53
    loss, dhidden, _ = run(kernel, hidden, weight, targets, "none")
    assert loss.isnan().nonzero().flatten().tolist() == [7]
    assert dhidden.isnan().any(-1).nonzero().flatten().tolist() == [7]


def test_dweight_is_summed_in_float32(device):
    """256, then 1 eight times: a bfloat16 sum, of 8 bits, would stay at 256."""
    hidden = torch.tensor([[512.0], *[[2.0]] * 8], dtype=torch.bfloat16, device=device)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, device=device)  # every p is 1/2
    targets = torch.zeros(9, dtype=torch.int64, device=device)
    dweight = run("chunked", hidden, weight, targets, chunk_tokens=1)[2]
    assert dweight.flatten().tolist() == [-264.0, 264.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_multiplies_in_16_bits_and_keeps_float32_gradients(kernel, dtype, device):
    hidden, weight, targets = make(64, 32, 101, device=device)
    rounded = hidden.to(dtype), weight.to(dtype)
    truth = oracle(*rounded, targets, "sum", torch.ones((), device=device))

    def under_autocast(name):
        with torch.autocast(device, dtype=dtype):
            a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            loss = linear_cross_entropy(a, b, targets, reduction="sum", kernel=name)
            assert loss.dtype == torch.float32
        (loss * 65536).backward()  # float16's loss scale: beyond float16 itself
        return loss.detach(), a.grad / 65536, b.grad / 65536

    got = under_autocast(kernel)
    assert got[1].dtype == got[2].dtype == torch.float32
    # What 16 bits cannot tell apart gives the same: the products are 16-bit ones.
    with torch.autocast(device, dtype=dtype):
        moved = linear_cross_entropy(
            rounded[0] * (1 + 1e-7), weight, targets, reduction="sum", kernel=kernel
        )
    assert torch.equal(moved, got[0])
    eager = run("eager", *rounded, targets)
    assert_within_budget(got, eager, truth, dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_wanted_gradients_are_made(kernel, device):
    hidden, weight, targets = make(device=device)
    full = run(kernel, hidden, weight, targets)
    for frozen in (0, 1):
        inputs = [hidden.clone().requires_grad_(frozen == 1), weight.clone()]
        inputs[1].requires_grad_(frozen == 0)
        linear_cross_entropy(*inputs, targets, reduction="sum", kernel=kernel).backward()
        assert inputs[frozen].grad is None
        torch.testing.assert_close(inputs[1 - frozen].grad, full[2 - frozen], rtol=0, atol=0)
    with torch.no_grad():
        loss = linear_cross_entropy(
            hidden.requires_grad_(), weight, targets, reduction="sum", kernel=kernel
        )
    assert not loss.requires_grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_graph_can_be_walked_twice_and_differentiated_once(reduction):
    hidden, weight, targets = make()
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0].clone()
    second = torch.autograd.grad(loss, hidden, create_graph=True)[0]
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match=r"differentiable once|no autograd formula"):
        torch.autograd.grad(second.sum(), hidden)


def test_strided_arguments():
    hidden, weight, targets = make(40, 16, 53)
    wide = torch.stack((hidden, hidden + 1), -1)[..., 0]
    tall = weight.T.contiguous().T
    gapped = torch.stack((targets, targets), 1)[:, 0]
    want = run("chunked", hidden, weight, targets)
    got = run("chunked", wide, tall, gapped)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
