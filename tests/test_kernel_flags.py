"""--kernel and --compare of train.py and eval.py: one check, whose words name the flag."""

import pytest
import torch
from command import run_train, tiny_args
from eval_runs import TEXT, make_run, run_eval

from minitx import kernel_flags
from minitx.kernel_flags import check_kernels
from minitx.kernels import KernelUnavailableError
from minitx.kernels.api import Support
from minitx.model import GPTConfig

MODEL = GPTConfig(n_layer=1, n_head=6, n_kv_head=2, n_embd=48)
CPU = torch.device("cpu")
NAMES = "auto, reference, eager, sdpa, triton-softmax, tilelang-softmax, triton, tilelang"


@pytest.fixture
def no_tilelang(monkeypatch):
    """A machine on which TileLang's kernels do not run; keeps the shapes that were asked about."""
    shapes = []

    def supports(kernel, q, k, v):
        shapes.append((q.shape, k.shape, v.shape, q.dtype))
        return Support("tilelang" not in kernel, "it is not installed")

    monkeypatch.setattr(kernel_flags, "supports", supports)
    return shapes


def test_what_will_run(no_tilelang):
    def check(*names):
        return check_kernels(*names, MODEL, CPU, torch.bfloat16)

    assert check("triton", "eager") == {"--kernel": "triton", "--compare": "eager"}
    assert check("auto", "none") == {"--kernel": "auto"}
    # Asked about this model's heads: 6 of queries, 2 of keys, 8 wide.
    assert set(no_tilelang) == {((1, 6, 1, 8), (1, 2, 1, 8), (1, 2, 1, 8), torch.bfloat16)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("flash", "eager"), f"--kernel flash is unknown; expected one of {NAMES}"),
        (("none", "none"), f"--kernel none is unknown; expected one of {NAMES}"),
        (("eager", "flash"), f"--compare flash is unknown; expected one of {NAMES} or none"),
    ],
)
def test_a_name_that_is_unknown(names, message, no_tilelang):
    with pytest.raises(ValueError, match="unknown") as caught:
        check_kernels(*names, MODEL, CPU, torch.float32)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("names", "flag"),
    [
        (("tilelang", "eager"), "--kernel tilelang"),
        (("eager", "tilelang-softmax"), "--compare tilelang-softmax"),
    ],
)
def test_a_kernel_that_cannot_run(names, flag, no_tilelang):
    with pytest.raises(KernelUnavailableError) as caught:
        check_kernels(*names, MODEL, CPU, torch.float32)
    assert str(caught.value) == (
        f"{flag} cannot run here: it is not installed. "
        "Kernels that can: eager, sdpa, triton-softmax, triton"
    )


def test_both_commands_ask_before_they_write(no_tilelang, tmp_path, capsys):
    assert run_train([*tiny_args(tmp_path), "--compare=tilelang"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: error: --compare tilelang cannot run here: it is not")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
    run, text = make_run(tmp_path / "trained"), tmp_path / "short.txt"
    text.write_bytes(TEXT)
    out = tmp_path / "out"
    args = ("--checkpoint", run, "--data.source", text, "--out_dir", out)
    assert run_eval(*args, "--kernel", "tilelang") == 2
    error = capsys.readouterr().err
    assert error.startswith("eval.py: error: --kernel tilelang cannot run here: it is not")
    assert not (out / "eval.json").exists()
