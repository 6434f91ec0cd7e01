"""What the Triton forward on Hopper does to a tile of scores where wgmma left it, in registers.

Per query the scores become probabilities relative to a maximum m,

    p = 2^(c s - c m)

with c = scale log2(e). Any m gives the same output: it divides the sum of p v by the sum of p. So m
may lag behind the maximum of the scores so far, as long as nothing becomes too large: it stays
while no score exceeds it by more than GROWTH, in powers of two, and then p stays within 2^GROWTH.
Where one does, its query takes the maximum of its scores so far, and what was summed up relative to
the old one is multiplied by 2^(c m - c m'). Few tiles do after a query's first; in the others the
threads of a row have nothing to tell each other, and nothing is rescaled. The warp decides that for
its queries together, but each takes a new maximum for scores of its own alone: its bits do not hang
on which queries are its neighbours.

Triton's branches are for all warps of a program, so those of a warp are written in PTX. Of every 8
columns of wgmma's results in a row a thread has two neighbours, so a tile [64, N] is looked at as
[64, N / 8, 4, 2], and what a thread knows of its rows is [64, 4]: two numbers, rows 8 apart.
"""

# A type checker takes gl.constexpr at its word; Triton takes plain Python values for it.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from minitx.kernels.triton_hopper_tiles import ROWS, product_layout

# Of a row's threads the largest score, and where it exceeds the limit, a new maximum and limit, and
# what sums are multiplied by. (0f41000000 is GROWTH, 8: 2^8 is well within float16. 0f47800000 is
# 2^16: scaled scores above it are rounded by 2^-8 and more, so no maximum lags there. 0f4C800000 is
# 2^26, for which see `exponentials`; 0f7F7FFFFF the largest float32, which an infinite score
# exceeds.)
TAKE_MAXIMUM = """
    shfl.sync.bfly.b32 x, {own}, 1, 0x1f, 0xffffffff;
    max.f32 top, x, {own};
    shfl.sync.bfly.b32 x, top, 2, 0x1f, 0xffffffff;
    max.f32 top, top, x;
    setp.gt.f32 grew, top, {old_limit};
    @grew mov.f32 {maximum}, top;
    mul.f32 x, top, {scale};
    abs.f32 x, x;
    setp.ge.f32 is_far, x, 0f4C800000;
    selp.f32 factor, {huge_scale}, {scale}, is_far;
    setp.lt.f32 is_near, x, 0f47800000;
    rcp.approx.ftz.f32 x, {scale};
    fma.rn.f32 x, x, 0f41000000, top;
    min.f32 x, x, 0f7F7FFFFF;
    @grew selp.f32 {limit}, x, top, is_near;
    sub.f32 x, {old_maximum}, top;
    mul.f32 x, x, factor;
    @grew ex2.approx.ftz.f32 {rescale}, x;
"""
RESULTS = ("maximum", "limit", "rescale")
OPERANDS = ("own", "old_maximum", "old_limit", "scale", "huge_scale")
LN2 = gl.constexpr(0.6931471805599453)
PART = 32  # registers that one piece of PTX multiplies


def _two_rows() -> list[dict[str, str]]:
    """Operands by name, of either row."""
    names = (*RESULTS, *OPERANDS)
    return [{name: f"${2 * i + row}" for i, name in enumerate(names)} for row in (0, 1)]


def _maximum_code() -> str:
    rows = _two_rows()
    keep = """
        mov.f32 {maximum}, {old_maximum};
        mov.f32 {limit}, {old_limit};
        mov.f32 {rescale}, 0f3F800000;
        setp.gt.or.f32 grew, {own}, {old_limit}, grew;
    """
    return (
        "{ .reg .pred grew, any, is_far, is_near; .reg .f32 x, top, factor; setp.ne.u32 grew, 0, 0;"
        + "".join(keep.format(**row) for row in rows)
        + "vote.sync.any.pred any, grew, 0xffffffff; @!any bra DONE;"
        + "".join(TAKE_MAXIMUM.format(**row) for row in rows)
        + "DONE: }"
    )


def _rescale_code() -> str:
    # Two registers of a row, then two of the other, which all have the row's factor.
    lines = [f"mov.f32 ${i}, ${PART + i};" for i in range(PART)]
    lines += [f"setp.neu.f32 grew, ${2 * PART}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 grew, ${2 * PART + 2}, 0f3F800000, grew;"]
    lines += ["vote.sync.any.pred any, grew, 0xffffffff; @!any bra DONE;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * PART + i};" for i in range(PART)]
    return "{ .reg .pred grew, any; " + " ".join(lines) + " DONE: }"


