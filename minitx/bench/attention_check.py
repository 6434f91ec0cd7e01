"""Is a result right? Slices of it against float64, at its full length, before it is timed.

A slice is one key head with the query heads that read it, of the first and of the last batch. Long
sequences are computed in blocks of queries, each against the keys up to its end.
"""

import torch

from minitx.bench.attention_variants import Case
from minitx.testing import AttentionResult, error_budget, max_error, oracle_attention, run_attention

BLOCK_ELEMENTS = 2**27  # scores of a block: 1 GiB in float64, and some copies of it
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Truth:
    """What a case's slices are in float64, and what eager attention makes of them in the case's
    dtype."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.slices = []
        q, k, v, dout = case.make_inputs()
        for batch, head in {(0, 0), (case.batch - 1, case.kv_heads - 1)}:
            inputs = [self.cut(t, batch, head) for t in (q, k, v, dout)]
            exact = in_blocks("oracle", *inputs, is_causal=case.is_causal)
            eager = in_blocks("eager", *inputs, is_causal=case.is_causal)
            self.slices.append((batch, head, exact, eager))

    def cut(self, x: torch.Tensor, batch: int, head: int) -> torch.Tensor:
        """x [B, Hq or Hkv, S, D] -> its part for one key head, [1, group or 1, S, D]."""
        group = x.shape[1] // self.case.kv_heads
        return x[batch : batch + 1, head * group : (head + 1) * group]

    def check_out(self, out: torch.Tensor) -> tuple[float, float, str]:
        """(error, budget, name) of out [B, Hq, Sq, D]."""
        return self._worst({"out": out})

    def check_gradients(self, gradients: Gradients) -> tuple[float, float, str]:
        """(error, budget, name) of the gradient that comes closest to its budget, or passes it."""
        return self._worst(dict(zip(("dq", "dk", "dv"), gradients, strict=True)))

    def _worst(self, tensors: dict[str, torch.Tensor]) -> tuple[float, float, str]:
        results = []
        for name, tensor in tensors.items():
            for batch, head, exact, eager in self.slices:
                truth = getattr(exact, name)
                error = max_error(self.cut(tensor, batch, head), truth)
                budget = error_budget(getattr(eager, name), truth, tensor.dtype)
                results.append((error, budget, name))
        return max(results, key=lambda result: result[0] / result[1])


def in_blocks(
    how: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    *,
    is_causal: bool,
) -> AttentionResult:
    """The oracle, in float64, or eager attention, by blocks of queries.

    The blocks' shares of dk and dv are added in float64 (oracle) or float32 (eager, then rounded).
    q, dout: [1, group, Sq, D]; k, v: [1, 1, Skv, D].
    """
    (group, Sq), Skv = q.shape[1:3], k.shape[2]
    dtype = torch.float64 if how == "oracle" else torch.float32
    block = max(1, BLOCK_ELEMENTS // (Skv * group))
    outs, dqs = [], []
    dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (k, v))
    for start in range(0, Sq, block):
        rows = slice(start, min(start + block, Sq))
        end = Skv - Sq + rows.stop if is_causal else Skv
        inputs = (q[:, :, rows], k[:, :, :end], v[:, :, :end], dout[:, :, rows])
        if how == "oracle":
            part = oracle_attention(*inputs, is_causal=is_causal)
        else:
            part = run_attention("eager", *inputs, is_causal=is_causal, return_lse=False)
        outs.append(part.out)
        dqs.append(part.dq)
        dk[:, :, :end] += part.dk
        dv[:, :, :end] += part.dv
    if how == "eager":
        dk, dv = dk.to(k.dtype), dv.to(v.dtype)
    return AttentionResult(torch.cat(outs, 2), None, torch.cat(dqs, 2), dk, dv)
