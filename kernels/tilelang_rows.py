"""What the TileLang row-softmax kernels share: where rows lie, and how a block loads and stores
them.

Tensors reach a kernel as [n_0, n_1, n_rows, n_cols] views of any strides (`as_matrices`). A block
has BLOCK_N neighbouring rows of one matrix, and sees BLOCK_M columns of them at a time.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from minitx.kernels.tilelang_runtime import Language

NEG_INF = float("-inf")
VECTOR_BYTES = 16  # the widest load or store of a thread


class Tile(NamedTuple):
    """Rows and columns that a block holds at once, and the threads that hold them; each row
    belongs to threads // BLOCK_N neighbouring ones."""

    BLOCK_N: int
    BLOCK_M: int
    threads: int


# By the widest row that they serve. Up to 2048 columns a row belongs to one warp, which waits for
# no other. Past 16384, blocks are so large that few rows are in flight at once: what the first scan
# of them read must still be in L2 (50 MB on an H200) when the second comes.
TILES = (
    (256, Tile(BLOCK_N=8, BLOCK_M=256, threads=256)),
    (2048, Tile(BLOCK_N=4, BLOCK_M=1024, threads=128)),
    (16384, Tile(BLOCK_N=1, BLOCK_M=4096, threads=256)),
)
WIDEST_TILE = Tile(BLOCK_N=1, BLOCK_M=16384, threads=1024)
CPU_TILE = Tile(BLOCK_N=4, BLOCK_M=64, threads=1)


def choose_tile(device: torch.device, n_cols: int) -> Tile:
    if device.type == "cpu":
        return CPU_TILE
    return next((tile for widest, tile in TILES if n_cols <= widest), WIDEST_TILE)


def as_matrices(*tensors: torch.Tensor, is_causal: bool) -> Iterator[list[torch.Tensor]]:
    """Views [n_0, n_1, n_rows, n_cols] of non-empty tensors [..., n_cols] of one shape.

    Neighbouring leading dims become one where in every tensor the outer steps over exactly the
    inner; with `is_causal` the last of them, the queries, stays apart. Where more than three are
    left, one list of views comes for each index of the first.
    """
    n_cols = tensors[0].shape[-1]
    sizes, strides = _merge_leading_dims(tensors, keep_last=is_causal)
    if len(sizes) > 3:
        for index in range(sizes[0]):
            inner = (
                t.as_strided(
                    (*sizes[1:], n_cols),
                    (*(step[i] for step in strides[1:]), t.stride(-1)),
                    t.storage_offset() + index * strides[0][i],
                )
                for i, t in enumerate(tensors)
            )
            yield from as_matrices(*inner, is_causal=is_causal)
        return
    missing = 3 - len(sizes)
    shape = (*([1] * missing), *sizes, n_cols)
    yield [
        t.as_strided(
            shape,
            (
                *([0] * missing),
                *(step[i] for step in strides),
                1 if n_cols == 1 else t.stride(-1),
            ),
        )
        for i, t in enumerate(tensors)
    ]


