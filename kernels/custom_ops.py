"""Kernels as ops of PyTorch's own: seen by autograd, torch.compile, vmap and torch.func."""

from collections.abc import Callable
from typing import Any

import torch


def define_op(
    name: str,
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    vmap: Callable[..., Any],
) -> Callable[..., Any]:
    """Makes minitx::`name` an op and returns the function that calls it.

    kernel(*inputs) computes, fake(*inputs) returns empty tensors of the results' shapes and
    strides; setup_context(ctx, inputs, output) and backward(ctx, *grads) are those of a
    torch.autograd.Function; vmap(call, info, in_dims, *inputs) is the rule of
    torch.library.register_vmap with the function that is returned before it.

    Defined piece by piece, since an op made by torch.library.custom_op passes through more Python
    at every call. torch.func does not pass through an op's own autograd: under its transforms the
    same functions run as a torch.autograd.Function.
    """
    qualified = f"minitx::{name}"
    torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(qualified, ("cpu", "cuda"), kernel)
    torch.library.register_fake(qualified, fake)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    op = getattr(torch.ops.minitx, name).default

    def rule(info, in_dims, *inputs):
        # Not the bare op: below this vmap there may be a torch.func.grad.
        return vmap(call, info, in_dims, *inputs)

    torch.library.register_vmap(qualified, rule)
    members = {"forward": op, "setup_context": setup_context, "backward": backward, "vmap": rule}
    function: Any = type(
        name,
        (torch.autograd.Function,),
        {key: staticmethod(member) for key, member in members.items()},
    )

    def call(*inputs):
        if torch._C._are_functorch_transforms_active():
            return function.apply(*inputs)
        return op(*inputs)

    return call


def save_nothing(ctx, inputs, output) -> None:
    """The setup_context of an op without a derivative."""


def no_second_derivative(kernel: str) -> Callable[..., Any]:
    """The backward of a backward op: an error that names the kernel."""

    def backward(ctx, *grads):
        raise RuntimeError(
            f"kernel '{kernel}' has no second derivative; use kernel 'reference' where one is "
            "needed"
        )

    return backward
