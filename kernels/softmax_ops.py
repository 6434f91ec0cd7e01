"""A pair of row-softmax kernels, forward and backward, as one differentiable op of PyTorch's."""

from collections.abc import Callable

import torch

from minitx.kernels.custom_ops import define_op, no_second_derivative, save_nothing


def define_softmax(
    kernel: str,
    fwd: Callable[[torch.Tensor, bool], torch.Tensor],
    bwd: Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor],
) -> Callable[[torch.Tensor, bool], torch.Tensor]:
    """Makes minitx::`kernel`_softmax_fwd and _bwd; returns the function (x, is_causal) -> y.

    fwd(x, is_causal) gives y, and bwd(y, dy, is_causal) dx, each in its first argument's shape,
    dtype and layout. The backward needs y alone, so that is all that is saved.
    """

    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(output)
        ctx.is_causal = inputs[1]

    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (y,) = ctx.saved_tensors
        return backward_op(y, dy, ctx.is_causal), None

    backward_op = define_op(
        f"{kernel}_softmax_bwd",
        "(Tensor y, Tensor dy, bool is_causal) -> Tensor",
        kernel=bwd,
        fake=lambda y, dy, is_causal: torch.empty_like(y),
        setup_context=save_nothing,
        backward=no_second_derivative(kernel),
        vmap=_vmap,
    )
    return define_op(
        f"{kernel}_softmax_fwd",
        "(Tensor x, bool is_causal) -> Tensor",
        kernel=fwd,
        fake=lambda x, is_causal: torch.empty_like(x),
        setup_context=setup_context,
        backward=backward,
        vmap=_vmap,
    )


def _vmap(call, info, in_dims, *inputs):
    """Rows are independent: what is mapped over is one more leading dim."""
    *tensors, is_causal = inputs
    mapped = (
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=False)
    )
    return call(*mapped, is_causal), 0
