"""How rows reach the TileLang row softmax: merged views, wide loads, tiles. Nothing is compiled."""

import pytest
import torch

from minitx.kernels import tilelang_rows


def sizes_and_strides(*tensors, is_causal=False):
    return [
        (tuple(views[0].shape), [view.stride() for view in views])
        for views in tilelang_rows.as_matrices(*tensors, is_causal=is_causal)
    ]


def test_leading_dims_merge_where_every_tensor_allows():
    x = torch.empty(2, 3, 4, 5)
    assert sizes_and_strides(x) == [((1, 1, 24, 5), [(0, 0, 5, 1)])]
    assert sizes_and_strides(x[:, :2]) == [((1, 2, 8, 5), [(0, 60, 5, 1)])]
    assert sizes_and_strides(x.transpose(1, 2)) == [((2, 4, 3, 5), [(60, 5, 20, 1)])]
    assert sizes_and_strides(x, is_causal=True) == [((1, 6, 4, 5), [(0, 20, 5, 1)])]
    assert sizes_and_strides(x[:1, :1, :1, ::2]) == [((1, 1, 1, 3), [(0, 0, 0, 2)])]
    assert sizes_and_strides(x[0, 0, 0]) == [((1, 1, 1, 5), [(0, 0, 0, 1)])]
    assert sizes_and_strides(x[..., :1]) == [((1, 1, 24, 1), [(0, 0, 5, 1)])]
    assert sizes_and_strides(torch.empty(1, 5).expand(3, 5)) == [((1, 1, 3, 5), [(0, 0, 0, 1)])]
    other = torch.empty(3, 2, 4, 5).transpose(0, 1)
    assert sizes_and_strides(x, other) == [((2, 3, 4, 5), [(60, 20, 5, 1), (20, 40, 5, 1)])]


@pytest.mark.parametrize("is_causal", [False, True])
def test_views_show_every_element_once_and_copy_none(is_causal):
    base = torch.arange(2 * 3 * 2 * 3 * 2 * 4.0).view(2, 3, 2, 3, 2, 4)
    for x in (base, base.permute(4, 2, 0, 3, 1, 5), base.permute(3, 1, 4, 0, 2, 5)[..., 1::2]):
        seen = [views[0] for views in tilelang_rows.as_matrices(x, is_causal=is_causal)]
        assert all(
            view.untyped_storage().data_ptr() == x.data_ptr() - x.storage_offset() * 4
            for view in seen
        )
        assert torch.cat([view.reshape(-1) for view in seen]).tolist() == x.flatten().tolist()


def test_wide_loads_are_promised_only_where_every_row_is_aligned():
    def vector(*tensors):
        return tilelang_rows.vector_width(
            next(tilelang_rows.as_matrices(*tensors, is_causal=False))
        )

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")  # its address is 0

    assert vector(empty(6, 64)) == 8
    assert vector(empty(6, 64, dtype=torch.float32)) == 4
    assert vector(empty(6, 64)[:, :40]) == 8  # a pitch wider than the row
    assert vector(empty(6, 68)[:, :64]) == 1  # whose rows start at multiples of 8 bytes
    assert vector(empty(6, 63)) == 1
    assert vector(empty(6, 64)[:, :63]) == 1  # its last load would leave the row
    assert vector(empty(6, 128)[:, ::2]) == 0
    assert vector(empty(64, 6).t()) == 0
    assert vector(empty(6, 64), empty(6, 65)[:, :64]) == 1
    assert vector(empty(6, 1)) == 1
    assert vector(empty(1, 64).expand(6, 64)) == 8
    assert vector(torch.empty(6, 64)) == 0  # on a CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_read", [1, 2])
def test_every_tile_can_be_launched(dtype, n_read):
    vector = tilelang_rows.VECTOR_BYTES // dtype.itemsize
    for n in (1, 100, 256, 2048, 5000, 16384, 50_000, 10**6):
        tile = tilelang_rows.choose_tile(
            [torch.empty(1, 1, 1, n, dtype=dtype, device="meta")], n_read
        )
        assert tile.threads in (128, 256, 512, 1024)
        assert tile.WIDTH % vector == 0
        assert tile.BLOCK_N == 1 or tile.LANES <= 32
