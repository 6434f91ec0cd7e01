"""Kernels as ops of PyTorch's own: seen by autograd, torch.compile, vmap and torch.func."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_dispatch_keys = torch._C._dispatch_keys


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
    same functions run as a torch.autograd.Function. And where no one looks on, no op is called at
    all: PyTorch's dispatcher and an op's autograd take longer than the launch of the kernel.
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

    def forward(ctx, *inputs):
        # Not by a setup_context of its own, for which PyTorch inspects signatures at every call.
        output = kernel(*inputs)
        setup_context(ctx, inputs, output)
        return output

    function = _autograd_function(
        name, forward=op, setup_context=setup_context, backward=backward, vmap=rule
    )
    bare_function = _autograd_function(name, forward=forward, backward=backward)

    def call(*inputs):
        if torch.compiler.is_compiling():
            return op(*inputs)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        _refuse_tangents(name, tensors)
        if torch._C._are_functorch_transforms_active():
            return function.apply(*inputs)
        if not _unobserved(tensors):
            return op(*inputs)
        if torch.is_grad_enabled():
            for t in tensors:
                if t.requires_grad:
                    return bare_function.apply(*inputs)
        return kernel(*inputs)

    return call


def _autograd_function(name: str, **members: Callable[..., Any]) -> Any:
    methods = {key: staticmethod(member) for key, member in members.items()}
    return type(name, (torch.autograd.Function,), methods)


def _refuse_tangents(name: str, tensors: list[torch.Tensor]) -> None:
    """Raises NotImplementedError for an input of forward-mode differentiation, whose tangent
    neither an op nor a kernel would carry on: the derivative would come out 0."""
    if forward_ad._current_level < 0:  # outside of it, which is cheaper to ask than each tensor
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            f"{name} has no forward-mode derivative; use kernel 'eager' or 'reference', or "
            "reverse mode"
        )


def _unobserved(tensors: list[torch.Tensor]) -> bool:
    """Whether nothing could tell an op from the kernel that it runs: no mode is on (checkpointing
    by op, counting, tracing), and the tensors are PyTorch's own and what they seem (not fake, not
    distributed, not batched by a vmap, not to be negated first)."""
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing():
        return False
    plain = _plain_keys(tensors[0].is_cuda)
    for t in tensors:  # a loop: `all` over a generator takes twice as long
        if type(t) not in _PLAIN_TYPES or _dispatch_keys(t).raw_repr() != plain:
            return False
    return True


@functools.cache
def _plain_keys(is_cuda: bool) -> int:
    """The dispatch keys of a tensor that is nothing but memory and, perhaps, a gradient."""
    with torch.inference_mode(False):
        probe = torch.empty(0, device="cuda" if is_cuda else "cpu")
        return torch._C._dispatch_keys(probe).raw_repr()


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
