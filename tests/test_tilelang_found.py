"""Kernels that an earlier process compiled are found without TileLang, and no others are."""

import ctypes
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitx.kernels import supports

_probe = torch.zeros(1, 1, 1, 16)
_support = supports("tilelang", _probe, _probe, _probe)
if not _support.ok:
    pytest.skip(_support.reason, allow_module_level=True)

from minitx.kernels import (  # noqa: E402
    runtime,
    tilelang_attention_bwd_hopper,
    tilelang_attention_dq_sum,
    tilelang_found,
    tilelang_wgmma,
)
from minitx.kernels.tilelang_attention_bwd import (  # noqa: E402
    build_attention_bwd_dkdv,
    build_attention_bwd_dq,
)
from minitx.kernels.tilelang_attention_bwd_hopper import build_attention_bwd_hopper  # noqa: E402
from minitx.kernels.tilelang_attention_bwd_rows import build_attention_bwd_prepare  # noqa: E402
from minitx.kernels.tilelang_attention_tiles import takes_hopper_kernels  # noqa: E402
from minitx.kernels.tilelang_runtime import Target  # noqa: E402

HOPPER = Target("cuda", "sm_90a")
KEY = {"dtype": "bfloat16", "HEAD_DIM": 64, "IS_CAUSAL": True}
CALL = (build_attention_bwd_hopper, HOPPER, KEY)


def keep(cache: Path, name: str = "abc", content: bytes = b"a kernel") -> SimpleNamespace:
    """What TileLang compiled and keeps, as far as a note asks."""
    folder = cache / "0.1" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "executable.so").write_bytes(content)
    return SimpleNamespace(_tilelang_cache_path=str(folder))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, of kernels that are their folders."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tilelang_found, "FoundKernel", lambda folder: folder)
    monkeypatch.setattr(tilelang_found, "_warned", set())
    return tmp_path


@pytest.fixture
def noted(cache) -> Path:
    """A cache of one kernel, CALL's."""
    tilelang_found.note(*CALL, keep(cache))
    assert tilelang_found.find(*CALL) == cache / "0.1" / "abc"
    return cache


def assert_one_warning(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("minitx", "WARNING")
    assert "\n" not in record.getMessage()
    for word in words:
        assert word in record.getMessage()


def test_what_was_noted_last_is_found(noted):
    tilelang_found.note(*CALL, keep(noted, "other"))
    assert tilelang_found.find(*CALL) == noted / "0.1" / "other"
    assert [path.suffix for path in (noted / "minitx").iterdir()] == [".json"]  # nothing partial


@pytest.mark.parametrize(
    "call",
    [
        (build_attention_bwd_prepare, HOPPER, KEY),
        (build_attention_bwd_hopper, Target("cuda", "sm_100a"), KEY),
        (build_attention_bwd_hopper, HOPPER, KEY | {"IS_CAUSAL": False}),
    ],
    ids=["builder", "target", "key"],
)
def test_another_kernel_is_not_found(noted, call):
    assert tilelang_found.find(*call) is None


def test_another_builder_of_the_same_module_is_not_found(cache):
    tilelang_found.note(build_attention_bwd_dq, HOPPER, KEY, keep(cache))
    assert tilelang_found.find(build_attention_bwd_dq, HOPPER, KEY) is not None
    assert tilelang_found.find(build_attention_bwd_dkdv, HOPPER, KEY) is None


def replaced():
    """Anything of the same name."""


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (tilelang_found, "SOURCE", "another"),
        (tilelang_found, "version", lambda package: "0.2"),
        (tilelang_found, "_library_stamp", lambda: (1, 2)),
        (tilelang_attention_bwd_hopper, "Q_STAGES", 2),
        (tilelang_wgmma, "HELPERS", "// none"),  # of a module that the builder's imports
        (tilelang_attention_dq_sum, "store", replaced),
    ],
    ids=["source", "version", "library", "constant", "constant elsewhere", "function elsewhere"],
)
def test_what_a_builder_stands_on_has_changed(noted, monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    assert tilelang_found.find(*CALL) is None
    monkeypatch.undo()


def test_tilelangs_environment_has_changed(noted, monkeypatch):
    monkeypatch.setenv("TILELANG_PRINT_ON_COMPILATION", "0")  # as minitx sets it
    assert tilelang_found.find(*CALL) is not None
    monkeypatch.setenv("TILELANG_LAYOUT_COST_MODEL", "simple")
    assert tilelang_found.find(*CALL) is None
    monkeypatch.delenv("TILELANG_LAYOUT_COST_MODEL")
    monkeypatch.setenv("TILELANG_DISABLE_CACHE", "1")
    assert tilelang_found.find(*CALL) is None


def test_no_note_is_no_matter(cache, caplog):
    assert tilelang_found.find(*CALL) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError: 'folder'"),
        ('{"folder": 1, "sha256": "x"}', "TypeError"),
    ],
)
def test_a_note_that_is_no_note(noted, caplog, text, reason):
    (note,) = (noted / "minitx").iterdir()
    note.write_text(text)
    for _ in range(2):  # it is looked for again once TileLang has compiled
        assert tilelang_found.find(*CALL) is None
    assert_one_warning(caplog, str(note), reason, "TileLang is asked")


def test_a_note_that_cannot_be_read(noted, caplog):
    (note,) = (noted / "minitx").iterdir()
    note.unlink()
    note.mkdir()
    assert tilelang_found.find(*CALL) is None
    assert_one_warning(caplog, str(note), "IsADirectoryError")


