"""The embedding's gradient in Triton: runs of ids that begin, end and go on anywhere in a piece."""

import pytest
import torch

from minitx.kernels import supports_softmax

if not supports_softmax("triton", torch.zeros(1)).ok and not torch.cuda.is_available():
    pytest.skip(supports_softmax("triton", torch.zeros(1)).reason, allow_module_level=True)

from minitx.kernels.triton_embedding import PIECE, embedding_grad


def check(ids: torch.Tensor, rows: int, width: int, device: str, dtype=torch.float32) -> None:
    dout = torch.randn(len(ids), width, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = embedding_grad(dout.to(device), ids.to(device), rows)
    want = torch.zeros(rows, width, dtype=torch.float64).index_add_(0, ids, dout.double())
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu().double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [PIECE],  # a run that ends with its piece
        [PIECE, PIECE],
        [PIECE + 1],
        [3, PIECE, 5],  # over one edge
        [3, 3 * PIECE, 5, 2 * PIECE],  # over several; up to the end
        [1] * (2 * PIECE) + [PIECE - 1, 2],
        [5 * PIECE + 7],
    ],
    ids=str,
)
def test_runs_of_any_length(lengths, device):
    ids = torch.repeat_interleave(torch.arange(len(lengths)) * 2 + 1, torch.tensor(lengths))
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    check(shuffled, rows=2 * len(lengths) + 3, width=5, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_as_text_has_them(dtype, device):
    """Most of them few words, the first and the last row among them."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(300, generator=generator) ** 4 * 50).long()
    ids[:2] = torch.tensor([0, 49])
    check(ids, rows=50, width=24, device=device, dtype=dtype)


def test_no_tokens_at_all(device):
    assert not embedding_grad(
        torch.ones(0, 4, device=device), torch.ones(0, device=device), 3
    ).any()


@pytest.mark.gpu
def test_the_same_bits_every_time():
    ids = (torch.rand(32_768, device="cuda") ** 4 * 50_304).long()
    dout = torch.randn(32_768, 768, device="cuda")
    first = embedding_grad(dout, ids, 50_304)
    for _ in range(5):
        assert torch.equal(embedding_grad(dout, ids, 50_304), first)
