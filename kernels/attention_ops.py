"""A pair of attention kernels, forward and backward, as one differentiable op of PyTorch's."""

from collections.abc import Callable, Sequence

import torch

from minitx.kernels.custom_ops import define_op, no_second_derivative, save_nothing

Fwd = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]
]


def define_attention(kernel: str, fwd: Fwd, bwd: Callable[..., Sequence[torch.Tensor]]) -> Fwd:
    """Makes minitx::`kernel`_attention_fwd and _bwd; returns (q, k, v, is_causal, scale) ->
    (out, lse), differentiable once. Puts the same for inputs in one tensor into PACKED.

    fwd(q, k, v, is_causal, scale) fills and returns `empty_outputs`;
    bwd(dout, dlse, q, k, v, out, lse, is_causal, scale, needs, into=None) fills and returns
    `empty_grads`, or, where all are needed, may fill the three tensors `into` and return those.
    dlse is None where nothing was made of lse.
    """

    def setup_context(ctx, inputs, output) -> None:
        q, k, v, ctx.is_causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)  # where nothing was made of lse, dlse is None

    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        grads = backward_op(dout, dlse, q, k, v, out, lse, ctx.is_causal, ctx.scale, needs)
        dq, dk, dv = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
        return dq, dk, dv, None, None

    PACKED[kernel] = _define_packed(kernel, fwd, bwd)
    backward_op = define_op(
        f"{kernel}_attention_bwd",
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "bool is_causal, float scale, bool[] needs) -> (Tensor, Tensor, Tensor)",
        kernel=bwd,
        fake=lambda dout, dlse, q, k, v, out, lse, is_causal, scale, needs: empty_grads(
            q, k, v, needs
        ),
        setup_context=save_nothing,
        backward=no_second_derivative(kernel),
        vmap=_vmap,
    )
    return define_op(
        f"{kernel}_attention_fwd",
        "(Tensor q, Tensor k, Tensor v, bool is_causal, float scale) -> (Tensor, Tensor)",
        kernel=fwd,
        fake=lambda q, k, v, is_causal, scale: empty_outputs(q),
        setup_context=setup_context,
        backward=backward,
        vmap=_vmap,
    )


# By kernel: (qkv [B, S, Hq + 2 Hkv, D], Hq, is_causal, scale) -> (out, lse). The gradient of such
# an op is one tensor like qkv; that of three views of it is put together by a copy.
PACKED: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {}


def unpack(qkv: torch.Tensor, n_head: int) -> list[torch.Tensor]:
    """Views q [B, Hq, S, D], k and v [B, Hkv, S, D] of qkv [B, S, Hq + 2 Hkv, D]; Hq is n_head."""
    n_kv_head = (qkv.shape[2] - n_head) // 2
    return [t.transpose(1, 2) for t in qkv.split((n_head, n_kv_head, n_kv_head), dim=2)]


def _define_packed(
    kernel: str, fwd: Fwd, bwd: Callable[..., Sequence[torch.Tensor]]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def packed_fwd(qkv, n_head, is_causal, scale):
        q, k, v = unpack(qkv, n_head)
        return fwd(q, k, v, is_causal, scale)

    def packed_bwd(dout, dlse, qkv, out, lse, n_head, is_causal, scale):
        dqkv = torch.empty_like(qkv)
        into = unpack(dqkv, n_head)
        saved = (*unpack(qkv, n_head), out, lse)
        grads = bwd(dout, dlse, *saved, is_causal, scale, [True] * 3, into)
        for grad, place in zip(grads, into, strict=True):
            if grad is not place:  # on a CPU, where kernels compute in float32
                place.copy_(grad)
        return dqkv

    def setup_context(ctx, inputs, output) -> None:
        qkv, ctx.n_head, ctx.is_causal, ctx.scale = inputs
        ctx.save_for_backward(qkv, *output)
        ctx.set_materialize_grads(False)

    def backward(ctx, dout, dlse):
        qkv, out, lse = ctx.saved_tensors
        if dout is None:
            dout = out.new_zeros(()).expand(out.shape)
        dqkv = backward_op(dout, dlse, qkv, out, lse, ctx.n_head, ctx.is_causal, ctx.scale)
        return dqkv, None, None, None

    backward_op = define_op(
        f"{kernel}_packed_attention_bwd",
        "(Tensor dout, Tensor? dlse, Tensor qkv, Tensor out, Tensor lse, SymInt n_head, "
        "bool is_causal, float scale) -> Tensor",
        kernel=packed_bwd,
        fake=lambda dout, dlse, qkv, *settings: torch.empty_like(qkv),
        setup_context=save_nothing,
        backward=no_second_derivative(kernel),
        vmap=_vmap_one,
    )
    return define_op(
        f"{kernel}_packed_attention_fwd",
        "(Tensor qkv, SymInt n_head, bool is_causal, float scale) -> (Tensor, Tensor)",
        kernel=packed_fwd,
        fake=lambda qkv, n_head, *settings: empty_outputs(unpack(qkv, n_head)[0]),
        setup_context=setup_context,
        backward=backward,
        vmap=_vmap,
    )


def empty_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised out like q [B, Hq, Sq, D], strides and all, and lse [B, Hq, Sq] in float32."""
    B, Hq, Sq, _ = q.shape  # a tuple made of them is read 1 us sooner than a slice of the shape
    return torch.empty_like(q), q.new_empty((B, Hq, Sq), dtype=torch.float32)


def empty_grads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs: list[bool]
) -> tuple[torch.Tensor, ...]:
    """Uninitialised dq, dk and dv in the inputs' layouts; [0] for one that is not needed."""
    return tuple(
        torch.empty_like(t) if needed else t.new_empty(0)
        for t, needed in zip((q, k, v), needs, strict=True)
    )


def _vmap(call, info, in_dims, *inputs):
    """What is mapped over becomes part of the batch."""

    def fold(value, dim):
        if not isinstance(value, torch.Tensor):
            return value
        if dim is None:
            return value.expand(info.batch_size, *value.shape).flatten(0, 1)
        return value.movedim(dim, 0).flatten(0, 1)

    results = call(*(fold(value, dim) for value, dim in zip(inputs, in_dims, strict=True)))
    # A gradient that is not needed is empty, and has no batch to take apart.
    unfolded = (r.unflatten(0, (info.batch_size, -1)) if r.dim() > 1 else r for r in results)
    return tuple(unfolded), tuple(0 if r.dim() > 1 else None for r in results)


def _vmap_one(call, info, in_dims, *inputs):
    """The same for an op with one result."""
    results, dims = _vmap(lambda *folded: (call(*folded),), info, in_dims, *inputs)
    return results[0], dims[0]