def test_another_kernel_in_the_noted_ones_place(noted, caplog):
    keep(noted, content=b"a kernel cut sh")
    assert tilelang_found.find(*CALL) is None
    assert_one_warning(caplog, "executable.so is not the file that was noted")


def test_a_kernel_that_is_gone(noted, caplog):
    shutil.rmtree(noted / "0.1")
    assert tilelang_found.find(*CALL) is None
    assert_one_warning(caplog, "FileNotFoundError", "0.1/abc/executable.so")


def test_libraries_that_do_not_load(noted, monkeypatch, caplog):
    def fail(folder):
        raise OSError("undefined symbol\nand more")

    other = (*CALL[:2], KEY | {"HEAD_DIM": 128})
    tilelang_found.note(*other, keep(noted, "other"))
    monkeypatch.setattr(tilelang_found, "FoundKernel", fail)
    assert tilelang_found.find(*CALL) is None
    assert tilelang_found.find(*other) is None
    assert_one_warning(caplog, "(OSError: undefined symbol);")


def test_a_note_that_cannot_be_written(cache, caplog):
    (cache / "minitx").write_text("a file")
    for _ in range(2):
        tilelang_found.note(*CALL, keep(cache))
    assert_one_warning(caplog, str(cache / "minitx"), "FileExistsError")


def test_a_kernel_that_is_kept_elsewhere_is_not_noted(cache, tmp_path_factory, caplog):
    tilelang_found.note(*CALL, keep(tmp_path_factory.mktemp("elsewhere")))
    assert not (cache / "minitx").exists()
    assert_one_warning(caplog, "ValueError", "elsewhere")


def test_without_tilelang_there_are_no_notes(cache, monkeypatch, caplog):
    def fail(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(tilelang_found, "version", fail)
    tilelang_found.note(*CALL, keep(cache))
    assert tilelang_found.find(*CALL) is None
    assert not (cache / "minitx").exists()
    assert not caplog.records


def test_what_is_not_noted(cache, monkeypatch):
    def build_here(lang, **key):
        """Its source is not the package's."""

    compiled = keep(cache)
    tilelang_found.note(build_here, HOPPER, KEY, compiled)
    tilelang_found.note(build_attention_bwd_hopper, Target("c"), KEY, compiled)
    tilelang_found.note(*CALL, SimpleNamespace())  # TileLang's cache is off
    with monkeypatch.context() as patch:  # edited since it was imported
        patch.setattr(tilelang_found, "_hash_source", lambda: "another")
        tilelang_found.note(*CALL, compiled)
    with monkeypatch.context() as patch:  # in an archive
        patch.setattr(tilelang_found, "SOURCE", "")
        patch.setattr(tilelang_found, "_hash_source", lambda: "")
        tilelang_found.note(*CALL, compiled)
    assert not (cache / "minitx").exists()


def test_every_file_of_the_package_counts(tmp_path, monkeypatch):
    for path in tilelang_found.FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(tilelang_found, "FOLDER", tmp_path)
    assert tilelang_found._hash_source() == tilelang_found.SOURCE
    with (tmp_path / "tilelang_wgmma.py").open("a") as file:
        file.write("# edited\n")
    assert tilelang_found._hash_source() != tilelang_found.SOURCE


COMPILE = """
import sys
from minitx.kernels.tilelang_attention_bwd_rows import build_attention_bwd_prepare
from minitx.kernels.tilelang_runtime import Target, compile_kernel
key = {"dtype": "bfloat16", "HEAD_DIM": 64, "WITH_DLSE": False}
kernel = compile_kernel(build_attention_bwd_prepare, Target("cuda", "sm_90a"), **key)
try:
    kernel._main()
except (RuntimeError, TypeError) as error:
    print("tilelang" in sys.modules, hash(kernel.source), error)
"""


def run(script: str, cache: Path) -> str:
    environment = {"TILELANG_CACHE_DIR": str(cache), "PYTHONHASHSEED": "0"}
    process = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_a_second_process_does_without_tilelang(tmp_path):
    if problem := runtime._nvcc_problem():
        pytest.skip(problem)
    first, second = run(COMPILE, tmp_path), run(COMPILE, tmp_path)
    assert first.startswith("True ")
    assert "attention_bwd_prepare" in first  # its own check of its arguments, in C
    assert second == first.replace("True", "False")


FIRST_STEP = """
import sys
import torch
from minitx.testing import make_qkv, run_attention
q, k, v = make_qkv(2, 4, 2, 300, 300, 64, device="cuda", dtype=torch.bfloat16)
result = run_attention("tilelang", q, k, v, torch.ones_like(q), is_causal=True)
sums = [getattr(result, name).double().sum().item() for name in ("out", "dq", "dk", "dv")]
print("tilelang" in sys.modules, sums)
"""


@pytest.mark.gpu
def test_a_first_step_without_tilelang_gives_the_same(tmp_path):
    if not takes_hopper_kernels(torch.bfloat16, torch.device("cuda", 0)):
        pytest.skip("needs a GPU of compute capability 9.0")
    first, second = run(FIRST_STEP, tmp_path), run(FIRST_STEP, tmp_path)
    assert first.startswith("True ")
    assert second == first.replace("True", "False")


def test_a_library_that_a_kernel_calls_is_open_to_it(monkeypatch):
    """As symbols are bound when first used, the lack of one would end the process only then."""
    opened = {}

    def open_library(path, mode):
        opened[Path(path).name] = mode

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    tilelang_found._load_libraries.__wrapped__()
    assert opened["libtvm_runtime.so"] & ctypes.RTLD_GLOBAL
    assert list(opened) == ["libtvm_runtime.so", "libtilelang.so"]
