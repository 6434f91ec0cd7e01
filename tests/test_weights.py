"""Weights as compiled products read them: values and gradients, and that lists stay lists."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from minitx.model import GPT, GPTConfig
from minitx.weights import cast_weights, scale_weights


@pytest.mark.parametrize("rows", [(48, 32), (24, 7)])  # in sixteen parts, and in one
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_weights_and_their_gradients(rows, dtype):
    torch.manual_seed(0)
    weights = [torch.randn(n, 10, requires_grad=True) for n in rows]
    scales = [torch.randn(10, requires_grad=True) for _ in rows]
    grads = [torch.randn(n, 10).to(dtype) for n in rows]
    made = torch.compile(scale_weights, fullgraph=True, backend="aot_eager")(weights, scales, dtype)
    got = torch.autograd.grad(made, weights + scales, grads)
    for n, (w, s, v, dv) in enumerate(zip(weights, scales, made, grads, strict=True)):
        torch.testing.assert_close(v, (w * s).to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(got[n], dv.float() * s, rtol=0, atol=0)
        ds = (dv.double() * w.double()).sum(0)
        torch.testing.assert_close(got[n + len(rows)].double(), ds, rtol=1e-6, atol=1e-5)


def test_cast_weights_and_their_gradients():
    weights = [torch.randn(n, 3, requires_grad=True) for n in (4, 5)]
    grads = [torch.randn(n, 3, dtype=torch.bfloat16) for n in (4, 5)]
    made = torch.compile(cast_weights, fullgraph=True, backend="aot_eager")(weights, torch.bfloat16)
    for w, v, dw, dv in zip(
        weights, made, torch.autograd.grad(made, weights, grads), grads, strict=True
    ):
        assert torch.equal(v, w.bfloat16())
        assert dw.dtype == torch.float32
        assert torch.equal(dw, dv.float())
    assert cast_weights(weights, torch.float32) is weights  # no copy


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_compiled_step_makes_all_weights_at_once(recompute):
    """Two operations on lists forward and two backward, for any number of layers; no product reads
    weights in float32, and none is cast by itself."""
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    config = GPTConfig(n_layer=3, n_head=2, n_embd=32, vocab_size=64, max_seq_len=8)
    model = GPT(config, "sdpa", recompute)
    tokens = torch.randint(64, (2, 8))
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.compile(model.loss, fullgraph=True, backend=backend)(tokens, tokens)
    loss.backward()
    forward, backward = graphs
    for graph in (forward, backward):
        lists = [node for node in graph.nodes if "_foreach_mul" in str(node.target)]
        assert len(lists) == 2
    products = [node for node in forward.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) >= 4 * 3
    for node in products:
        assert {a.meta["val"].dtype for a in node.args} == {torch.bfloat16}
