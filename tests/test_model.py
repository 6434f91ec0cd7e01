"""The GPT: causality, initial loss, kernels interchangeable, the cache, counts."""

import itertools
import math

import pytest
import torch
from functorch.compile import make_boxed_func, nop
from torch._dynamo.backends.common import aot_autograd

from minitx.embedding import Embedding
from minitx.gelu import gelu
from minitx.kernels import attention_reference
from minitx.model import GPT, GPTConfig, KVCache, num_params
from minitx.rope import RotaryEmbedding, inverse_frequencies

KERNELS = ["eager", "sdpa", "triton-softmax", "tilelang-softmax", "triton", "tilelang"]

SHAPES = {
    "gpt2": dict(pos="learned", norm="layer", mlp="gelu", bias=True),
    "llama": dict(n_kv_head=1, tie_embeddings=False),
    "qwen3": dict(n_kv_head=1, qk_norm=True, head_dim=24),
}


def tiny(**changes) -> GPTConfig:
    settings = dict(n_layer=2, n_head=2, n_embd=32, max_seq_len=24, vocab_size=64) | changes
    return GPTConfig(**settings)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_later_token_moves_no_earlier_logit(kernel, tokens, device):
    torch.manual_seed(0)
    model = GPT(tiny(n_kv_head=1), kernel).to(device)
    tokens = tokens.to(device)
    changed = tokens.clone()
    changed[:, 13:] = (changed[:, 13:] + 1) % 64
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.allclose(before[:, 13:], after[:, 13:])


