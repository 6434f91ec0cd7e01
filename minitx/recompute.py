"""Activation checkpointing: what a block keeps for its backward, and what it computes once more.

    none        keeps whatever autograd asks for
    selective   keeps the inputs of the norms, the results of qkv, of attention and of the MLP's
                first product, and dropout's masks; norms, RoPE and activation functions are made
                again from those. One product is, too: the MLP's first in one of BLOCKS_AN_UP
                blocks, whose result is the largest of all. Under torch.compile norms keep their own
                result, which in 16 bits is half as large as their input (norm.py)
    full        keeps the block's input and attention's results; the other products are made again,
                too, but attention, whose cost grows with the square of the context, never is

That holds of attention that is one op (`sdpa`, `triton`, `tilelang`). Where it is made of several,
as in `eager`, they are made again, products and all: to keep them would be to keep the scores.

For attention to be spared in the backward its lse has to be kept beside its output, so both are
(Chen et al. 2016, arXiv:1604.06174, by op instead of by layer). The results are the same to the
bit: what is made again is made by the same kernels from the same numbers (under torch.compile, in
other fusions).
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Recompute = Literal["none", "selective", "full"]
# With one of six, GPT-2 124M's peak is half of that of nanoGPT's model (benchmarks/NOTES.md).
BLOCKS_AN_UP = 6

aten = torch.ops.aten
# PyTorch's fused attention, by backend. Those of this project are told by their names, since an op
# exists once its kernel was asked for.
SDPA = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}

# torch.compile warns of in-place operations, whose results it would not tell apart: there are none
# in what is made again here.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed" not in record.getMessage()
)


def is_attention(op: Any) -> bool:
    name = op.name() if isinstance(op, torch._ops.OpOverload) else ""
    return op in SDPA or (name.startswith("minitx::") and name.endswith("_attention_fwd"))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_attention(op) else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def checkpointed(
    function: Callable[..., torch.Tensor], *args: Any, draws_random: bool = False
) -> torch.Tensor:
    """function(*args), with only args and attention's results kept for its backward.

    What nothing in the backward asks for, such as a last product's result, is not made again.
    draws_random: whether random numbers are drawn (dropout), which are then drawn again; the
    generator's state is read for it, on a GPU by waiting for it.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    result = checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=draws_random,
        context_fn=_contexts,
    )
    assert isinstance(result, torch.Tensor)
    return result
