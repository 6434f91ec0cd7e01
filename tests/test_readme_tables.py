"""README's tables are those of benchmarks/*.csv, and python -m minitx.bench table draws them."""

import pytest

from minitx.bench import __main__ as bench
from minitx.bench.table import FOLDER, fill, render

VERSIONS = "device,torch,triton,tilelang,commit"
CSV = {
    "attention": f"""\
kernel,pass,dtype,is_causal,batch,seq_len,q_heads,kv_heads,head_dim,status,median_ms,tflop_per_s,\
vs_sdpa,vs_best_peer,{VERSIONS}
sdpa,forward,bfloat16,True,4,8,32,8,64,ok,1.0,422.4,1.0,0.9,GPU 1,2,3,4,abc
triton,forward,bfloat16,True,4,8,32,8,64,ok,0.8,9.876,1.25,1.125,GPU 1,2,3,4,abc
eager,forward,bfloat16,True,4,8,32,8,64,out of memory,,,,,GPU 1,2,3,4,abc
sdpa,forward,bfloat16,True,1,32,32,8,64,ok,1.0,0.05,1.0,0.9,GPU 1,2,3,4,abc
triton,forward,bfloat16,True,1,32,32,8,64,wrong: dq errs,,,,,GPU 1,2,3,4,abc
eager,forward,bfloat16,True,1,32,32,8,64,it has none,,,,,GPU 1,2,3,4,abc
sdpa,host forward,bfloat16,True,1,16,1,1,64,ok,0.0123,,,,GPU 1,2,3,4,abc
sdpa,host both,bfloat16,True,1,16,1,1,64,ok,0.05,,,,GPU 1,2,3,4,abc
sdpa,graph forward,bfloat16,True,1,16,1,1,64,failed: x,,,,,GPU 1,2,3,4,def
""",
    "train": f"""\
kernel,compile,batch,context,status,tok_per_s,vs_nanogpt,mfu,peak_gib,parity_passed,\
max_abs_loss_diff,loss,val_loss,label,{VERSIONS}
nanogpt-sdpa,True,32,1024,ok,517000.4,1.0,0.42,21.33,,,10.8,,,GPU 1,2,3.9.0,4,abc
triton,False,32,1024,ok,690000,1.3346,0.5,10.1,True,1.5e-04,9.25,9.5,mine,GPU 1,2,3.9.0,4,abc
eager,False,32,1024,out of memory,,,,,,,,,,GPU 1,2,3.9.0,4,abc
""",
    "softmax": f"""\
kernel,dtype,direction,is_causal,rows,columns,status,median_ms,tb_per_s,copy_tb_per_s,{VERSIONS}
torch,float32,forward,False,4,128,ok,1.0,2.5,4.26,GPU 1,2,3,4,
triton,float32,forward,False,4,128,ok,1.0,2.5,4.26,GPU 1,2,3,4,
torch,float32,forward,True,8,128,ok,1.5,2.345,4.26,GPU 1,2,3,4,
triton,float32,forward,True,8,128,wrong,,,4.26,GPU 1,2,3,4,
""",
    "contract": f"""\
rule,kernel,passed,failed,skipped,skip_reasons,{VERSIONS}
scale,eager,4,0,0,,GPU 1,2,3,4,abc
scale,sdpa,2,1,1,1 needs a GPU,GPU 1,2,3,4,abc
lse,eager,12,0,2,2 needs a GPU,GPU 1,2,3,4,abc
lse,sdpa,0,0,15,12 returns no lse; 3 needs a GPU,GPU 1,2,3,4,abc
sizes,eager,1,0,0,,GPU 1,2,3,4,abc
""",
}
TABLES = {
    "attention": """\
forward, D 64, 32 : 8 heads, bfloat16, causal: TFLOP/s

|   | 4x8 | 1x32 |
| --- | ---: | ---: |
| sdpa | 422 | 0.05 |
| triton | 9.88 | wrong |
| eager | memory | - |
| triton / sdpa | 1.25 |   |
| triton / best peer | 1.12 |   |

Tiny tensors, D 64, so that the host's work is all that counts

| µs a call | host forward | host both | graph forward |
| --- | ---: | ---: | ---: |
| sdpa | 12.3 | 50.0 | failed |

(GPU 1, torch 2, triton 3, tilelang 4, commit abc, def)
""",
    "train": """\
32 x 1024 tokens a step (x: tok/s against nanogpt-sdpa)

| kernel | compile | tok/s | x | MFU | GiB | parity | \\|dloss\\| | loss | val loss |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| nanogpt-sdpa | yes | 517,000 | 1.00 | 42.0% | 21.33 | - | - | 10.8000 | - |
| triton (mine) | no | 690,000 | 1.33 | 50.0% | 10.10 | passed | 1.5e-04 | 9.2500 | 9.5000 |
| eager | no | memory | - | - | - | - | - | - | - |

(GPU 1, torch 2, triton 3.9.0, tilelang 4, commit abc)
""",
    "softmax": """\
float32 forward: TB/s of bytes that must move (a copy: 4.26)

| rows x columns | torch | triton |
| --- | ---: | ---: |
| 4 x 128 | 2.50 | 2.50 |

float32 forward, causal: TB/s of bytes that must move (a copy: 4.26)

| rows x columns | torch | triton |
| --- | ---: | ---: |
| 8 x 128 | 2.35 | wrong |

Causal rows: time for each score, visible or not, over that of full rows

| columns | torch | triton |
| --- | ---: | ---: |
| float32 forward, 128 | 0.75 | - |

(GPU 1, torch 2, triton 3, tilelang 4)
""",
    "contract": """\
Tests that passed

| rule | eager | sdpa |
| --- | ---: | ---: |
| scale | 4 | 2 of 3 |
| lse | 12 | returns no lse; needs a GPU |
| sizes | 1 | - |

(GPU 1, torch 2, triton 3, tilelang 4, commit abc)
""",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in CSV.items():
        (tmp_path / f"{name}.csv").write_text(text)
    return tmp_path


def test_readme_shows_what_was_measured():
    """`python -m minitx.bench table --readme README.md` mends it."""
    text = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert fill(text) == text


@pytest.mark.parametrize("kind", CSV)
def test_a_csv_in_markdown(folder, kind):
    assert render(folder / f"{kind}.csv") == TABLES[kind]


def test_tables_are_filled_in_between_their_markers(folder):
    before = "# Title\n\n<!-- table:softmax -->\nold\n<!-- /table -->\n\ntext | more\n"
    after = fill(before, folder)
    table = TABLES["softmax"]
    assert after == before.replace("old\n", f"\n{table}\n")
    assert fill(after, folder) == after
    plain = "# No marker\n\n| a | b |\n"
    assert fill(plain, folder) == plain


def test_a_marker_chooses_rows(folder):
    text = "<!-- table:train kernel=eager,triton context=1024 -->\n<!-- /table -->\n"
    filled = fill(text, folder)
    assert "| triton (mine) |" in filled
    assert "| eager |" in filled
    assert "| nanogpt-sdpa |" not in filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:none -->\n<!-- /table -->", "names .*none.csv, which is missing"),
        ("<!-- table:train -->\n", "has no <!-- /table --> after it"),
        (
            "<!-- table:train -->\n<!-- table:softmax -->\n<!-- /table -->",
            "table:train --> has no <!-- /table --> after it",
        ),
        ("<!-- table:train kernl=eager -->\n<!-- /table -->", "has no column 'kernl'; it has"),
        ("<!-- table:train kernel=fast -->\n<!-- /table -->", "no rows are left to show"),
        ("<!-- table:other -->\n<!-- /table -->", "is no CSV of python -m minitx.bench"),
    ],
)
def test_a_marker_that_cannot_be_followed(folder, text, message):
    (folder / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=message):
        fill(text, folder)


def test_the_command(folder, capsys):
    assert bench.main(["table", str(folder / "softmax.csv")]) == 0
    assert capsys.readouterr().out == TABLES["softmax"] + "\n"
    assert bench.main(["table", str(folder / "nowhere.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    readme = folder / "README.md"
    readme.write_text("text without a marker\n")
    assert bench.main(["table", "--readme", str(readme)]) == 0
    assert readme.read_text() == "text without a marker\n"