MAXIMUM_CODE = gl.constexpr(_maximum_code())
MAXIMUM_REGISTERS = gl.constexpr(",".join(["=&f"] * 6 + ["f"] * 10))
RESCALE_CODE = gl.constexpr(_rescale_code())
RESCALE_REGISTERS = gl.constexpr(",".join(["=&f"] * PART + ["f"] * 2 * PART))


@gluon.jit
def _by_thread(x):
    """x [64, N] as [64, N / 8, 4, 2]."""
    return x.reshape([ROWS, x.shape[1] // 8, 4, 2])


@gluon.jit
def _beside(x, parts):
    """x [64, 4] as [64, 1, 4, 1], to go with parts [64, N / 8, 4, 2]."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    return gl.convert_layout(x, LAYOUT).expand_dims(1).expand_dims(3)


@gluon.jit
def own_sums(p):
    """Sums of p's rows [64, N] over each thread's own columns, [64, 4]: over threads they are
    summed up once, in the end."""
    return gl.sum(gl.sum(_by_thread(p), 1), 2)


@gluon.jit
def no_scores(scores):
    """(maximum, limit) of queries that have seen nothing, for scores like these."""
    LAYOUT: gl.constexpr = own_sums(scores).type.layout
    lowest = gl.full([ROWS, 4], float("-inf"), gl.float32, LAYOUT)
    return lowest, lowest


@gluon.jit
def take_maximum(scores, known, qk_scale, huge_scale):
    """(maximum, limit) after these scores, given those before; and by what was summed up so far is
    to be multiplied."""
    maximum, limit = known
    LAYOUT: gl.constexpr = maximum.type.layout
    # gl.max passes over NaN, but p is NaN where a score is, and then so are the sums.
    own = gl.max(
        gl.max(scores.reshape([ROWS, scores.shape[1] // 8, 8]), 1).reshape([ROWS, 4, 2]), 2
    )
    own = gl.convert_layout(own, LAYOUT)
    one = gl.full([ROWS, 4], 1.0, gl.float32, LAYOUT)
    maximum, limit, rescale = gl.inline_asm_elementwise(
        MAXIMUM_CODE,
        MAXIMUM_REGISTERS,
        [own, maximum, limit, one * qk_scale, one * huge_scale],
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=2,
    )
    return (maximum, limit), rescale


@gluon.jit
def exponentials(scores, known, qk_scale, huge_scale):
    """p of some columns of the scores."""
    maximum, _limit = known
    # As in triton_attention.py: a product by a power of two rounds nothing where logits are huge
    # (from 2^26).
    factor = gl.where(gl.abs(maximum * qk_scale) >= 2.0**26, huge_scale, qk_scale)
    # With nothing seen yet, -inf - -inf would be NaN.
    shift = gl.where(maximum == float("-inf"), 0.0, maximum * factor)
    parts = _by_thread(scores)
    p = gl.exp2(parts * _beside(factor, parts) - _beside(shift, parts))
    return gl.convert_layout(p.reshape(scores.shape), scores.type.layout)


@gluon.jit
def log_of(x):
    """ln x, to about 2^-22, by one instruction and a product: the compiler's takes twenty."""
    code: gl.constexpr = "lg2.approx.f32 $0, $1;"
    powers = gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    return powers * LN2


@gluon.jit
def one_over(x):
    """1 / x, to the last bit or the one before, by one instruction."""
    code: gl.constexpr = "rcp.approx.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def rescaled(acc, rescale, HEAD_DIM: gl.constexpr):
    """acc [64, HEAD_DIM] times rescale [64, 4], where a query of the warp has another than 1."""
    parts = _by_thread(acc)
    one = gl.full([ROWS, HEAD_DIM // 8, 4, 2], 1.0, gl.float32, parts.type.layout)
    parts = gl.inline_asm_elementwise(
        RESCALE_CODE,
        RESCALE_REGISTERS,
        [parts, one * _beside(rescale, parts)],
        dtype=gl.float32,
        is_pure=False,
        pack=32,
    )
    return gl.convert_layout(parts.reshape([ROWS, HEAD_DIM]), product_layout(HEAD_DIM))
