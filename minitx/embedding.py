"""An embedding whose gradient has the same bits in every run, compiled or not.

The gradient of a row is a sum over the tokens that read it. PyTorch's own kernel sorts them and
sums in a fixed order; torch.compile's would add them up by atomics, in whatever order they come,
and a resumed run would not be the run that was never stopped. Compiled code is therefore given
kernels that do as PyTorch's, as an op that it cannot look into: on a GPU in Triton
(triton_embedding.py), elsewhere PyTorch's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minitx.kernels.runtime import triton_problem


class Embedding(nn.Embedding):
    """[rows, width] weights; ids of any shape, int64 -> [*ids.shape, width]."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return _embedding(self.weight, input)
        return F.embedding(input, self.weight)


@torch.library.custom_op("minitx::embedding", mutates_args=())
def _embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, weight)


@_embedding.register_fake
def _(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("minitx::embedding_bwd", mutates_args=())
def _embedding_bwd(dout: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, width]: the sum of dout [..., width] over the places where ids [...] name the row."""
    on_gpu = dout.is_cuda and dout.dtype != torch.float64
    if on_gpu and triton_problem("cuda", dout.device.index) is None:
        from minitx.kernels.triton_embedding import embedding_grad

        return embedding_grad(dout.reshape(-1, dout.shape[-1]), ids.reshape(-1), rows)
    return torch.ops.aten.embedding_dense_backward(dout, ids, rows, -1, False)


@_embedding_bwd.register_fake
def _(dout: torch.Tensor, ids: torch.Tensor, rows: int) -> torch.Tensor:
    return dout.new_empty(rows, dout.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: Any) -> None:
    weight, ids = inputs
    ctx.save_for_backward(ids)
    ctx.rows = weight.shape[0]


def _backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None]:
    (ids,) = ctx.saved_tensors
    return _embedding_bwd(dout, ids, ctx.rows), None


_embedding.register_autograd(_backward, setup_context=_setup_context)
