"""Windows of tokens in batches: a seeded stream to train on, whose place can be stored.

A window is seq_len + 1 tokens: the inputs, and the targets one later. Windows start seq_len apart,
so the last target of one is the first input of the next, and every token but the first is a target
once an epoch.
"""

import mmap
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

# The stream's fingerprint of its data reads so many samples of so many tokens, evenly spread: two
# texts that differ somewhere in between are told apart by their length, or not at all.
FINGERPRINT_SAMPLES = 64
FINGERPRINT_SAMPLE_TOKENS = 1024

STATE_KEYS = ("epoch", "position", "seed", "seq_len", "fingerprint")


class BatchStream:
    """An endless, seeded stream of (inputs, targets), [batch_size, seq_len] int64 each.

    Every epoch covers every window once, in an order of its own; a batch that the epoch's end does
    not fill is filled from the next. Where the windows start is shifted a little each epoch, by
    what is left over at the end, so that the last tokens have their turn.

    The stream is a sequence of windows that depends on the tokens, seq_len and seed alone. With
    `world_size` ranks, rank r takes the r-th run of batch_size windows out of every
    world_size * batch_size. So a state says how many windows were consumed by all, and may be
    loaded with another batch size or number of ranks.

    A thread reads the next `read_ahead` batches while the caller computes on the last. For a CUDA
    device they lie in pinned memory and are copied on the caller's current stream without waiting.

    Args:
        tokens: 1-D integers, a memory map or an array; at least seq_len + 1 of them.
        seed: of the order; any int.
        device: where the batches go.
        read_ahead: batches to keep ready: as many as the caller takes at once.

    Raises ValueError for sizes that are not positive and for fewer tokens than a window.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        batch_size: int,
        seq_len: int,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        read_ahead: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_sizes(tokens, batch_size, seq_len)
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}"
            )
        self._tokens = tokens
        self._batch_size, self._seq_len = batch_size, seq_len
        self._device = torch.device(device)
        self._rank, self._world_size = rank, world_size
        self._n_windows = (len(tokens) - 1) // seq_len
        self._fingerprint = _fingerprint(tokens)
        self._seed = seed
        self._epoch = 0
        self._position = 0  # windows of this epoch that all ranks together have consumed
        self._order: tuple[int, int, np.ndarray] | None = None  # seed, epoch, starts: the worker's
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="minitx-batches")
        self._read_ahead = max(1, read_ahead)
        self._ahead: deque[Future[torch.Tensor]] = deque()

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next batch: inputs and targets, both contiguous."""
        self._fill()
        batch = self._ahead.popleft().result()
        consumed = self._position + self._batch_size * self._world_size
        self._epoch += consumed // self._n_windows
        self._position = consumed % self._n_windows
        self._fill()
        inputs, targets = batch.to(self._device, non_blocking=True).unbind(0)
        return inputs, targets

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, for JSON: what was read ahead does not count."""
        values = (self._epoch, self._position, self._seed, self._seq_len, self._fingerprint)
        return dict(zip(STATE_KEYS, values, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`'s place, with its seed. Raises ValueError for a state of other
        data or another seq_len."""
        missing = [key for key in STATE_KEYS if key not in state]
        if missing:
            raise ValueError(f"the data position lacks {', '.join(missing)}")
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                "the data are not those the saved position belongs to: use the same text, "
                "tokenizer and val_fraction, or start a new run"
            )
        if state["seq_len"] != self._seq_len:
            raise ValueError(
                f"the saved data position is for a context of {state['seq_len']}, "
                f"got {self._seq_len}: keep it, or start a new run"
            )
        self._seed = state["seed"]
        self._epoch, self._position = state["epoch"], state["position"]
        self._ahead.clear()

    def _fill(self) -> None:
        """Has the worker read what is still missing from the batches ahead."""
        while len(self._ahead) < self._read_ahead:
            windows = len(self._ahead) * self._batch_size * self._world_size
            position = self._position + windows  # `_read` carries what lies beyond the epoch over
            self._ahead.append(self._worker.submit(self._read, self._seed, self._epoch, position))

    def _read(self, seed: int, epoch: int, position: int) -> torch.Tensor:
        """inputs and targets [2, batch_size, seq_len]; runs in the worker thread."""
        batch = torch.empty(
            (2, self._batch_size, self._seq_len),
            dtype=torch.int64,
            pin_memory=self._device.type == "cuda",
        )
        rows = batch.numpy()
        first = position + self._rank * self._batch_size
        for row in range(self._batch_size):
            epochs, index = divmod(first + row, self._n_windows)
            start = self._starts(seed, epoch + epochs)[index]
            window = self._tokens[start : start + self._seq_len + 1]
            rows[0, row], rows[1, row] = window[:-1], window[1:]
        release_pages(self._tokens)
        return batch

    def _starts(self, seed: int, epoch: int) -> np.ndarray:
        """First token of each window of an epoch, in its order, int64 [n_windows]."""
        if self._order is None or self._order[:2] != (seed, epoch):
            left_over = len(self._tokens) - 1 - self._n_windows * self._seq_len
            shift, order = epoch_order(seed, epoch, self._n_windows, left_over)
            self._order = (seed, epoch, shift + order * self._seq_len)
        return self._order[2]


def epoch_order(seed: int, epoch: int, n: int, max_shift: int) -> tuple[int, np.ndarray]:
    """A shift in [0, max_shift] and a permutation of range(n), int64, from the seed and the epoch.

    Windows are sorted by a hash of their index (the finaliser of SplitMix64: Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014), not shuffled by a library: the order
    of a run that is resumed in a year, under other versions, has to be the same.
    """
    digest = blake2b(f"{seed} {epoch}".encode(), digest_size=16).digest()
    key, shift = (np.frombuffer(digest, dtype="<u8")[i : i + 1] for i in (0, 1))
    x = (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    # The hash is a bijection: no two keys are equal, so the order is that of any sorting method.
    return int(shift[0]) % (max_shift + 1), np.argsort(x)


def release_pages(tokens: np.ndarray) -> None:
    """Takes the pages of a read-only memory map out of this process's resident memory.

    Without it every page that was ever read counts: a long run ends with the whole file. The
    system keeps them cached, so reading them again is cheap. Does nothing for other arrays.
    """
    base = tokens
    while isinstance(base, np.ndarray):
        base = base.base
    if (
        isinstance(base, mmap.mmap)
        and not tokens.flags.writeable
        and hasattr(mmap, "MADV_DONTNEED")
    ):
        base.madvise(mmap.MADV_DONTNEED)


def check_sizes(tokens: np.ndarray, batch_size: int, seq_len: int) -> None:
    """Raises what BatchStream raises, before there is one."""
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"tokens must be 1-D integers, got shape {tokens.shape} and dtype {tokens.dtype}"
        )
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"need at least {seq_len + 1} tokens for a context of {seq_len}, got {len(tokens)}: "
            "give more text, or a shorter context"
        )


def _fingerprint(tokens: np.ndarray) -> str:
    """Digest of the number of tokens and of samples of them, whatever their dtype."""
    digest = blake2b(len(tokens).to_bytes(8, "little"), digest_size=16)
    last = max(0, len(tokens) - FINGERPRINT_SAMPLE_TOKENS)
    for start in np.linspace(0, last, FINGERPRINT_SAMPLES, dtype=np.int64).tolist():
        sample = tokens[start : start + FINGERPRINT_SAMPLE_TOKENS]
        digest.update(sample.astype("<i8").tobytes())
    release_pages(tokens)
    return digest.hexdigest()
