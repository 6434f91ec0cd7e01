"""Kernel `auto`: what it chooses, from what table, and how the table comes from a measurement."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitx.bench import __main__ as bench
from minitx.bench import _common as common
from minitx.bench.auto import choices
from minitx.kernels import auto_choice
from minitx.kernels.auto_choice import TABLES, Choice, MeasuredTable, choose_kernel

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


def test_sdpa_is_not_chosen_where_it_would_make_a_mask(gpu):
    assert choose(tensor(10), tensor(100))[0] == "triton"
    assert choose(tensor(10), tensor(100), is_causal=False)[0] == "sdpa"
    assert choose(tensor(1), tensor(100))[0] == "sdpa"
    assert choose(tensor(100), tensor(10))[0] == "sdpa"


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


def test_the_command(tmp_path, capsys):
    common.write_csv(tmp_path / "a.csv", ROWS)
    assert bench.main(["auto", str(tmp_path / "a.csv")]) == 0
    printed = eval("{" + capsys.readouterr().out + "}", {"Choice": Choice})
    assert printed == choices(ROWS)
    common.write_csv(tmp_path / "a.csv", [r for r in ROWS if r["pass"] != "both"])
    assert bench.main(["auto", str(tmp_path / "a.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert bench.main(["auto", str(tmp_path / "missing.csv")]) == 2


@pytest.mark.parametrize(("kind", "table"), TABLES.items(), ids=lambda x: getattr(x, "source", ""))
def test_every_table_is_what_its_measurement_says(kind, table):
    rows = common.read_csv(ROOT / table.source)
    assert table.choices == choices(rows)
    assert {r["q_heads"] != r["kv_heads"] for r in rows} == {kind[1]}