def _merge_leading_dims(
    tensors: tuple[torch.Tensor, ...], keep_last: bool
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Sizes of the merged dims and, for each, its stride in every tensor."""
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []
    shape = tensors[0].shape[:-1]
    for dim, size in enumerate(shape):
        inner = tuple(t.stride(dim) for t in tensors)
        apart = keep_last and dim == len(shape) - 1
        if size == 1 and not apart:
            continue
        if sizes and not apart and strides[-1] == tuple(step * size for step in inner):
            sizes[-1] *= size
            strides[-1] = inner
        else:
            sizes.append(size)
            strides.append(inner if size > 1 else (0,) * len(tensors))
    return sizes, strides


def vector_width(views: list[torch.Tensor]) -> int:
    """Columns that a thread moves at once: as many as 16 bytes hold where every row of every view
    starts at a multiple of 16 bytes, 1 where columns are adjacent in memory, 0 where they are
    not."""
    if views[0].device.type == "cpu" or any(view.stride(-1) != 1 for view in views):
        return 0
    vector = VECTOR_BYTES // views[0].element_size()
    aligned = views[0].shape[-1] % vector == 0 and all(
        view.data_ptr() % VECTOR_BYTES == 0
        and all(step % vector == 0 for step in view.stride()[:-1])
        for view in views
    )
    return vector if aligned else 1


class Rows:
    """The words in which a builder speaks of rows: a kernel's tensors, a block's place among them,
    and loads and stores that never leave them.

    vector: as `vector_width` says; a load or store moves whole vectors.
    """

    def __init__(self, lang: Language, *, is_causal: bool, tile: Tile, vector: int) -> None:
        import tilelang.language as T

        self.lang, self.tile, self.vector, self.is_causal = lang, tile, vector, is_causal
        self.n_0: Any = T.dynamic("n_0", "int64")
        self.n_1: Any = T.dynamic("n_1", "int64")
        self.n_rows: Any = T.dynamic("n_rows", "int64")
        self.n_cols: Any = T.dynamic("n_cols", "int64")
        self.row_blocks = T.ceildiv(self.n_rows, tile.BLOCK_N)
        self.n_blocks = self.n_0 * self.n_1 * self.row_blocks
        self.n_tiles = T.ceildiv(self.n_cols, tile.BLOCK_M)
        self._strides: list[Any] = []
        self.load, self.store = self._load_and_store()

    def tensor(self, name: str, dtype: str) -> Any:
        """A tensor of this kernel: [n_0, n_1, n_rows, n_cols] of any strides."""
        import tilelang.language as T

        strides = [T.dynamic(f"{name}_stride_{dim}", "int64") for dim in range(3)]
        self._strides += strides
        step = 1 if self.vector else T.dynamic(f"{name}_step", "int64")
        sizes = (self.n_0, self.n_1, self.n_rows, self.n_cols)
        return T.StridedTensor(sizes, (*strides, step), dtype)

    def locate(self, block: Any) -> tuple[Any, Any, Any]:
        """The block's place: its matrix (i_0, i_1) and the first of its rows there.

        Also tells the compiler what `vector_width` found out: without it, no load is wide.
        """
        import tilelang.language as T

        if self.vector > 1:
            for multiple in (*self._strides, self.n_cols):
                T.evaluate(T.assume(multiple % self.vector == 0))  # type: ignore[attr-defined]
        # A grid has fewer than 2^31 blocks, so these fit into 32 bits, where division is cheap.
        row_blocks, n_1 = T.cast(self.row_blocks, "int32"), T.cast(self.n_1, "int32")
        matrix = T.truncdiv(block, row_blocks)
        return (
            T.alloc_var("int64", init=T.cast(T.truncdiv(matrix, n_1), "int64")),
            T.alloc_var("int64", init=T.cast(T.truncmod(matrix, n_1), "int64")),
            T.alloc_var(
                "int64", init=T.cast(T.truncmod(block, row_blocks), "int64") * self.tile.BLOCK_N
            ),
        )

    def visible(self, row: Any) -> Any:
        """How many columns of a row take part; below 1 where none does. Causal: query i sees key j
        when j <= i + n_cols - n_rows."""
        return row + 1 + self.n_cols - self.n_rows if self.is_causal else self.n_cols

    def tiles_seen(self, first_row: Any) -> Any:
        """Tiles that a row of the block sees: the last row sees most."""
        import tilelang.language as T

        if not self.is_causal:
            return self.n_tiles
        last_row = T.min(first_row + self.tile.BLOCK_N, self.n_rows) - 1
        return T.ceildiv(T.max(self.visible(last_row), 0), self.tile.BLOCK_M)

    def set_options(self) -> None:
        """Compiler options; call it first in a kernel."""
        import tilelang.language as T

        # Every load and store stands under a condition of its own.
        T.annotate_pass_configs({"tl.disable_safe_memory_legalize": True})
        if not self.lang.on_cpu:
            # exp2 is then one instruction; probabilities below 2^-126 become 0.
            T.annotate_compile_flags(["-ftz=true"])

    def lay_out(self, *tiles: Any) -> None:
        """Says which thread holds which column of [BLOCK_N, BLOCK_M] tiles: the threads of a row
        take a vector each, in turn, so that neighbours load what is adjacent."""
        import tilelang.language as T

        if self.lang.on_cpu:
            return
        vector, threads = max(self.vector, 1), self.tile.threads // self.tile.BLOCK_N
        layout = T.Fragment(
            (self.tile.BLOCK_N, self.tile.BLOCK_M),
            forward_fn=lambda i, j: (
                i * threads + j // vector % threads,
                j // (vector * threads) * vector + j % vector,
            ),
        )
        T.annotate_layout(dict.fromkeys(tiles, layout))

    def _load_and_store(self) -> tuple[Any, Any]:
        import tilelang.language as T

        lang, n_rows, n_cols, visible = self.lang, self.n_rows, self.n_cols, self.visible
        BLOCK_N, BLOCK_M = self.tile.BLOCK_N, self.tile.BLOCK_M
        vector, is_causal = max(self.vector, 1), self.is_causal

        @T.macro
        def load(x, place, first_col, raw, values, hidden):
            """values [BLOCK_N, BLOCK_M] = x's tile in float32, `hidden` in place of what is not
            visible. No vector is read of which nothing is."""
            i_0, i_1, first_row = place
            for i, j in lang.each(BLOCK_N, BLOCK_M):
                raw[i, j] = T.cast(hidden, raw.dtype)
            for i, j in lang.each(BLOCK_N, BLOCK_M // vector):
                row, col = first_row + i, first_col + j * vector
                # A statement: TileLang 0.1.15 reads the arms of T.if_then_else unconditionally
                # once they are vectors.
                if (row < n_rows) & (col < visible(row)):
                    for lane in T.vectorized(vector):
                        raw[i, j * vector + lane] = x[i_0, i_1, row, col + lane]
            for i, j in lang.each(BLOCK_N, BLOCK_M):
                values[i, j] = T.cast(raw[i, j], "float32")
            if is_causal and vector > 1:  # a causal row may end inside a vector
                for i, j in lang.each(BLOCK_N, BLOCK_M):
                    if first_col + j >= visible(first_row + i):
                        values[i, j] = hidden

        @T.macro
        def store(values, raw, y, place, first_col):
            """y's tile = values [BLOCK_N, BLOCK_M], rounded to y's dtype."""
            i_0, i_1, first_row = place
            for i, j in lang.each(BLOCK_N, BLOCK_M):
                raw[i, j] = T.cast(values[i, j], raw.dtype)
            for i, j in lang.each(BLOCK_N, BLOCK_M // vector):
                row, col = first_row + i, first_col + j * vector
                if (row < n_rows) & (col < n_cols):
                    for lane in T.vectorized(vector):
                        y[i_0, i_1, row, col + lane] = raw[i, j * vector + lane]

        return load, store
