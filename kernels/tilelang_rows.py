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
    """What a block holds at once: BLOCK_N rows, and of each of them BLOCK_M columns, WIDTH in each
    of LANES neighbouring threads."""

    BLOCK_N: int
    LANES: int
    WIDTH: int

    @property
    def BLOCK_M(self) -> int:
        return self.LANES * self.WIDTH

    @property
    def threads(self) -> int:
        return self.BLOCK_N * self.LANES


# BLOCK_N, LANES and bytes that a thread reads at once, by the most bytes a row that they serve. For
# short rows half a warp and 16 bytes each, so that few lanes idle; else 64 bytes, so that an SM has
# tens of KiB in flight. The longer the row, the more lanes share it: what the first scans of all
# rows in flight read must still be in L2 (50 MB on an H200) when the second scans come.
TILES = (
    (512, 16, 16, 16),
    (4 * 2**10, 4, 32, 64),
    (32 * 2**10, 1, 128, 64),
    (128 * 2**10, 1, 512, 64),
)
LONGEST_ROWS_TILE = (1, 1024, 64)
CPU_TILE = Tile(BLOCK_N=4, LANES=8, WIDTH=32)


def choose_tile(views: list[torch.Tensor], n_read: int) -> Tile:
    """The tile for a kernel that reads the first `n_read` of the views side by side."""
    if views[0].device.type == "cpu":
        return CPU_TILE
    column_bytes = n_read * views[0].element_size()
    row_bytes = views[0].shape[-1] * column_bytes
    block_n, lanes, held = next(
        (tile for longest, *tile in TILES if row_bytes <= longest), LONGEST_ROWS_TILE
    )
    return Tile(block_n, lanes, max(held // column_bytes, VECTOR_BYTES // views[0].element_size()))


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


def columns_seen(n_rows: int, n_cols: int, is_causal: bool) -> int:
    """Columns that a matrix's first row sees. Each next row sees one more, up to n_cols: the rule
    that query i sees key j when j <= i + n_cols - n_rows."""
    return 1 + n_cols - n_rows if is_causal else n_cols


class Rows:
    """The words in which a builder speaks of rows: a kernel's tensors, a block's place among them,
    and loads and stores that never leave them.

    vector: as `vector_width` says; a load or store moves whole vectors.
    seen: a parameter of the kernel, as `columns_seen` says: one kernel serves causal rows and
        others.
    """

    def __init__(self, lang: Language, *, tile: Tile, vector: int) -> None:
        import tilelang.language as T

        self.lang, self.tile, self.vector = lang, tile, vector
        self.seen: Any = T.dynamic("seen", "int64")
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
        block, row_blocks, n_1 = (
            T.cast(count, "int32") for count in (block, self.row_blocks, self.n_1)
        )
        matrix = T.truncdiv(block, row_blocks)
        first_row = T.cast(T.truncmod(block, row_blocks), "int64") * self.tile.BLOCK_N
        # Variables, or the divisions would be written out wherever the place is used.
        i_0, i_1, first_row = (
            T.alloc_var("int64", init=T.cast(value, "int64"))[0]
            for value in (T.truncdiv(matrix, n_1), T.truncmod(matrix, n_1), first_row)
        )
        return i_0, i_1, first_row

    def visible(self, row: Any, first_col: Any) -> Any:
        """How many columns of the tile that starts at `first_col` take part in a row (int32)."""
        import tilelang.language as T

        columns = T.min(self.seen + row, self.n_cols) - first_col
        return T.cast(T.max(T.min(columns, self.tile.BLOCK_M), 0), "int32")

    def tiles_seen(self, place: tuple[Any, Any, Any]) -> Any:
        """Tiles of which any row of the block sees something: its last row sees most."""
        import tilelang.language as T

        first_row = place[2]
        last_row = T.min(first_row + self.tile.BLOCK_N, self.n_rows) - 1
        columns = T.max(T.min(self.seen + last_row, self.n_cols), 0)
        return T.ceildiv(columns, self.tile.BLOCK_M)

    def set_options(self) -> Any:
        """Compiler options: a statement of its own, the first in a kernel."""
        import tilelang.language as T

        # Every load and store stands under a condition of its own.
        T.annotate_pass_configs({"tl.disable_safe_memory_legalize": True})
        if self.lang.on_cpu:
            return None
        # exp2 is then one instruction; probabilities below 2^-126 become 0.
        T.annotate_compile_flags(["-ftz=true"])
        # 1024 threads on an SM, each with at most 64 registers: enough loads in flight.
        return T.annotate_min_blocks_per_sm(1024 // self.tile.threads)

    def lay_out(self, *tiles: Any) -> None:
        """Puts [BLOCK_N, LANES, WIDTH] tiles into registers: a thread has the WIDTH columns of a
        lane."""
        import tilelang.language as T

        if not self.lang.on_cpu:
            _, lanes, _ = shape = tuple(self.tile)
            layout = T.Fragment(shape, forward_fn=lambda i, j, k: (i * lanes + j, k))
            T.annotate_layout(dict.fromkeys(tiles, layout))

    def column(self, lane: Any, k: Any) -> Any:
        """Where in the tile a lane's column k stands: lanes take a vector each, in turn, so that
        neighbours load what is adjacent."""
        vector = max(self.vector, 1)
        return (k // vector * self.tile.LANES + lane) * vector + k % vector

    def _load_and_store(self) -> tuple[Any, Any]:
        import tilelang.language as T

        lang, n_rows, n_cols = self.lang, self.n_rows, self.n_cols
        seen, visible, column = self.seen, self.visible, self.column
        BLOCK_N, LANES, WIDTH = self.tile
        BLOCK_M, vector = self.tile.BLOCK_M, max(self.vector, 1)
        at_once = T.serial if lang.on_cpu else T.vectorized

        @T.macro
        def load(x, place, first_col, raw, values, hidden):
            """values [BLOCK_N, LANES, WIDTH] = x's tile in float32, `hidden` in place of what is
            not visible. No vector is read of which nothing is."""
            i_0, i_1, first_row = place
            for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                raw[i, j, k] = T.cast(hidden, raw.dtype)
            for i, j, k in lang.each(BLOCK_N, LANES, WIDTH // vector):
                row, col = first_row + i, column(j, k * vector)
                # A statement: TileLang 0.1.15 reads the arms of T.if_then_else unconditionally
                # once they are vectors.
                if (row < n_rows) & (col < visible(row, first_col)):
                    for v in at_once(vector):
                        raw[i, j, k * vector + v] = x[i_0, i_1, row, first_col + col + v]
            for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                values[i, j, k] = T.cast(raw[i, j, k], "float32")
            # A causal row may end inside a vector. Others do not, and take no time here.
            if vector > 1 and seen + first_row < T.min(first_col + BLOCK_M, n_cols):
                for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                    if column(j, k) >= visible(first_row + i, first_col):
                        values[i, j, k] = hidden

        @T.macro
        def store(values, raw, y, place, first_col):
            """y's tile = values [BLOCK_N, LANES, WIDTH], rounded to y's dtype."""
            i_0, i_1, first_row = place
            for i, j, k in lang.each(BLOCK_N, LANES, WIDTH):
                raw[i, j, k] = T.cast(values[i, j, k], raw.dtype)
            for i, j, k in lang.each(BLOCK_N, LANES, WIDTH // vector):
                row, col = first_row + i, first_col + column(j, k * vector)
                if (row < n_rows) & (col < n_cols):
                    for v in at_once(vector):
                        y[i_0, i_1, row, col + v] = raw[i, j, k * vector + v]

        return load, store
