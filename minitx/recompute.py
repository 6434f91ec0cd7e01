"""Activation checkpointing: what a block keeps for its backward, and what it computes once more.

    none        keeps whatever autograd asks for
    selective   keeps the results of matrix products and of attention; norms, activations, RoPE and
                residual sums are made again, from what is there: no product is
    full        keeps the block's input and attention's results; the other products are made again,
                too, but attention, whose cost grows with the square of the context, never is

That holds of attention that is one op (`sdpa`, `triton`, `tilelang`). Where it is made of several,
as in `eager`, they are made again, products and all: to keep them would be to keep the scores.

For attention to be spared in the backward its lse has to be kept beside its output, so both are
(Chen et al. 2016, arXiv:1604.06174, by op instead of by layer). The results are the same to the
bit: what is made again is made by the same kernels from the same numbers (under torch.compile, in
other fusions).
"""

import functools
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

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}
# PyTorch's fused attention, by backend. Those of this project are told by their names, since an op
# exists once its kernel was asked for.
SDPA = {
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}

# torch.compile warns of in-place operations, whose results it would not tell apart: blocks have
# none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed" not in record.getMessage()
)


def is_attention(op: Any) -> bool:
    name = op.name() if isinstance(op, torch._ops.OpOverload) else ""
    return op in SDPA or (name.startswith("minitx::") and name.endswith("_attention_fwd"))


def _policy(mode: Recompute, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = is_attention(op) or (mode == "selective" and op in PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def run_block(
    mode: Recompute, block: Callable[..., torch.Tensor], *args: Any, draws_random: bool
) -> torch.Tensor:
    """block(*args), with of its activations only those of `mode` kept.

    draws_random: whether the block draws random numbers (dropout), which are then drawn again;
    the generator's state is read for it, on a GPU by waiting for it.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return block(*args)
    result = checkpoint(
        block,
        *args,
        use_reentrant=False,
        preserve_rng_state=draws_random,
        context_fn=functools.partial(
            create_selective_checkpoint_contexts, functools.partial(_policy, mode)
        ),
    )
    assert isinstance(result, torch.Tensor)
    return result
