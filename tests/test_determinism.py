"""--deterministic: the same bits twice, or a refusal that names the kernel."""

import os

import pytest
import torch
from command import run_train, tiny_args

from minitx import determinism
from minitx.kernels import ATTENTION_KERNELS

PYTORCHS_OWN = ("eager", "sdpa")


def final_weights(folder) -> bytes:
    return (folder / "checkpoints/latest/model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def environment_as_it_was(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.parametrize("kernel", PYTORCHS_OWN)
def test_two_runs_are_equal_and_the_mode_ends_with_them(kernel, tmp_path, monkeypatch):
    seen = []
    original = torch.Tensor.backward

    def backward(self, *args, **kwargs):
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"])
        )
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    for out in ("a", "b"):
        args = tiny_args(tmp_path, out, kernel=kernel, compare="none", model__dropout=0.1)
        assert run_train([*args, "--deterministic"]) == 0
        assert not torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.deterministic
    assert final_weights(tmp_path / "a") == final_weights(tmp_path / "b")
    assert set(seen) == {(True, ":4096:8")}


def test_it_is_off_unless_asked_for(tmp_path):
    assert run_train(tiny_args(tmp_path, compare="none", max_steps=1)) == 0
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize("flag", ["--kernel", "--compare"])
def test_a_kernel_that_cannot_is_refused_by_name(flag, tmp_path, monkeypatch, capsys):
    right = determinism.attention
    refused = {"--kernel": "sdpa", "--compare": "eager"}[flag]

    def attention(q, k, v, *, kernel):
        if kernel == refused:
            raise RuntimeError(
                "_efficient_attention_backward does not have a deterministic implementation, but "
                "you set 'torch.use_deterministic_algorithms(True)'. You can turn it off.\nmore"
            )
        return right(q, k, v, kernel=kernel)

    monkeypatch.setattr(determinism, "attention", attention)
    assert run_train([*tiny_args(tmp_path), "--deterministic"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--deterministic: {flag} {refused} cannot, for float32 and heads of 16 on cpu" in error
    assert not (tmp_path / "run").exists()


def test_another_error_of_the_kernel_is_not_taken_for_that(tmp_path, monkeypatch):
    def attention(q, k, v, *, kernel):
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(determinism, "attention", attention)
    with pytest.raises(RuntimeError, match="misaligned address"):
        run_train([*tiny_args(tmp_path), "--deterministic"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", ATTENTION_KERNELS[1:])
def test_two_runs_on_a_gpu_are_equal_or_refused(kernel, dtype, tmp_path, capsys):
    """512 tokens and heads of 64: several tiles and blocks, whose order could differ."""
    changes = {
        "kernel": kernel,
        "dtype": dtype,
        "device": "cuda",
        "compare": "none",
        "max_steps": 10,
        "model__dropout": 0.1,
        "model__n_embd": 128,
        "model__max_seq_len": 512,
        "batch__tokens": 4096,
        "deterministic": "true",
    }
    codes = [run_train(tiny_args(tmp_path, out, **changes)) for out in ("a", "b")]
    if codes == [2, 2]:
        assert kernel in PYTORCHS_OWN
        assert f"--deterministic: --kernel {kernel} cannot" in capsys.readouterr().err
        return
    assert codes == [0, 0]
    assert final_weights(tmp_path / "a") == final_weights(tmp_path / "b")
