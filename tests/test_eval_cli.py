"""eval.py from its arguments to its exit code, on a checkpoint small enough for any kernel."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_runs import TEXT, make_run, nll_of, one_line, report_of, run_eval

import minitx.evaluation
import minitx.model
from minitx.checkpoint import load_model, save_checkpoint
from minitx.data import DataConfig, load_data
from minitx.kernels import ATTENTION_KERNELS, supports
from minitx.tokenizer import ByteTokenizer, train_bpe


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITX_CACHE_DIR", str(tmp_path / "cache"))


def plain_nll(run: Path, x: np.ndarray, L: int, s: int) -> float:
    """Mean loss by one forward a token, nothing shared with what is tested."""
    model, _ = load_model(run, kernel="reference")
    model.double()
    total = 0.0
    with torch.no_grad():
        for target in range(1, len(x)):
            b = 0
            while b + L < target:
                b += s
            logits = model(torch.tensor(x[None, b:target]))[0, -1]
            total += (logits.logsumexp(0) - logits[x[target]]).item()
    return total / (len(x) - 1)


def test_eval_json_against_a_plain_loop(run_folder, text_file, tmp_path, capsys):
    out = tmp_path / "out"
    code = run_eval(
        *("--checkpoint", run_folder, "--kernel", "sdpa", "--compare", "eager"),
        *("--data.source", text_file, "--context_lengths", "8,32", "--out_dir", out),
        plots=True,
    )
    printed = capsys.readouterr().out
    assert code == 0, printed
    report = report_of(out)
    x = np.frombuffer(TEXT, dtype=np.uint8).astype(np.int64)
    rows = report["contexts"]
    assert [(r["kernel"], r["context_length"], r["stride"]) for r in rows] == [
        ("sdpa", 8, 4),
        ("eager", 8, 4),
        ("sdpa", 32, 16),
        ("eager", 32, 16),
    ]
    nll = {L: plain_nll(run_folder, x, L, s) for L, s in ((8, 4), (32, 16))}
    for row in rows:
        assert row["tokens_scored"] == row["bytes_scored"] == len(TEXT) - 1
        assert row["nll"] == pytest.approx(nll[row["context_length"]], abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
        assert row["bits_per_byte"] == pytest.approx(row["nll"] / math.log(2))
        assert row["tok_per_s"] > 0
        assert row["peak_gib"] > 0
    for comparison in report["comparisons"]:
        assert comparison["passed"]
        assert comparison["delta_nll"] <= comparison["budget"] < 1e-4
    assert [p["context_length"] for p in report["positions"]] == [8, 32]
    assert all(sum(b["count"] for b in p["buckets"]) == len(TEXT) - 1 for p in report["positions"])
    assert [p["context"] for p in report["paired"]["contexts"]] == [4, 8, 16, 32]
    assert all(probe["passed"] for probe in report["causality"])
    assert report["text"]["split"] == "all"
    assert (out / "eval.png").read_bytes().startswith(b"\x89PNG")
    table = printed[printed.index("kernel      ") : printed.index("see ")].splitlines()
    assert len(table) >= 5 + 5 + 7
    assert max(map(len, table)) <= 100


@pytest.mark.parametrize("kernel", [k for k in ATTENTION_KERNELS if k not in ("eager", "sdpa")])
def test_each_kernel_within_the_budget(kernel, run_folder, tmp_path):
    q = torch.empty(1, 2, 1, 8)
    support = supports(kernel, q, q, q)
    if not support.ok:
        pytest.skip(support.reason)
    path = tmp_path / "short.txt"
    path.write_bytes(TEXT[:40])
    out = tmp_path / "out"
    code = run_eval(
        *("--checkpoint", run_folder, "--kernel", kernel, "--compare", "eager"),
        *("--data.source", path, "--context_lengths", 16, "--out_dir", out),
        *("--paired_targets", 0, "--probe_tokens", 8),
    )
    assert code == 0
    assert report_of(out)["comparisons"][0]["passed"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel", ["sdpa", "triton-softmax", "tilelang-softmax", "triton", "tilelang"]
)
def test_each_kernel_on_a_gpu_in_bfloat16(kernel, tmp_path):
    run = make_run(tmp_path / "run", n_embd=128, max_seq_len=1024)
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT * 40)
    code = run_eval(
        *("--checkpoint", run, "--kernel", kernel, "--compare", "eager", "--device", "cuda"),
        *("--data.source", path, "--context_lengths", "100,1024,4096"),
    )
    report = report_of(run / "eval")
    assert report["dtype"] == "bfloat16"
    assert all(probe["passed"] for probe in report["causality"])
    assert code == 0, report["comparisons"]


def test_settings_that_change_no_number(run_folder, text_file, tmp_path):
    base = nll_of(run_folder, text_file, tmp_path / "a", "--context_lengths", "8,32")
    for i, settings in enumerate(
        [("--batch_size", 1), ("--batch_size", 8), ("--prefill_chunk", 5), ("--stride", 4)]
    ):
        lengths = ("--context_lengths", "8" if "--stride" in settings else "[8, 32]")
        got = nll_of(run_folder, text_file, tmp_path / str(i), *lengths, *settings)
        assert got == pytest.approx(base[: len(got)], abs=1e-5)


def test_dropout_is_off(tmp_path, text_file):
    runs = [make_run(tmp_path / f"run{p}", dropout=p) for p in (0.0, 0.5)]
    with_none, with_half = (nll_of(run, text_file, run / "out") for run in runs)
    assert with_none == with_half


def test_bfloat16_is_close_and_not_equal(run_folder, text_file, tmp_path):
    (exact,) = nll_of(run_folder, text_file, tmp_path / "a")
    (rounded,) = nll_of(run_folder, text_file, tmp_path / "b", "--dtype", "bfloat16")
    assert 1e-7 < abs(exact - rounded) < 0.1


def test_the_runs_own_validation_documents_by_default(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_bytes(TEXT[i * 30 : i * 30 + 90])
    run = make_run(tmp_path / "run", source=str(folder))
    data = load_data(DataConfig(source=str(folder), tokenizer="bytes", val_fraction=0.3))
    assert run_eval("--checkpoint", run, "--paired_targets", 0) == 0
    report = report_of(run / "eval")
    assert report["text"]["split"] == "val"
    assert report["text"]["documents"] == data.val_docs == 1
    assert report["contexts"][0]["tokens_scored"] == 90 - 1
    # One stream: every token but the first end-of-text is predicted, and each document's first.
    args = ("--checkpoint", run, "--data.split", "all", "--data.join_documents", "true")
    assert run_eval(*args, "--out_dir", tmp_path / "joined", "--paired_targets", 0) == 0
    row = report_of(tmp_path / "joined")["contexts"][0]
    assert (row["tokens_scored"], row["bytes_scored"]) == (6 * 91 - 1, 6 * 90)


def test_max_tokens_takes_the_first(run_folder, text_file, tmp_path):
    (got,) = nll_of(
        run_folder, text_file, tmp_path / "a", "--max_tokens", 50, "--context_lengths", 8
    )
    x = np.frombuffer(TEXT, dtype=np.uint8).astype(np.int64)[:50]
    assert got == pytest.approx(plain_nll(run_folder, x, 8, 4), abs=1e-5)


def test_bytes_that_are_no_utf8_are_kept(run_folder, tmp_path):
    path = tmp_path / "odd.txt"
    odd = b"\xef\xbb\xbfa\x92b\x00\r\n" + "é😀".encode() + b"\xff" * 9
    path.write_bytes(odd)
    nll_of(run_folder, path, tmp_path / "out")
    row = report_of(tmp_path / "out")["contexts"][0]
    assert row["tokens_scored"] == row["bytes_scored"] == len(odd) - 1


def test_a_bpe_is_scored_by_its_bytes(tmp_path, text_file):
    tokenizer = train_bpe([TEXT], 300)
    run = make_run(tmp_path / "run", tokenizer=tokenizer)
    nll_of(run, text_file, tmp_path / "out")
    row = report_of(tmp_path / "out")["contexts"][0]
    ids = tokenizer.encode(TEXT)
    assert row["tokens_scored"] == len(ids) - 1 < len(TEXT) // 2
    assert row["bytes_scored"] == len(TEXT) - len(tokenizer.decode(ids[:1]))
    bits = row["nll"] * row["tokens_scored"] / math.log(2)
    assert row["bits_per_byte"] == pytest.approx(bits / row["bytes_scored"])


def test_losses_beyond_a_float_are_printed_and_valid_json(tmp_path, text_file, capsys):
    run = make_run(tmp_path / "run")
    model, _ = load_model(run)
    with torch.no_grad():
        model.tok_embd.weight.mul_(1e3)
        model.norm.weight.mul_(1e3)
    save_checkpoint(tmp_path / "big", step=7, model=model, optimizer=None, state={})
    ByteTokenizer().save(tmp_path / "big" / "tokenizer.json")
    nll_of(tmp_path / "big", text_file, tmp_path / "out")
    row = report_of(tmp_path / "out")["contexts"][0]
    assert row["nll"] > 710
    assert (row["perplexity"], row["non_finite"]) == (None, {"perplexity": "inf"})
    assert " inf " in capsys.readouterr().out


# -- contexts beyond the trained one --------------------------------------------------------------


@pytest.mark.parametrize("scaling", ["linear", "ntk", "yarn", "llama3"])
def test_rope_scaling_is_the_models_with_that_config(scaling, run_folder, text_file, tmp_path):
    (got,) = nll_of(
        *(run_folder, text_file, tmp_path / "out", "--context_lengths", 64),
        *("--rope_scaling", scaling, "--rope_factor", 2, "--stride", 64),
    )
    model, _ = load_model(run_folder, overrides=dict(rope_scaling=scaling, rope_factor=2.0))
    model.extend_context(64)
    x = torch.tensor(np.frombuffer(TEXT[:65], dtype=np.uint8).astype(np.int64))[None]
    want = model.token_losses(x[:, :-1], x[:, 1:])
    args = ("--max_tokens", 65, "--rope_scaling", scaling, "--context_lengths", 64)
    # The factor that is left out is the context over the trained one: 2.
    (first,) = nll_of(run_folder, text_file, tmp_path / "first", *args)
    assert first == pytest.approx(want.mean().item(), abs=1e-5)
    (unscaled,) = nll_of(run_folder, text_file, tmp_path / "none", "--context_lengths", 64)
    assert abs(unscaled - got) > 1e-3


def test_learned_positions_hold_what_they_hold(tmp_path, text_file, capsys):
    run = make_run(tmp_path / "run", pos="learned")
    nll_of(run, text_file, tmp_path / "out", "--context_lengths", 32)
    args = ("--checkpoint", run, "--data.source", text_file)
    assert run_eval(*args, "--context_lengths", "32,64") == 2
    assert "64 tokens is beyond the 32 learned positions" in one_line(capsys)
    assert run_eval(*args, "--rope_scaling", "yarn", "--context_lengths", 64) == 2
    message = one_line(capsys)
    assert "--rope_scaling yarn needs a model with RoPE; this one has 32 learned" in message
    assert not (run / "eval" / "eval.json").exists()
    nll_of(run, text_file, tmp_path / "after", "--context_lengths", 8)  # the process is whole


# -- kernels that fail ----------------------------------------------------------------------------


def broken(monkeypatch, kernel, change):
    """Lets attention on one kernel go through `change(attention, q, k, v, settings)`."""
    true_attention = minitx.model.attention

    def attention(q, k, v, **settings):
        if settings["kernel"] == kernel:
            return change(true_attention, q, k, v, settings)
        return true_attention(q, k, v, **settings)

    monkeypatch.setattr(minitx.model, "attention", attention)


def test_a_kernel_that_is_wrong_exits_3(run_folder, text_file, tmp_path, monkeypatch, capsys):
    broken(monkeypatch, "sdpa", lambda f, q, k, v, settings: f(q * 1.01, k, v, **settings))
    args = ("--checkpoint", run_folder, "--kernel", "sdpa", "--compare", "eager")
    out = tmp_path / "out"
    assert run_eval(*args, "--data.source", text_file, "--out_dir", out) == 3
    assert "FAILED" in capsys.readouterr().out
    assert not report_of(out)["comparisons"][0]["passed"]


def test_a_kernel_that_looks_ahead_exits_4(run_folder, text_file, tmp_path, monkeypatch, capsys):
    def look_ahead(attention, q, k, v, settings):
        return attention(q, k, v, **settings | {"is_causal": False})

    broken(monkeypatch, "sdpa", look_ahead)
    args = ("--checkpoint", run_folder, "--kernel", "sdpa", "--compare", "eager")
    out = tmp_path / "out"
    assert run_eval(*args, "--data.source", text_file, "--out_dir", out) == 4
    assert "causality FAILED: on kernel 'sdpa'" in capsys.readouterr().out
    report = report_of(out)
    assert report["contexts"] == []
    assert report["causality"][0]["leak_nats"] > 0


def test_memory_that_ends_is_a_row(run_folder, text_file, tmp_path, monkeypatch, capsys):
    def hungry(attention, q, k, v, settings):
        if k.shape[2] > 16 and q.shape[2] > 16:  # the truth reads in chunks: what fits is its own
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")
        return attention(q, k, v, **settings)

    broken(monkeypatch, "eager", hungry)
    out = tmp_path / "out"
    args = ("--checkpoint", run_folder, "--kernel", "sdpa", "--compare", "eager")
    args += ("--data.source", text_file, "--context_lengths", "8,32,16", "--out_dir", out)
    monkeypatch.setattr("minitx.eval_parity.CHUNK_ELEMENTS", 2 * 32 * 16)
    assert run_eval(*args) == 0
    rows = report_of(out)["contexts"]
    assert [(r["kernel"], r["context_length"], r["status"]) for r in rows] == [
        ("sdpa", 8, "ok"),
        ("eager", 8, "ok"),
        ("sdpa", 32, "ok"),
        ("eager", 32, "out of memory"),
        ("sdpa", 16, "ok"),
        ("eager", 16, "ok"),
    ]
    comparisons = report_of(out)["comparisons"]
    assert [c["delta_nll"] is None for c in comparisons] == [False, True, False]
    assert all(c["passed"] for c in comparisons)  # at 32 against the truth alone
    assert "eager ran out of memory" in capsys.readouterr().out
    # Where the kernel itself has none left, nothing is left to report.
    swapped = ("--checkpoint", run_folder, "--kernel", "eager", "--data.source", text_file)
    assert run_eval(*swapped, "--out_dir", tmp_path / "b", "--context_lengths", 32) == 1


def test_a_truth_without_memory_is_a_line(run_folder, text_file, tmp_path, monkeypatch, capsys):
    def no_memory(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(minitx.evaluation, "sample_errors", no_memory)
    args = ("--checkpoint", run_folder, "--kernel", "sdpa", "--compare", "eager")
    assert run_eval(*args, "--data.source", text_file, "--out_dir", tmp_path / "out") == 0
    assert "no parity at context 32" in capsys.readouterr().out
    assert report_of(tmp_path / "out")["comparisons"] == []


def test_another_error_is_no_lack_of_memory(run_folder, text_file, tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(minitx.evaluation, "score_windows", fail)
    args = ("--checkpoint", run_folder, "--data.source", text_file)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_eval(*args, "--out_dir", tmp_path / "out")


def test_ctrl_c_prints_and_writes_what_is_finished(
    run_folder, text_file, tmp_path, monkeypatch, capsys
):
    finished = minitx.evaluation.score_windows

    def interrupted(model, documents, windows, *rest):
        if max(w.read for w in windows) > 8:
            raise KeyboardInterrupt
        return finished(model, documents, windows, *rest)

    monkeypatch.setattr(minitx.evaluation, "score_windows", interrupted)
    args = ("--checkpoint", run_folder, "--data.source", text_file, "--out_dir", tmp_path / "out")
    assert run_eval(*args, "--context_lengths", "8,32", plots=True) == 130
    report = report_of(tmp_path / "out")
    assert report["interrupted"]
    assert [row["context_length"] for row in report["contexts"]] == [8]
    assert "interrupted: what was finished is above" in capsys.readouterr().out
    assert (tmp_path / "out" / "eval.png").exists()


def test_nothing_is_overwritten(run_folder, text_file, tmp_path, capsys):
    out = tmp_path / "out"
    args = ("--checkpoint", run_folder, "--data.source", text_file, "--out_dir", out)
    assert run_eval(*args) == 0
    before = (out / "eval.json").read_bytes()
    capsys.readouterr()
    assert run_eval(*args) == 2
    assert "eval.json exists; give --overwrite true, or another --out_dir" in one_line(capsys)
    assert (out / "eval.json").read_bytes() == before
    assert run_eval(*args, "--overwrite", "true", "--context_lengths", 8) == 0
    assert report_of(out)["contexts"][0]["context_length"] == 8


# -- passkey --------------------------------------------------------------------------------------


def test_passkey(run_folder, tmp_path, capsys):
    out = tmp_path / "out"
    code = run_eval(
        *("--checkpoint", run_folder, "--task", "passkey", "--context_lengths", "150,200"),
        *("--kernel", "sdpa", "--compare", "eager", "--passkey.trials", 2),
        *("--passkey.depths", "[0, 1]", "--out_dir", out),
        plots=True,
    )
    assert code == 0
    rows = report_of(out)["passkey"]
    assert [(r["context_length"], r["kernel"], r["depth"]) for r in rows] == [
        (length, kernel, depth)
        for length in (150, 200)
        for kernel in ("sdpa", "eager")
        for depth in (0.0, 1.0)
    ]
    assert all(r["trials"] == 2 and r["accuracy"] == 0 and r["nats"] > 5 for r in rows)
    for ours, theirs in ((0, 2), (1, 3)):
        assert rows[ours]["nats"] == pytest.approx(rows[theirs]["nats"], abs=1e-3)
    assert "5 digits come, and not which, pays 11.513 nats" in capsys.readouterr().out
    assert (out / "eval.png").exists()
