"""Kernel `auto`: what it chooses, from what table, and how the table comes from a measurement."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitx.bench import __main__ as bench
from minitx.bench import _common as common
from minitx.bench.auto import choices, chunk_choices, of_kind
from minitx.kernels import auto_choice
from minitx.kernels.auto_choice import (
    CHUNK_TABLES,
    TABLES,
    Choice,
    ChunkChoice,
    ChunkTable,
    MeasuredTable,
    QueriesChoice,
    choose_kernel,
)

ROOT = Path(__file__).parent.parent
TABLE = MeasuredTable(
    "a.csv",
    {
        64: (
            Choice(0, "sdpa", "triton", "triton", "tilelang"),
            Choice(1000, "tilelang", "sdpa", "tilelang", "triton"),
        ),
        128: (Choice(0, "tilelang", "tilelang", "tilelang", "tilelang"),),
    },
)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that there is a table for."""
    monkeypatch.setitem(TABLES, ((9, 9), False), TABLE)
    monkeypatch.setattr(auto_choice, "_capability", lambda device: (9, 9))


def tensor(S=100, D=64, dtype=torch.bfloat16, requires_grad=False, device="cuda", heads=4):
    device = SimpleNamespace(type=device)
    return SimpleNamespace(
        shape=(2, heads, S, D), dtype=dtype, requires_grad=requires_grad, device=device
    )


def choose(q, k=None, v=None, is_causal=True, return_lse=False, unable=()):
    def problem(kernel):
        return "it is out" if kernel in unable else None

    return choose_kernel(q, k or q, v or q, is_causal, return_lse, problem)


@pytest.mark.parametrize(
    ("q", "return_lse", "expected"),
    [
        (tensor(), False, "sdpa"),
        (tensor(999), False, "sdpa"),
        (tensor(1000), False, "tilelang"),
        (tensor(100, requires_grad=True), False, "triton"),
        (tensor(5000, requires_grad=True), False, "sdpa"),
        (tensor(100), True, "triton"),
        (tensor(5000), True, "tilelang"),
        (tensor(100, requires_grad=True), True, "tilelang"),
        (tensor(100, D=20), False, "sdpa"),  # goes with the next larger head dim
        (tensor(100, D=65), False, "tilelang"),
        (tensor(100, dtype=torch.float16), False, "sdpa"),
    ],
)
def test_the_fastest_of_the_table(gpu, q, return_lse, expected):
    assert choose(q, return_lse=return_lse) == (expected, "fastest in a.csv")


def test_grouped_heads_have_a_table_of_their_own_if_any(gpu, monkeypatch):
    q, k = tensor(), tensor(heads=2)
    assert choose(q, k) == ("sdpa", "fastest in a.csv")
    table = MeasuredTable("b.csv", {64: (Choice(0, *["triton"] * 4),)})
    monkeypatch.setitem(TABLES, ((9, 9), True), table)
    assert choose(q, k) == ("triton", "fastest in b.csv")
    assert choose(q) == ("sdpa", "fastest in a.csv")


def test_without_gradients_a_forward_is_all_there_is(gpu):
    with torch.no_grad():
        assert choose(tensor(requires_grad=True))[0] == "sdpa"
    assert choose(tensor(), tensor(requires_grad=True))[0] == "triton"
    assert choose(tensor(), v=tensor(requires_grad=True))[0] == "triton"


def test_where_nothing_was_measured_it_says_so(gpu, monkeypatch):
    assert choose(tensor(D=200)) == ("sdpa", "a.csv has no figures for heads of 200")
    assert choose(tensor(dtype=torch.float32)) == ("sdpa", "a.csv has no figures for float32")
    assert choose(tensor(dtype=torch.float32), return_lse=True)[0] == "triton"
    monkeypatch.setattr(auto_choice, "_capability", lambda device: (1, 0))
    assert choose(tensor()) == ("sdpa", "no table of measurements for this GPU")


def test_sdpa_is_not_chosen_where_it_may_make_a_mask(gpu):
    why = "fastest in a.csv of those that make no mask"
    assert choose(tensor(10), tensor(100)) == ("triton", why)
    assert choose(tensor(10), tensor(2000, requires_grad=True)) == ("triton", why)
    assert choose(tensor(10, D=65), tensor(100))[0] == "tilelang"
    unknown = choose(tensor(10, D=200), tensor(100, D=200))
    assert unknown == ("triton", "sdpa may make a mask of Sq x Skv")
    assert choose(tensor(10), tensor(100), is_causal=False)[0] == "sdpa"
    assert choose(tensor(1), tensor(100))[0] == "sdpa"
    assert choose(tensor(100), tensor(10))[0] == "sdpa"


CHUNK_TABLE = ChunkTable(
    "c.csv",
    {
        64: (
            QueriesChoice(0, (ChunkChoice(0, "sdpa", "tilelang"),)),
            QueriesChoice(
                16,
                (ChunkChoice(0, "triton", "triton"), ChunkChoice(1000, "tilelang", "triton")),
            ),
        )
    },
)


