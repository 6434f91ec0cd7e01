"""What linear_cross_entropy promises on memory; as an op, under torch.compile, in the model; and
what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from cross_entropy_oracle import (
    KERNELS,
    make,
    run,
)
from torch.utils._python_dispatch import TorchDispatchMode

from minitx.kernels import KernelUnavailableError, linear_cross_entropy
from minitx.kernels.chunked_cross_entropy import _chunk_size, _run_chunks


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives back."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel())
        return result


def test_logits_are_never_whole():
    N, E, V, chunk = 512, 8, 1000, 32
    hidden, weight, targets = make(N, E, V)
    with LargestTensor() as eager:
        run("eager", hidden, weight, targets)
    assert eager.largest == N * V
    with LargestTensor() as outside:  # an operator hides what it does inside
        run("chunked", hidden, weight, targets)
    assert outside.largest == V * E
    with LargestTensor() as inside:
        _run_chunks(hidden, weight, targets, None, -100, chunk, torch.float32, False, True, True)
    assert inside.largest == chunk * V


def test_chunks_are_even_and_bounded():
    assert _chunk_size(32768, 50304, torch.bfloat16, 0) == 4096  # 8 chunks of it
    assert _chunk_size(32768, 50304, torch.float32, 0) == 2048
    assert _chunk_size(100, 320, torch.float32, 0) == 128
    assert _chunk_size(10**6, 10**7, torch.float32, 0) == 128
    assert _chunk_size(100, 320, torch.float32, 7) == 7


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_it_compiles_to_one_graph_for_all_lengths(reduction):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: linear_cross_entropy(*args, reduction=reduction, kernel="chunked"),
        fullgraph=True,
        dynamic=True,
        backend=count,
    )
    for N in (8, 12, 20):
        hidden, weight, targets = make(N)
        got = compiled(hidden.requires_grad_(), weight, targets)
        want = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        torch.testing.assert_close(got, want)
    assert len(graphs) == 1


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_operators_pass_opcheck(kernel, device):
    hidden, weight, targets = make(9, 4, 5, device=device)
    hidden.requires_grad_()
    weight.requires_grad_()
    settings = (-100, 4, torch.float32, kernel == "triton")
    ops = torch.ops.minitx
    # test_aot_dispatch_dynamic compares with aot_autograd; gradients enter it, too.
    torch.library.opcheck(ops.linear_cross_entropy_none, (hidden, weight, targets, *settings))
    args = (hidden, weight, targets, *settings, True, True)
    torch.library.opcheck(
        ops.linear_cross_entropy_sum, args, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden=torch.ones(2, 3, 4)), r"hidden \[N, E\].*got shapes \(2, 3, 4\)"),
        (dict(weight=torch.ones(53, 15)), r"agree in E.*\(53, 15\)"),
        (dict(targets=torch.zeros(36, dtype=torch.int64)), r"hidden and targets in N"),
        (dict(weight=torch.ones(0, 16)), "at least one row"),
        (dict(reduction="max"), "unknown reduction 'max'; expected one of none, sum, mean"),
        (dict(chunk_tokens=0), "chunk_tokens must be at least 1, got 0"),
        (dict(kernel="fused"), "unknown kernel 'fused'; expected auto or one of"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    hidden, weight, targets = make()
    tensors = dict(hidden=hidden, weight=weight, targets=targets)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(tensors | change))


def test_dtypes_that_do_not_fit_are_refused():
    hidden, weight, targets = make()
    with pytest.raises(TypeError, match=r"one dtype, got torch.bfloat16 and torch.float32"):
        linear_cross_entropy(hidden.bfloat16(), weight, targets)
    with pytest.raises(TypeError, match=r"must be float32.*got torch.int32"):
        linear_cross_entropy(hidden.int(), weight, targets)
    with pytest.raises(TypeError, match=r"targets must be int64 or int32, got torch.float32"):
        linear_cross_entropy(hidden, weight, targets.float())
    with pytest.raises(KernelUnavailableError, match=r"not float64. Kernels that can: eager"):
        linear_cross_entropy(hidden.double(), weight.double(), targets, kernel="triton")


def test_the_model_uses_it_and_its_loss_stays_a_sum():
    from minitx.model import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, max_seq_len=8, vocab_size=1000), "eager")
    tokens = torch.randint(0, 1000, (4, 8))
    targets = torch.randint(0, 1000, (4, 8))
    targets[0, :3] = -100
    want = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    want_grads = torch.autograd.grad(want, list(model.parameters()))
    loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, want)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(a, b)
    assert type(loss.grad_fn).__name__ != "NllLossBackward0"


@pytest.mark.gpu
@pytest.mark.huge
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_training_step_of_32k_tokens_takes_a_fraction_of_the_memory(kernel):
    hidden, weight, targets = make(32768, 768, 50304, device="cuda")
    hidden, weight = hidden * 0.1, weight * 0.02
    peaks, results = {}, {}
    for name in ("eager", kernel):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            loss = linear_cross_entropy(a, b, targets, kernel=name)
        loss.backward()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        results[name] = loss.item(), a.grad, b.grad
        del loss
    assert peaks[kernel] < 0.25 * peaks["eager"]
    assert results[kernel][0] == pytest.approx(results["eager"][0], rel=1e-5)
    for got, want in zip(results[kernel][1:], results["eager"][1:], strict=True):
        assert (got - want).norm() < 0.01 * want.norm()
