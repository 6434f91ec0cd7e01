"""In which order the TileLang backward for Hopper takes tasks and tiles, and where a tile of dq has
its elements: rules that hold for numbers, without a GPU or a compiler."""

import itertools

import pytest
import torch

from minitx.kernels import supports

_probe = torch.zeros(1, 1, 1, 16)
_support = supports("tilelang", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import tilelang_attention_bwd_order as order  # noqa: E402
from minitx.kernels.tilelang_attention_dq_sum import place_in_tile  # noqa: E402


def number(x) -> int:
    """Of an expression of numbers."""
    from tilelang import tvm

    return int(x if isinstance(x, int) else tvm.arith.Analyzer().simplify(x))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    ("num_n", "B", "Hkv", "group", "Sq"),
    [
        (1, 1, 1, 1, 1),
        (5, 3, 1, 1, 100),
        (3, 2, 12, 1, 300),  # two heads late
        (4, 2, 17, 1, 2000),  # three, and heads of the second batch element go with the first's
        (7, 2, 3, 1, 100000),  # heads too long for L2: all are late, four at a time and then two
        (3, 3, 4, 2, 300),  # grouped
    ],
)
def test_every_block_waits_for_one_that_started_before(num_n, B, Hkv, group, Sq, D):
    late = number(order.num_late(Hkv, group, Sq, D))
    places = [
        tuple(map(number, order.locate(block, num_n, B, Hkv, late, Sq, D)))
        for block in range(num_n * B * Hkv)
    ]
    started = {place[:3]: block for block, place in enumerate(places)}
    assert set(started) == set(itertools.product(range(num_n), range(Hkv), range(B)))
    for tile, head, element, number_late in places:
        is_late = bool(number_late)
        assert is_late == (head >= Hkv - late)
        turn = number(order.turn_of(tile, num_n, is_late))
        if turn > 0:
            before = tile - 1 if is_late else tile + 1
            assert started[before, head, element] < started[tile, head, element]
            assert number(order.turn_of(before, num_n, is_late)) == turn - 1


@pytest.mark.parametrize(
    ("B", "Hkv", "group", "Sq", "D", "early", "late"),
    [
        (1, 16, 1, 16384, 128, 2, 2),  # 32 MiB of L2; two heads are late
        (4, 16, 1, 4096, 128, 8, 8),  # of all batch elements
        (1, 12, 1, 65536, 64, 1, 2),
        (1, 16, 1, 65536, 128, 0, 4),  # all late, and four at least go together
        (1, 4, 4, 1024, 128, 0, 4),  # more would fit in L2
        (3, 1, 1, 10**6, 64, 0, 3),
    ],
)
def test_so_many_heads_go_together(B, Hkv, group, Sq, D, early, late):
    num_n = 3
    number_late = number(order.num_late(Hkv, group, Sq, D))
    heads: dict[bool, list] = {False: [], True: []}
    for block in range(num_n * B * Hkv):
        place = order.locate(block, num_n, B, Hkv, number_late, Sq, D)
        _, head, element, is_late = map(number, place)
        heads[bool(is_late)].append((element, head))
    for is_late, expected in ((False, early), (True, late)):
        started = heads[is_late]
        assert len(set(started[:expected])) == expected
        assert started[expected : 2 * expected] == started[:expected]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_block_goes_past_each_tile_of_each_head_once(is_late):
    first_m, num_m, group = 2, 7, 3
    steps = range(group * (num_m - first_m))
    places = [tuple(map(number, order.step_at(i, group, first_m, num_m, is_late))) for i in steps]
    tiles = range(first_m, num_m)
    expected = [(head, m) for m in (reversed(tiles) if is_late else tiles) for head in range(group)]
    assert places == expected


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("first_ms", [[0, 1, 3, 4], [0, 0, 0], [2]])
def test_one_block_adds_first_to_a_tile_and_one_last(first_ms, group, is_late):
    # first_ms: the first tile of queries that reads each tile of keys
    num_n, num_m = len(first_ms), 6
    for n, first_m in enumerate(first_ms):
        next_m = first_ms[n + 1] if n + 1 < num_n else num_m
        ends = order.first_and_last_steps(n, group, first_m, next_m, num_m, is_late)
        first_until, last_from = map(number, ends)
        for step in range(group * (num_m - first_m)):
            m = number(order.step_at(step, group, first_m, num_m, is_late)[1])
            blocks = [other for other in range(num_n) if first_ms[other] <= m]
            blocks.sort(key=lambda other: number(order.turn_of(other, num_n, is_late)))
            assert (step < first_until, step >= last_from) == (blocks[0] == n, blocks[-1] == n)


@pytest.mark.parametrize("D", [64, 128])
def test_every_element_of_a_tile_has_a_place(D):
    places = {place_in_tile(i, d) for i in range(8192 // D) for d in range(D)}
    assert places == set(range(8192))