@pytest.fixture
def chunk_table(gpu, monkeypatch):
    monkeypatch.setitem(CHUNK_TABLES, ((9, 9), False), CHUNK_TABLE)


@pytest.mark.parametrize(
    ("Sq", "Skv", "return_lse", "expected"),
    [
        (1, 5000, False, "sdpa"),
        (15, 5000, False, "sdpa"),
        (15, 5000, True, "tilelang"),
        (16, 999, False, "triton"),
        (16, 1000, False, "tilelang"),
        (999, 1000, True, "triton"),
    ],
)
def test_fewer_queries_than_keys_have_a_table_of_their_own(
    chunk_table, Sq, Skv, return_lse, expected
):
    chosen = choose(tensor(Sq), tensor(Skv), return_lse=return_lse)
    assert chosen == (expected, "fastest in c.csv")


def test_where_that_table_is_not_asked(chunk_table):
    in_square = ("sdpa", "fastest in a.csv")
    assert choose(tensor(20)) == in_square
    assert choose(tensor(20), tensor(15)) == in_square
    # sdpa makes no mask there, and was not measured so. A single query is the same either way.
    assert choose(tensor(20), tensor(100), is_causal=False) == in_square
    assert choose(tensor(1), tensor(100), is_causal=False) == ("sdpa", "fastest in c.csv")
    why = "fastest in a.csv of those that make no mask"
    assert choose(tensor(20, requires_grad=True), tensor(2000)) == ("triton", why)
    assert choose(tensor(20, D=65), tensor(2000, D=65)) == ("tilelang", why)
    masked = ("triton", "sdpa may make a mask of Sq x Skv")
    assert choose(tensor(20, dtype=torch.float32), tensor(2000, dtype=torch.float32)) == masked


def test_what_is_compiled_gets_no_mask_either(chunk_table, monkeypatch):
    """The table has sdpa as it asks flash, which compiled code cannot."""
    q, k = tensor(15), tensor(5000)
    assert choose(q, k)[0] == "sdpa"
    monkeypatch.setattr(auto_choice, "is_eager", lambda: False)
    assert choose(q, k) == ("tilelang", "fastest in c.csv")
    assert choose(tensor(1), k)[0] == "sdpa"  # which takes no mask there


def test_what_cannot_run_is_passed_over_and_named(gpu):
    q = tensor(1000)
    assert choose(q, unable={"tilelang"}) == ("sdpa", "'tilelang' cannot: it is out")
    assert choose(q, unable={"tilelang"}, return_lse=True)[0] == "triton"
    assert choose(q, unable={"tilelang", "triton"}, return_lse=True)[0] == "eager"


def row(kernel, name, length, ms, head_dim=64, **changes):
    return {
        "kernel": kernel,
        "pass": name,
        "seq_len": str(length),
        "p20_ms": str(ms),
        "median_ms": "1.0",  # which a late host may make longer
        "head_dim": str(head_dim),
        "status": "ok",
        "is_causal": "True",
        "dtype": "bfloat16",
        "q_heads": "4",
        "kv_heads": "4",
    } | changes


def measured(length, sdpa, triton, tilelang, **changes):
    return [
        row(kernel, name, length, ms, **changes)
        for kernel, times in (("sdpa", sdpa), ("triton", triton), ("tilelang", tilelang))
        for name, ms in zip(("forward", "both"), times, strict=True)
    ]


ROWS = [
    *measured(512, (1, 5), (2, 4), (3, 6)),
    *measured(1024, (1, 5), (2, 4), (3, 6)),  # the same choices: no row of its own
    *measured(4096, (2, 3), (4, 4), (1, 5)),
    *measured(512, (2, 2), (1, 1), (3, 3), head_dim=128),
]


def test_choices_from_rows():
    assert choices(ROWS) == {
        64: (
            Choice(0, "sdpa", "triton", "triton", "triton"),
            Choice(2048, "tilelang", "sdpa", "tilelang", "triton"),
        ),
        128: (Choice(0, "triton", "triton", "triton", "triton"),),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "out of memory"},
        {"is_causal": "False"},
        {"dtype": "float32"},
        {"pass": "backward"},
        {"kernel": "fa3"},
    ],
)
def test_rows_that_do_not_count(changes):
    more = row("triton", "forward", 512, 0.1) | changes
    assert choices([*ROWS, more]) == choices(ROWS)


def test_forward_and_backward_stand_in_for_both():
    rows = [r for r in ROWS if r["pass"] == "forward"]
    rows += [row("sdpa", "backward", 512, 2.5), row("triton", "backward", 512, 2)]
    rows += [row("tilelang", "backward", 512, 0.5)]
    at_512 = [r for r in rows if r["seq_len"] == "512" and r["head_dim"] == "64"]
    # 1 + 2.5, 2 + 2 and 3 + 0.5 ms, of which the first two are level
    assert choices(at_512)[64] == (Choice(0, "sdpa", "sdpa", "triton", "tilelang"),)


