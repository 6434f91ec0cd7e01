"""The training stream: what it covers, in which order, and that it can be resumed to the window."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from minitx.batches import BatchStream, epoch_order, release_pages

S = 4
TEN_WINDOWS = np.arange(10 * S + 1, dtype=np.uint16)  # a token is its own place


def starts(stream: BatchStream, batches: int) -> list[int]:
    """First token of each window of the next batches."""
    return [int(i) for _ in range(batches) for i in stream.next()[0][:, 0]]


def test_a_batch_is_windows_and_targets_one_later():
    stream = BatchStream(TEN_WINDOWS, 3, S, seed=0)
    for _ in range(7):
        inputs, targets = stream.next()
        for tensor in (inputs, targets):
            assert tensor.shape == (3, S)
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(S))
        assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10, 25])  # 3 and 25: batches across epochs
def test_every_epoch_covers_every_window_once_in_its_own_order(batch_size):
    stream = BatchStream(TEN_WINDOWS, batch_size, S, seed=5)
    order = starts(stream, 100)
    epochs = [tuple(order[i : i + 10]) for i in range(0, len(order) - 9, 10)]
    for epoch in epochs:
        assert sorted(epoch) == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert len(set(epochs)) == len(epochs)


def test_the_order_does_not_depend_on_the_batch_size():
    one, three = (BatchStream(TEN_WINDOWS, size, S, seed=5) for size in (1, 3))
    assert starts(one, 60) == starts(three, 20)


def test_the_last_tokens_have_their_turn():
    # 3 tokens are left over: windows start at 0, 1, 2 or 3, the same for all of one epoch.
    tokens = np.arange(10 * S + 1 + 3)
    stream = BatchStream(tokens, 10, S, seed=0)
    shifts = []
    for _ in range(40):
        batch = sorted(starts(stream, 1))
        shifts.append(batch[0])
        assert batch == [batch[0] + i * S for i in range(10)]
    assert set(shifts) == {0, 1, 2, 3}


def test_seeds_give_orders_of_their_own():
    orders = {tuple(starts(BatchStream(TEN_WINDOWS, 10, S, seed=seed), 1)) for seed in range(-3, 9)}
    assert len(orders) == 12


@pytest.mark.parametrize("stop", [1, 4, 5, 7, 12])  # in epoch 0, at its end, in epochs 1 and 2
def test_resuming_goes_on_where_the_stream_stopped(stop):
    unbroken = starts(BatchStream(TEN_WINDOWS, 2, S, seed=3), 30)
    stream = BatchStream(TEN_WINDOWS, 2, S, seed=3)
    before = starts(stream, stop)
    state = json.loads(json.dumps(stream.state_dict()))
    assert (state["epoch"], state["position"]) == divmod(2 * stop, 10)
    resumed = BatchStream(TEN_WINDOWS, 2, S, seed=99)  # the state's seed counts
    starts(resumed, 3)  # and so does nothing that was read before, or ahead
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert before + starts(resumed, 30 - stop) == unbroken


@pytest.mark.parametrize("read_ahead", [2, 7])  # 7 batches of 2 windows: into the epoch after next
def test_reading_further_ahead_changes_neither_the_order_nor_the_state(read_ahead):
    unbroken = starts(BatchStream(TEN_WINDOWS, 2, S, seed=3), 30)
    stream = BatchStream(TEN_WINDOWS, 2, S, seed=3, read_ahead=read_ahead)
    before = starts(stream, 4)
    state = stream.state_dict()
    assert (state["epoch"], state["position"]) == (0, 8)
    assert before + starts(stream, 26) == unbroken
    stream.load_state_dict(state)
    assert before + starts(stream, 26) == unbroken


def test_a_fresh_streams_state_is_its_beginning():
    stream = BatchStream(TEN_WINDOWS, 2, S, seed=3)
    state = stream.state_dict()
    first = starts(stream, 9)
    stream.load_state_dict(state)
    assert starts(stream, 9) == first


def test_resuming_with_another_batch_size_or_more_ranks():
    unbroken = starts(BatchStream(TEN_WINDOWS, 1, S, seed=3), 60)
    stream = BatchStream(TEN_WINDOWS, 2, S, seed=3)
    starts(stream, 6)
    ranks = [BatchStream(TEN_WINDOWS, 3, S, seed=3, rank=r, world_size=2) for r in range(2)]
    for rank in ranks:
        rank.load_state_dict(stream.state_dict())
    rest = [i for _ in range(8) for rank in ranks for i in starts(rank, 1)]
    assert rest == unbroken[12:]


def test_ranks_share_the_windows():
    whole = starts(BatchStream(TEN_WINDOWS, 6, S, seed=1), 10)
    ranks = [BatchStream(TEN_WINDOWS, 2, S, seed=1, rank=r, world_size=3) for r in range(3)]
    shared = [i for _ in range(10) for rank in ranks for i in starts(rank, 1)]
    assert shared == whole
    assert len({json.dumps(rank.state_dict()) for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("tokens", "seq_len", "message"),
    [
        (TEN_WINDOWS[::-1].copy(), S, "the data are not those the saved position belongs to"),
        (TEN_WINDOWS[:-1], S, "the data are not those the saved position belongs to"),
        (TEN_WINDOWS, 5, "is for a context of 4, got 5"),
    ],
    ids=["other tokens", "fewer tokens", "other context"],
)
def test_a_state_of_other_data_is_refused(tokens, seq_len, message):
    state = BatchStream(TEN_WINDOWS, 2, S, seed=3).state_dict()
    with pytest.raises(ValueError, match=message):
        BatchStream(tokens, 2, seq_len, seed=3).load_state_dict(state)


def test_an_incomplete_state_is_refused():
    stream = BatchStream(TEN_WINDOWS, 2, S, seed=3)
    with pytest.raises(ValueError, match=r"^the data position lacks seed, fingerprint$"):
        stream.load_state_dict({"epoch": 0, "position": 0, "seq_len": S})


def test_the_state_does_not_depend_on_the_dtype():
    states = [BatchStream(TEN_WINDOWS.astype(t), 2, S, seed=3).state_dict() for t in ("u2", "u4")]
    assert states[0] == states[1]


def test_the_order_is_the_documented_hash():
    # SplitMix64 in whole numbers; a library's shuffle may change with its version, this may not.
    from hashlib import blake2b

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    digest = blake2b(b"7 2", digest_size=16).digest()
    key = int.from_bytes(digest[:8], "little")
    expected = sorted(range(50), key=lambda i: mixed((key + (i + 1) * 0x9E3779B97F4A7C15) % 2**64))
    shift, order = epoch_order(7, 2, 50, 9)
    assert order.tolist() == expected
    assert shift == int.from_bytes(digest[8:], "little") % 10


def test_orders_are_evenly_spread():
    # Over 2000 epochs each of 10 windows comes first about 200 times: +-5 standard deviations.
    firsts = [epoch_order(0, epoch, 10, 0)[1][0] for epoch in range(2000)]
    assert np.abs(np.bincount(firsts, minlength=10) - 200).max() < 5 * (2000 * 0.1 * 0.9) ** 0.5


def test_exactly_one_window_is_enough():
    stream = BatchStream(np.arange(S + 1), 8, S, seed=0)
    for _ in range(3):
        inputs, targets = stream.next()
        assert inputs.tolist() == [[0, 1, 2, 3]] * 8
        assert targets.tolist() == [[1, 2, 3, 4]] * 8


@pytest.mark.parametrize("count", [0, 1, S])
def test_less_than_a_window_is_one_clear_line(count):
    message = rf"^need at least 5 tokens for a context of 4, got {count}: give more text, or a"
    with pytest.raises(ValueError, match=message):
        BatchStream(np.arange(count), 2, S, seed=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seq_len": 0}, "seq_len must be at least 1, got 0"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"rank": -1}, "rank must be from 0 to world_size - 1 = 0, got -1"),
        ({"tokens": np.zeros(99)}, "tokens must be 1-D integers"),
        ({"tokens": np.zeros((9, 9), dtype=int)}, "tokens must be 1-D integers"),
    ],
)
def test_bad_arguments(arguments, message):
    good = {"tokens": TEN_WINDOWS, "batch_size": 2, "seq_len": S, "seed": 0}
    with pytest.raises(ValueError, match=message):
        BatchStream(**(good | arguments))


# -- memory and devices ---------------------------------------------------------------------------


def mapped_resident_mib() -> float:
    """MiB of mapped files that count as this process's memory."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        if line.startswith("RssFile:"):
            return int(line.split()[1]) / 1024
    pytest.skip("this system does not say how much of a mapped file is resident")


