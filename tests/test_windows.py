"""Which tokens a window reads, and which of its targets count."""

import numpy as np
import pytest

from minitx.windows import (
    Window,
    batches,
    check_stride,
    paired_contexts,
    paired_windows,
    strided_windows,
)


def test_every_token_but_the_first_counts_once_for_every_length_context_and_stride():
    for n in range(26):
        for L in range(1, 13):
            for s in range(1, L + 1):
                seen = np.zeros(n, dtype=int)
                for i, w in enumerate(strided_windows(n, L, s)):
                    assert w.begin == i * s
                    assert 1 <= w.read <= L
                    assert w.end < n
                    for target in range(w.first, w.end + 1):
                        seen[target] += 1
                        context = target - w.begin
                        assert min(target, L - s + 1) <= context <= L
                assert seen.tolist() == [0] * min(n, 1) + [1] * (n - 1), (n, L, s)


@pytest.mark.parametrize(
    ("n", "L", "s", "scored"),
    [
        pytest.param(20, 10, 5, 19, id="half a stride"),
        pytest.param(20, 10, 10, 19, id="stride L: the first target of a window counts too"),
        pytest.param(21, 10, 10, 20, id="a last window of few tokens"),
        pytest.param(11, 10, 10, 10, id="one window, exactly"),
        pytest.param(10, 10, 5, 9, id="text shorter than the context"),
        pytest.param(2, 10, 5, 1, id="one target"),
    ],
)
def test_known_counts(n, L, s, scored):
    assert sum(w.counted for w in strided_windows(n, L, s)) == scored


def test_strides_that_do_not_fit():
    with pytest.raises(ValueError, match="--stride must be at least 1, got 0"):
        check_stride(8, 0)
    with pytest.raises(ValueError, match="--stride 9 is beyond the context of 8 tokens"):
        check_stride(8, 9)
    with pytest.raises(ValueError, match="--context_lengths must be at least 1, got 0"):
        check_stride(0, 1)


def test_paired_contexts():
    assert paired_contexts(4096) == [256, 512, 1024, 2048, 4096]
    assert paired_contexts(5000) == [256, 512, 1024, 2048, 4096, 5000]
    assert paired_contexts(256) == [32, 64, 128, 256]
    assert paired_contexts(3) == [1, 3]


def test_paired_windows_show_the_same_targets_with_every_context():
    lengths = [100, 8, 64, 65]
    plan = paired_windows(lengths, [8, 16, 64], max_targets=40)
    assert {c: len(windows) for c, windows in plan.items()} == {8: 10, 16: 10, 64: 10}
    fewer = paired_windows(lengths, [8, 16, 64], max_targets=20)[64]
    assert [w.end for w in fewer] == [64, 72, 80, 88, 96]  # evenly over all places
    targets = set()
    for same in zip(*plan.values(), strict=True):
        assert len({(w.document, w.first, w.end) for w in same}) == 1
        for c, w in zip(plan, same, strict=True):
            assert w.read == c
            assert w.begin >= 0
            assert w.end < lengths[w.document]
            assert w.counted == 4  # half of the shortest context
        block = {(same[0].document, t) for t in range(same[0].first, same[0].end + 1)}
        assert not block & targets
        targets |= block
    assert {document for document, _ in targets} == {0, 3}
    assert not any(paired_windows([64], [8, 64], 100).values())


def test_batches_hold_a_number_of_windows_or_of_tokens():
    reads = [5000, 20000, 7000, 10, 9000, 10]
    windows = [Window(0, 0, read, 1) for read in reads]
    assert list(batches(windows, 4)) == [[1, 4, 2, 0], [3, 5]]
    # 16,384 tokens with what is padded: 9000 alone, 2 x 7000, then all that is left.
    assert list(batches(windows, None)) == [[1], [4], [2, 0], [3, 5]]