@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_one_checkpoint_runs_on_every_kernel(kernel, tokens, device):
    torch.manual_seed(0)
    model = GPT(tiny(n_kv_head=1), "eager").to(device).eval()
    tokens = tokens.to(device)
    with torch.no_grad():
        want = model(tokens)
        model.set_kernel(kernel)
        got = model(tokens)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_loss_is_that_of_a_uniform_guess(shape, tokens):
    torch.manual_seed(0)
    model = GPT(tiny(**SHAPES[shape]), "eager")
    targets = torch.randint(0, 64, tokens.shape)
    loss = model.loss(tokens, targets).item() / targets.numel()
    assert loss == pytest.approx(math.log(64), abs=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_gives_the_logits_of_the_whole(shape, tokens):
    torch.manual_seed(0)
    config = tiny(**SHAPES[shape])
    model = GPT(config, "eager").eval()
    cache = KVCache(config, 2, 20, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        whole = model(tokens)
        edges = [0, 7, 8, 20]
        parts = [model(tokens[:, a:b], cache) for a, b in itertools.pairwise(edges)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="21 tokens are more than the 20"):
        model(tokens[:, :1], cache)


def test_grouped_queries_read_their_own_key_head():
    """The block's attention, recomputed by hand from its weights."""
    torch.manual_seed(0)
    config = tiny(n_head=4, n_kv_head=2, pos="learned", n_layer=1)
    block = GPT(config, "eager").blocks[0]
    x = torch.randn(1, 6, 32)
    with torch.no_grad():
        got = block.attn(x, torch.nn.Identity(), None, None)
        q, k, v = (x @ block.attn.qkv.weight.T).split([32, 16, 16], dim=-1)
        heads = []
        for h in range(4):
            kv = slice(8 * (h // 2), 8 * (h // 2) + 8)
            part = [t[:, None] for t in (q[..., 8 * h : 8 * h + 8], k[..., kv], v[..., kv])]
            heads.append(attention_reference(*part, is_causal=True, scale=8**-0.5)[0][:, 0])
        want = torch.cat(heads, dim=-1).float() @ block.attn.proj.weight.T
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_dropout_is_off_in_evaluation(tokens):
    torch.manual_seed(0)
    model = GPT(tiny(dropout=0.5), "eager")
    still = GPT(tiny(), "eager")
    still.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert not torch.equal(model(tokens), model(tokens))
        model.eval()
        assert torch.equal(model(tokens), model(tokens))
        assert torch.equal(model(tokens), still(tokens))


def test_left_out_targets_and_token_losses(tokens):
    torch.manual_seed(0)
    model = GPT(tiny(), "eager")
    targets = tokens.roll(-1, dims=1)
    targets[:, ::3] = -100
    losses = model.token_losses(tokens, targets)
    logits = model(tokens).double()
    picked = logits.logsumexp(-1) - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    want = picked.masked_fill(targets == -100, 0.0)
    torch.testing.assert_close(losses.double(), want, rtol=0, atol=1e-5)
    assert model.loss(tokens, targets).item() == pytest.approx(want.sum().item(), rel=1e-6)


def test_learned_positions_refuse_what_rope_reads():
    tokens = torch.zeros(1, 30, dtype=torch.int64)
    learned, rope = GPT(tiny(pos="learned"), "eager"), GPT(tiny(), "eager")
    for model in (learned, rope):
        with pytest.raises(ValueError, match="30 tokens are more than the 24"):
            model(tokens)
    with pytest.raises(ValueError, match="30 tokens is beyond the 24 learned positions"):
        learned.extend_context(30)
    rope.extend_context(30)
    assert rope(tokens).shape == (1, 30, 64)


def test_rope_turns_pairs_by_their_angle():
    inv_freq, factor = inverse_frequencies(4, base=100.0)
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1], dtype=torch.float64))
    rope = RotaryEmbedding(inv_freq, factor, 10)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    got = rope(x, start=3).flatten()
    want = [
        1 * math.cos(3) - 3 * math.sin(3),
        2 * math.cos(0.3) - 4 * math.sin(0.3),
        3 * math.cos(3) + 1 * math.sin(3),
        4 * math.cos(0.3) + 2 * math.sin(0.3),
    ]
    torch.testing.assert_close(got, torch.tensor(want))


def test_rope_scores_depend_on_distance_alone():
    inv_freq, factor = inverse_frequencies(16)
    rope = RotaryEmbedding(inv_freq, factor, 1000)
    q, k = torch.randn(2, 1, 1, 1, 16).unbind()
    scores = [(rope(q, s + 5) * rope(k, s)).sum().item() for s in (0, 7, 900)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)


def test_rope_scaling_at_its_known_points():
    """Linear divides all; ntk leaves the fastest and divides the slowest by factor exactly; yarn
    and llama3 leave fast frequencies and divide slow ones."""
    plain, _ = inverse_frequencies(64, 10_000.0)
    linear, _ = inverse_frequencies(64, 10_000.0, "linear", 4.0)
    torch.testing.assert_close(linear, plain / 4)
    ntk, _ = inverse_frequencies(64, 10_000.0, "ntk", 4.0)
    assert ntk[0] == plain[0]
    assert (plain[-1] / ntk[-1]).item() == pytest.approx(4.0)
    for name in ("yarn", "llama3"):
        scaled, attention = inverse_frequencies(64, 10_000.0, name, 4.0, trained_len=2048)
        turns = 2048 * plain / (2 * math.pi)
        ratio = plain / scaled
        assert ratio[turns > 40].tolist() == pytest.approx([1.0] * int((turns > 40).sum()))
        assert ratio[turns < 0.5].tolist() == pytest.approx([4.0] * int((turns < 0.5).sum()))
        assert ((ratio >= 1 - 1e-12) & (ratio <= 4 + 1e-12)).all()
        assert attention == pytest.approx(0.1 * math.log(4) + 1 if name == "yarn" else 1.0)


def test_rope_tables_stay_float32_and_exact_far_out():
    model = GPT(tiny(), "eager").to(torch.bfloat16)
    model.extend_context(200_001)
    assert model.rope.cos.dtype == torch.float32
    angle = 200_000 * model.rope.inv_freq[1].item()
    assert model.rope.cos[200_000, 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_parameters_of_gpt2_small():
    """nanoGPT's model: 124,337,664 parameters at a vocabulary of 50257 without biases."""
    config = GPTConfig(pos="learned", norm="layer", mlp="gelu", vocab_size=50257)
    with torch.device("meta"):
        model = GPT(config)
    # 12 * (4 + 8) * 768^2 matrices, 25 norms of 768, (50257 + 1024) * 768 embeddings
    assert num_params(model) == 12 * 12 * 768**2 + 25 * 768 + (50257 + 1024) * 768


def test_tied_weights_exist_once_and_stay_tied():
    model = GPT(tiny(), "eager")
    assert "head.weight" not in model.state_dict()
    with torch.no_grad():
        model.tok_embd.weight.fill_(0.5)
    assert (model.output_weight == 0.5).all()


def test_residual_projections_start_smaller():
    torch.manual_seed(0)
    model = GPT(tiny(n_embd=256, n_layer=8, n_head=4), "eager")
    block = model.blocks[3]
    assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for projection in (block.attn.proj, block.mlp.proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(n_head=3, n_kv_head=2), "n_head must be a multiple of n_kv_head, got 3 and 2"),
        (dict(n_embd=33), "n_embd must be a multiple of n_head"),
        (dict(n_embd=30, n_head=2), "rope needs an even head_dim, got 15"),
        (dict(dropout=1.0), "dropout must be in"),
        (dict(n_layer=0), "n_layer must be at least 1, got 0"),
        (dict(rope_factor=0.5), "rope_factor must be at least 1"),
        (dict(rope_factor=math.inf), "rope_factor must be at least 1"),
        (dict(n_kv_head=0), "n_kv_head must be at least 1, got 0"),
        (dict(n_kv_head=-1), "n_kv_head must be at least 1, got -1"),
        (dict(head_dim=0), "head_dim must be at least 1, got 0"),
        (dict(mlp_hidden=-1), "mlp_hidden must be at least 1, got -1"),
        (dict(rope_trained_len=0), "rope_trained_len must be at least 1, got 0"),
        (dict(rope_base=1.0), "rope_base must be a finite number above 1, got 1.0"),
        (dict(norm_eps=math.nan), "norm_eps must be a finite number from 0 on, got nan"),
    ],
)
def test_impossible_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="unknown kernel 'flash'; expected one of auto, reference"):
        GPT(tiny(), "flash")


