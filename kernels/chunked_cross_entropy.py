"""Output head and cross-entropy in chunks of tokens: the logits are never whole in memory.

    z_i   = weight h_i                                    [V] logits of token i
    nll_i = log sum_v exp(z_iv) - z_i,target              natural log
    dz_iv = g_i (softmax(z_i)_v - [v = target_i])         g_i: gradient of nll_i
    dh_i  = weight^T dz_i,    dweight = sum_i dz_i h_i^T

For 32k tokens and 50k words the logits alone are 3.1 GiB in bfloat16, 6.1 GiB in float32, and a
plain backward holds both. Here a chunk of about CHUNK_BYTES of logits is made, reduced, overwritten
by its own gradient and multiplied on, before the next one is made. The gradient of a sum or a mean
is known up to one factor before any backward runs, so dh and dweight are made in the forward: three
products, as many as the plain form has, and none twice. For reduction "none" the factors differ by
token, and the backward makes the logits again (four products).

Logits and their gradients are in the compute dtype (the autocast dtype, or hidden's own); all
statistics are in float32, and so is dweight, over chunks and to the end. (float64 stays float64.)

A chunk's rows are reduced and overwritten in one Triton kernel (`triton`) or by a few PyTorch calls
(`chunked`).
"""

import torch

# Logits of one chunk. 400 MiB is some 4,000 tokens of a vocabulary of 50,304 in bfloat16: matrices
# large enough for full tensor-core speed, and passes over dweight that cost little beside them.
CHUNK_BYTES = 400 * 2**20
CHUNK_MULTIPLE = 128  # tokens; a multiple of every GEMM tile


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def refuse_bad_targets(targets: torch.Tensor, V: int, ignore_index: int) -> None:
    """A look at the data, so on a CPU alone."""
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = targets[(targets != ignore_index) & ((targets < 0) | (targets >= V))]
    if bad.numel():
        raise ValueError(
            f"targets must be from 0 to {V - 1}, or {ignore_index} to be left out, "
            f"got {bad[0].item()}"
        )