def test_reading_a_whole_file_keeps_little_of_it_resident(tmp_path):
    path, seq_len = tmp_path / "tokens.bin", 65_535
    with open(path, "wb") as file:
        file.truncate(128 << 20)
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    before = mapped_resident_mib()
    stream = BatchStream(tokens, 64, seq_len, seed=0)
    for _ in range(len(tokens) // seq_len // 64 + 1):
        stream.next()
    assert mapped_resident_mib() - before < 40  # of 128: a few batches' pages


def test_released_pages_read_the_same_and_other_arrays_are_left_alone(tmp_path):
    np.arange(100_000, dtype=np.uint32).tofile(tmp_path / "x")
    tokens = np.memmap(tmp_path / "x", dtype=np.uint32, mode="r")
    view = tokens[5000:]
    total = int(view.sum())
    release_pages(view)
    assert int(view.sum()) == total
    # A private map holds its writer's changes in those pages: dropping them would undo them.
    private = np.memmap(tmp_path / "x", dtype=np.uint32, mode="c")
    private[0] = 7
    release_pages(private)
    assert private[0] == 7
    release_pages(np.arange(3))


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_cpu():
    tokens = np.random.default_rng(0).integers(0, 60_000, 100_000).astype(np.uint16)
    cpu = BatchStream(tokens, 16, 257, seed=2)
    gpu = BatchStream(tokens, 16, 257, seed=2, device="cuda")
    for _ in range(60):
        for a, b in zip(cpu.next(), gpu.next(), strict=True):
            assert b.is_cuda
            assert b.is_contiguous()
            assert torch.equal(a, b.cpu())