def test_a_compiled_embedding_gives_the_gradient_of_pytorchs_own():
    torch.manual_seed(0)
    embedding = Embedding(7, 5)
    ids, dout = torch.randint(0, 7, (3, 40)), torch.randn(3, 40, 5)
    compiled = torch.compile(lambda: embedding(ids), fullgraph=True, backend="aot_eager")
    compiled().backward(dout)
    weight = embedding.weight.detach().clone().requires_grad_()
    torch.nn.functional.embedding(ids, weight).backward(dout)
    assert torch.equal(embedding.weight.grad, weight.grad)


def test_compiled_code_cannot_look_into_an_embeddings_gradient():
    """Else it would make atomic additions of it, whose order no two runs share."""
    seen = []

    def look(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=nop, bw_compiler=look)
    embedding = Embedding(7, 5)
    compiled = torch.compile(lambda ids: embedding(ids).sum(), fullgraph=True, backend=backend)
    compiled(torch.arange(7)).backward()
    assert "minitx.embedding_bwd.default" in seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gelu_is_as_exact_as_pytorchs_own(dtype):
    """Value and slope from -12 to 12, and far out, where the cube overflows: against float64."""

    def curves(function, dtype):
        x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
        x = torch.cat((x, torch.tensor([1e4, -1e4, 1e30]))).to(dtype).to(torch.float64)
        x = x.to(dtype).requires_grad_()
        y = function(x)
        (slope,) = torch.autograd.grad(y[:-1].sum(), x)  # of 1e30 PyTorch's own is NaN
        return y.detach().double(), slope[:-1].double()

    def own(x):
        return torch.nn.functional.gelu(x, approximate="tanh")

    def exact(x):
        return own(x.double())

    compiled = torch.compile(gelu, fullgraph=True, backend="aot_eager")
    eps = torch.finfo(dtype).eps
    for got, pytorchs, true in zip(
        curves(compiled, dtype), curves(own, dtype), curves(exact, dtype), strict=True
    ):
        budget = 2 * (pytorchs - true).abs().max().clamp(max=1e-2) + eps
        assert ((got - true).abs() / true.abs().clamp(min=1)).max() <= budget