def _chunk_size(N: int, V: int, dtype: torch.dtype, chunk_tokens: int) -> int:
    """Rows of a chunk; chunks of one call are as equal as multiples of CHUNK_MULTIPLE allow."""
    if chunk_tokens:
        return chunk_tokens
    most = max(CHUNK_MULTIPLE, CHUNK_BYTES // (V * dtype.itemsize))
    chunks = max(1, -(-N // most))
    rows = -(-N // chunks)
    return max(1, -(-rows // CHUNK_MULTIPLE) * CHUNK_MULTIPLE)


def _rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    row_grad: torch.Tensor | None,
    ignore_index: int,
    write_grad: bool,
) -> torch.Tensor:
    """nll [C] of logits [C, V], which it overwrites: by dz with write_grad, by anything without.

    row_grad: g, [C]; None means ones.
    """
    V = logits.shape[1]
    ignored = targets == ignore_index
    valid = (targets >= 0) & (targets < V)
    index = targets.long().clamp(0, V - 1)[:, None]
    z = logits.to(stats_dtype(logits.dtype))
    # The maximum goes first: z - max is exact enough where z - lse would carry lse's rounding.
    z.sub_(z.amax(dim=-1, keepdim=True))
    z_target = z.gather(1, index)
    p = z.exp_()
    row_sum = p.sum(dim=-1, keepdim=True)
    nll = (row_sum.log() - z_target).squeeze(1)
    nll = nll.masked_fill(~valid, float("nan")).masked_fill(ignored, 0.0)
    if write_grad:
        g = torch.ones_like(row_sum) if row_grad is None else row_grad[:, None].to(p.dtype)
        p.mul_(g / row_sum)
        p.scatter_(1, index, p.gather(1, index) - g)
        p.masked_fill_(~valid[:, None], float("nan")).masked_fill_(ignored[:, None], 0.0)
        if p is not logits:
            logits.copy_(p)
    return nll


def _add_product(
    total: torch.Tensor, dz: torch.Tensor, hidden: torch.Tensor, is_first: bool
) -> None:
    """total (+)= dz^T hidden in total's dtype: [V, E] from [C, V] and [C, E]."""
    beta = 0 if is_first else 1  # with 0, what `total` holds is not read: it may be NaN
    if total.dtype == dz.dtype:
        torch.addmm(total, dz.t(), hidden, beta=beta, out=total)
    elif dz.device.type == "cuda":  # 16-bit factors, a float32 accumulator: one GEMM, no temporary
        torch.addmm(total, dz.t(), hidden, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, dz.t().to(total.dtype), hidden.to(total.dtype), beta=beta, out=total)


def _run_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    row_grad: torch.Tensor | None,
    ignore_index: int,
    chunk_tokens: int,
    compute_dtype: torch.dtype,
    use_triton: bool,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """nll [N], dhidden [N, E] in the compute dtype, dweight [V, E] in the statistics' dtype.

    A gradient that is not wanted comes back with no elements.
    """
    if use_triton:
        from minitx.kernels.triton_cross_entropy import cross_entropy_rows
    else:
        cross_entropy_rows = _rows
    N, V = hidden.shape[0], weight.shape[0]
    refuse_bad_targets(targets, V, ignore_index)
    nll, dhidden, dweight = _empty_results(
        hidden, weight, compute_dtype, wants_hidden, wants_weight
    )
    if wants_weight and N == 0:
        dweight.zero_()
    wants_grad = wants_hidden or wants_weight
    chunk = _chunk_size(N, V, compute_dtype, chunk_tokens)
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(compute_dtype)
        buffer = w.new_empty(min(N, chunk), V)  # one for all: a chunk's would outlive its turn
        for start in range(0, N, chunk):
            rows = slice(start, start + chunk)
            h = hidden[rows].to(compute_dtype)
            logits = torch.mm(h, w.t(), out=buffer[: h.shape[0]])
            g = None if row_grad is None else row_grad[rows]
            nll[rows] = cross_entropy_rows(logits, targets[rows], g, ignore_index, wants_grad)
            if wants_hidden:
                torch.mm(logits, w, out=dhidden[rows])
            if wants_weight:
                _add_product(dweight, logits, h, is_first=start == 0)
    return nll, dhidden, dweight


def _empty_results(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    compute_dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What _run_chunks fills, uninitialised."""
    stats = stats_dtype(compute_dtype)
    return (
        hidden.new_empty(hidden.shape[0], dtype=stats),
        hidden.new_empty(hidden.shape if wants_hidden else (0,), dtype=compute_dtype),
        weight.new_empty(weight.shape if wants_weight else (0,), dtype=stats),
    )


# Three ops of PyTorch's, which take what _run_chunks takes: written once, as their schemas.
INPUTS = "Tensor hidden, Tensor weight, Tensor targets"
SETTINGS = "SymInt ignore_index, SymInt chunk_tokens, ScalarType compute_dtype, bool use_triton"
WANTS = "bool wants_hidden, bool wants_weight"


@torch.library.custom_op(
    "minitx::linear_cross_entropy_sum",
    mutates_args=(),
    schema=f"({INPUTS}, {SETTINGS}, {WANTS}) -> (Tensor, Tensor, Tensor)",
)
def chunked_sum(hidden, weight, targets, *settings_and_wants):
    """The sum of nll, and its gradients dhidden and dweight."""
    nll, *grads = _run_chunks(hidden, weight, targets, None, *settings_and_wants)
    return nll.sum(dtype=torch.float64).to(nll.dtype), *grads


@chunked_sum.register_fake
def _(hidden, weight, targets, ignore_index, chunk_tokens, compute_dtype, use_triton, *wants):
    nll, *grads = _empty_results(hidden, weight, compute_dtype, *wants)
    return nll.new_empty(()), *grads


def _sum_setup(ctx, inputs, output):
    hidden, weight = inputs[:2]
    _, dhidden, dweight = output
    ctx.save_for_backward(dhidden, dweight)
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.set_materialize_grads(False)


def _sum_backward(ctx, dtotal, ddhidden, ddweight):
    if ddhidden is not None or ddweight is not None:
        raise RuntimeError("linear_cross_entropy is differentiable once; use kernel='eager'")
    dhidden, dweight = ctx.saved_tensors
    grads = [
        # In dtotal's dtype, float32: a loss scale of 65536 fits there, and not in float16.
        (grad.to(dtotal.dtype) * dtotal).to(dtype) if is_needed and dtotal is not None else None
        for grad, dtype, is_needed in zip(
            (dhidden, dweight), ctx.dtypes, ctx.needs_input_grad[:2], strict=True
        )
    ]
    return *grads, None, None, None, None, None, None, None


chunked_sum.register_autograd(_sum_backward, setup_context=_sum_setup)


@torch.library.custom_op(
    "minitx::linear_cross_entropy_none",
    mutates_args=(),
    schema=f"({INPUTS}, {SETTINGS}) -> Tensor",
)
def chunked_nll(hidden, weight, targets, *settings):
    """nll, [N]."""
    wants = {"wants_hidden": False, "wants_weight": False}
    return _run_chunks(hidden, weight, targets, None, *settings, **wants)[0]


@chunked_nll.register_fake
def _(hidden, weight, targets, ignore_index, chunk_tokens, compute_dtype, use_triton):
    return _empty_results(hidden, weight, compute_dtype, False, False)[0]


@torch.library.custom_op(
    "minitx::linear_cross_entropy_grads",
    mutates_args=(),
    schema=f"({INPUTS}, Tensor row_grad, {SETTINGS}, {WANTS}) -> (Tensor, Tensor)",
)
def _grads(hidden, weight, targets, row_grad, *settings_and_wants):
    """Gradients of sum(row_grad * nll). It has no derivative of its own: a second one raises."""
    return _run_chunks(hidden, weight, targets, row_grad, *settings_and_wants)[1:]


@_grads.register_fake
def _(hidden, weight, targets, row_grad, ignore_index, chunk_tokens, compute_dtype, _, *wants):
    return _empty_results(hidden, weight, compute_dtype, *wants)[1:]


def _none_setup(ctx, inputs, output):
    hidden, weight, targets, *ctx.settings = inputs
    ctx.save_for_backward(hidden, weight, targets)


def _none_backward(ctx, dnll):
    hidden, weight, targets = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dhidden, dweight = _grads(hidden, weight, targets, dnll, *ctx.settings, needs[0], needs[1])
    return (
        dhidden.to(hidden.dtype) if needs[0] else None,
        dweight.to(weight.dtype) if needs[1] else None,
        *(None,) * 5,
    )


chunked_nll.register_autograd(_none_backward, setup_context=_none_setup)