def test_grouped_heads_and_others_are_not_mixed():
    grouped = [r | {"kv_heads": "1"} for r in ROWS]
    assert choices(grouped) == choices(ROWS)
    with pytest.raises(ValueError, match="each in a run of its own"):
        choices([*ROWS, *grouped])


def chunk(kernel, queries, length, ms, **changes):
    return row(kernel, "forward", length, ms, queries=str(queries), **changes)


CHUNKS = [
    *(chunk("sdpa", 1, length, 1) for length in (100, 400)),
    *(chunk("triton", 1, length, 2) for length in (100, 400)),
    *(chunk(kernel, 64, 100, ms) for kernel, ms in (("triton", 1), ("tilelang", 2))),
    *(chunk(kernel, 64, 400, ms) for kernel, ms in (("triton", 2), ("tilelang", 1))),
    *(chunk(kernel, 99, 100, ms) for kernel, ms in (("triton", 1), ("tilelang", 2))),
    *(chunk(kernel, 99, 400, ms) for kernel, ms in (("triton", 2), ("tilelang", 1))),
]
CHOSEN_CHUNKS = {
    64: (
        QueriesChoice(0, (ChunkChoice(0, "sdpa", "triton"),)),
        QueriesChoice(
            8, (ChunkChoice(0, "triton", "triton"), ChunkChoice(200, "tilelang", "tilelang"))
        ),
    )
}


def test_choices_of_fewer_queries_than_keys():
    assert chunk_choices(CHUNKS) == CHOSEN_CHUNKS
    with pytest.raises(ValueError, match="each in its own run"):
        chunk_choices([*CHUNKS, *ROWS])
    as_many = [r | {"queries": r["seq_len"]} for r in ROWS]
    assert choices(as_many) == choices(ROWS)


def test_several_batches_count_alike():
    """What is saved is a part of a call, however long it takes."""
    rows = [chunk("sdpa", 8, 100, 1, batch="1"), chunk("sdpa", 8, 100, 500, batch="8")]
    rows += [chunk("triton", 8, 100, 3, batch="1"), chunk("triton", 8, 100, 200, batch="8")]
    assert chunk_choices(rows)[64][0].choices[0].forward == "sdpa"  # 500 < 600
    rows[1] |= {"status": "out of memory"}
    assert chunk_choices(rows)[64][0].choices[0].forward == "triton"


def test_the_command(tmp_path, capsys):
    common.write_csv(tmp_path / "a.csv", ROWS)
    assert bench.main(["auto", str(tmp_path / "a.csv")]) == 0
    printed = eval("{" + capsys.readouterr().out + "}", {"Choice": Choice})
    assert printed == choices(ROWS)
    common.write_csv(tmp_path / "a.csv", CHUNKS)
    assert bench.main(["auto", str(tmp_path / "a.csv")]) == 0
    names = {"QueriesChoice": QueriesChoice, "ChunkChoice": ChunkChoice}
    printed = capsys.readouterr().out
    assert printed.startswith("# a key head for each query head, fewer queries than keys\n")
    assert eval("{" + printed + "}", names) == CHOSEN_CHUNKS
    common.write_csv(tmp_path / "a.csv", [*CHUNKS, *(r | {"kv_heads": "2"} for r in CHUNKS)])
    assert bench.main(["auto", str(tmp_path / "a.csv")]) == 0
    one, other = capsys.readouterr().out.split("# grouped heads, fewer queries than keys\n")
    assert one == printed
    assert eval("{" + other + "}", names) == CHOSEN_CHUNKS
    common.write_csv(tmp_path / "a.csv", [r for r in ROWS if r["pass"] != "both"])
    assert bench.main(["auto", str(tmp_path / "a.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "other.csv").write_text("kernel,loss\nsdpa,1.0\n")
    assert bench.main(["auto", str(tmp_path / "other.csv")]) == 2
    assert "other.csv: it is no CSV of python -m minitx.bench attention" in capsys.readouterr().err
    assert bench.main(["auto", str(tmp_path / "missing.csv")]) == 2


@pytest.mark.parametrize(("kind", "table"), TABLES.items(), ids=lambda x: getattr(x, "source", ""))
def test_every_table_is_what_its_measurement_says(kind, table):
    rows = common.read_csv(ROOT / table.source)
    assert table.choices == choices(rows)
    assert {r["q_heads"] != r["kv_heads"] for r in rows} == {kind[1]}


@pytest.mark.parametrize(
    ("kind", "table"), CHUNK_TABLES.items(), ids=lambda x: getattr(x, "source", "")
)
def test_every_table_of_chunks_is_what_its_measurement_says(kind, table):
    rows = of_kind(common.read_csv(ROOT / table.source), kind[1], is_chunk=True)
    assert table.choices == chunk_choices(rows)
