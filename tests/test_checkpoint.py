"""Checkpoints: exact to resume, free of wrappers, and built into a model again."""

import ast
import copy
import dataclasses
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import TINY, fingerprint, make, save, train
from safetensors.torch import load_file
from torch import nn

from minitx.checkpoint import (
    CheckpointError,
    find_checkpoint,
    load_into,
    load_model,
    load_state,
    random_state,
    restore_random_state,
)
from minitx.model import GPT
from minitx.tensor_file import DTYPE_NAMES, write_tensors


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other over tensors this small cost far more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- Resuming ---------------------------------------------------------------------------------

RESUME = """
import sys
import torch
from pathlib import Path
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from checkpoint_cases import fingerprint, make, train
from minitx.checkpoint import find_checkpoint, load_into, restore_random_state
from test_checkpoint import OPTIMIZERS
for name, options in OPTIMIZERS.items():
    torch.manual_seed(123)  # another one than the run's
    model, optimizer = make(**options)
    state = load_into(find_checkpoint(Path({run!r}) / name), model, optimizer)
    restore_random_state(state["random_state"])
    train(model, optimizer, 10)
    print(name, fingerprint(model, optimizer))
"""
OPTIMIZERS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "max": {"amsgrad": True}}


def test_ten_steps_and_ten_more_in_a_fresh_process_are_twenty(tmp_path):
    """Weights and moments bit for bit, with dropout: random states, moments and steps all count."""
    unbroken = {}
    for name, options in OPTIMIZERS.items():
        torch.manual_seed(0)
        model, optimizer = make(**options)
        train(model, optimizer, 10)
        save(tmp_path / name, 10, model, optimizer)
        train(model, optimizer, 10)
        unbroken[name] = fingerprint(model, optimizer)
    script = RESUME.format(tests=str(Path(__file__).parent), run=str(tmp_path))
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert dict(line.split() for line in result.stdout.splitlines()) == unbroken


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_resume_on_a_gpu_is_bitwise_and_saving_takes_no_gpu_memory(tmp_path, fused):
    torch.manual_seed(0)
    model, optimizer = make("cuda", fused=fused)
    train(model, optimizer, 10, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    save(tmp_path, 10, model, optimizer)
    assert torch.cuda.max_memory_allocated() == before
    train(model, optimizer, 10, "cuda")

    resumed, its_optimizer = make("cuda", fused=fused)
    state = load_into(find_checkpoint(tmp_path), resumed, its_optimizer)
    assert len(state["random_state"]["cuda"]) == torch.cuda.device_count()
    restore_random_state(state["random_state"])
    train(resumed, its_optimizer, 10, "cuda")
    assert fingerprint(resumed, its_optimizer) == fingerprint(model, optimizer)
    loaded, _ = load_model(tmp_path, device="cuda", dtype=torch.bfloat16)
    assert {t.device.type for t in [*loaded.parameters(), *loaded.buffers()]} == {"cuda"}


def test_random_states_come_back_through_json():
    """Each generator in mid-pair: a normal drawn in twos is half used up."""

    def draw():
        return (
            [random.gauss(0, 1) for _ in range(3)],
            np.random.standard_normal(3).tolist(),
            torch.randn(3).tolist(),
        )

    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(1)
    state = json.loads(json.dumps(random_state()))
    expected = draw()
    assert draw() != expected
    restore_random_state(state)
    assert draw() == expected


def test_hyperparameters_are_the_stored_ones_and_how_it_runs_is_its_own(tmp_path):
    model, optimizer = make(fused=True)
    train(model, optimizer, 1)
    optimizer.param_groups[0] |= {"lr": 1 / 3, "initial_lr": 0.7}
    checkpoint = save(tmp_path, 1, model, optimizer)
    model, optimizer = make(foreach=True)
    optimizer.param_groups[0]["lr"] = torch.tensor(1.0)  # as a compiled step wants it
    load_into(checkpoint, model, optimizer)
    first, second = optimizer.param_groups
    assert isinstance(first["lr"], torch.Tensor)
    assert first["lr"] == torch.tensor(1 / 3)
    assert (first["initial_lr"], second["lr"], second["weight_decay"]) == (0.7, 1e-2, 0.0)
    assert first["betas"] == (0.9, 0.999)
    assert isinstance(first["betas"], tuple)
    assert first["foreach"]
    assert not first["fused"]


# --- Names, wrappers, ties, layouts -----------------------------------------------------------


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def wrap(model, how):
    match how:
        case "compiled":
            return torch.compile(model, backend="eager")
        case "compiled block":
            model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
            return model
        case "ddp of compiled":
            return nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
        case "compiled ddp":
            return torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    return model


WRAPPINGS = ("plain", "compiled", "compiled block", "ddp of compiled", "compiled ddp")


# Dynamo looks at the .grad of a block's input, which is no leaf, and hides the warning by logging.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", WRAPPINGS)
def test_wrappers_leave_no_trace_in_a_checkpoint(tmp_path, process_group, how):
    plain = GPT(TINY, "eager")
    names = set(plain.state_dict())
    wrapped = wrap(copy.deepcopy(plain), how)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    checkpoint = save(tmp_path / "run", 1, wrapped, optimizer)
    assert set(load_file(checkpoint / "model.safetensors")) == names
    moments = set(load_file(checkpoint / "optimizer.safetensors"))
    assert moments == {f"{n}.{k}" for n in names for k in ("step", "exp_avg", "exp_avg_sq")}

    expected = fingerprint(wrapped, optimizer)
    for other in WRAPPINGS:
        model = wrap(GPT(TINY, "eager"), other)
        its_optimizer = torch.optim.AdamW(model.parameters())
        load_into(checkpoint, model, its_optimizer)
        assert fingerprint(model, its_optimizer) == expected, other
    model, _ = load_model(tmp_path / "run", kernel="eager")
    assert fingerprint(model) == fingerprint(wrapped)


def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path):
    checkpoint = save(tmp_path)
    assert "head.weight" not in load_file(checkpoint / "model.safetensors")
    model, _ = load_model(checkpoint, kernel="eager")
    assert model.output_weight is model.tok_embd.weight


class TwoNames(nn.Module):
    """A model with one weight under two names, and a weight stored column by column."""

    def __init__(self):
        super().__init__()
        self.config = TINY
        self.first = nn.Linear(3, 5, bias=False)
        self.second = nn.Linear(3, 5, bias=False)
        self.second.weight = self.first.weight
        self.columns = nn.Parameter(torch.randn(4, 6).t())


def test_shared_and_non_contiguous_tensors(tmp_path):
    model = TwoNames()
    checkpoint = save(tmp_path, 1, model, None)
    stored = load_file(checkpoint / "model.safetensors")
    assert set(stored) == {"columns", "first.weight"}
    assert torch.equal(stored["columns"], model.columns)
    other = TwoNames()
    load_into(checkpoint, other)
    assert torch.equal(other.columns, model.columns)
    assert torch.equal(other.second.weight, model.first.weight)
    assert other.second.weight is other.first.weight


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    """Every dtype, a scalar, an empty tensor; each begins at a multiple of its element size."""
    tensors = {name: torch.arange(3).to(dtype) for dtype, name in DTYPE_NAMES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "a": torch.ones(1) > 0}
    tensors["expanded"] = torch.tensor([1.0, 2.0]).expand(3, 2)
    entry = write_tensors(tmp_path / "x.safetensors", tensors)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    stored = load_file(tmp_path / "x.safetensors")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name], tensor)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}


def pickles(node: ast.AST) -> bool:
    """Whether a piece of code imports what pickles, or asks PyTorch or NumPy for it."""
    match node:
        case ast.Import(names):
            return bool(PICKLERS & {name.name.split(".")[0] for name in names})
        case ast.ImportFrom(str(module), names):
            is_torch = module in ("torch", "torch.serialization")
            return module.split(".")[0] in PICKLERS or (
                is_torch and bool({"save", "load"} & {name.name for name in names})
            )
        case ast.Attribute(ast.Name("torch"), "save" | "load") | ast.keyword("allow_pickle"):
            return True
    return False


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    import json, pickle as p",
        "from dill import dumps",
        "from torch import nn, load",
        "torch.save(state, path)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_what_pickles_is_found(code):
    assert any(map(pickles, ast.walk(ast.parse(code))))


def test_nothing_is_pickled(tmp_path):
    """A pickle runs what its writer put in it, and PyTorch refuses one that holds a config."""
    folder = save(tmp_path)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    root = Path(__file__).parent.parent
    sources = [p for name in ("minitx", "kernels") for p in (root / name).rglob("*.py")]
    assert len(sources) > 50
    for path in sources:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not any(map(pickles, nodes)), path


# --- load_model -------------------------------------------------------------------------------


def test_load_model_builds_it_from_the_checkpoint(tmp_path):
    config = dataclasses.replace(TINY, tie_embeddings=False, qk_norm=True, n_kv_head=1)
    model, optimizer = make(config=config)
    save(tmp_path, 3, model, optimizer, {"tokens_seen": 7, "best": float("inf")})
    before = random_state()
    loaded, state = load_model(tmp_path, kernel="sdpa")
    assert random_state() == before  # nothing was drawn for weights that are then replaced
    assert (state["step"], state["tokens_seen"], state["best"]) == (3, 7, float("inf"))
    assert state["model_config"] == dataclasses.asdict(config)
    assert set(state["versions"]) == {"python", "minitx", "torch", "numpy", "triton", "tilelang"}
    assert loaded.config == config
    assert not loaded.training
    assert loaded.blocks[0].attn.kernel == "sdpa"
    assert fingerprint(loaded) == fingerprint(model)
    tokens = torch.arange(16)[None]
    loaded.set_kernel("eager")
    assert torch.equal(loaded(tokens), model.eval()(tokens))

    half, _ = load_model(tmp_path, dtype=torch.bfloat16)
    assert half.rope.cos.dtype == torch.float32
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16())


def test_load_model_outlives_its_files(tmp_path):
    """The weights are copies, not windows on a file that may be pruned or written over."""
    checkpoint = save(tmp_path)
    model, _ = load_model(tmp_path)
    expected = fingerprint(model)
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (checkpoint / "model.safetensors").stat().st_size)
    assert fingerprint(model) == expected


def test_overrides(tmp_path):
    save(tmp_path)
    overrides = {"rope_scaling": "linear", "rope_factor": 2.0}
    model, state = load_model(tmp_path, overrides=overrides)
    plain, _ = load_model(tmp_path)
    assert torch.equal(model.rope.cos[2], plain.rope.cos[1])
    assert state["model_config"]["rope_scaling"] == "none"  # what was saved
    with pytest.raises(CheckpointError, match="no field ropes_scaling; expected some of bias"):
        load_model(tmp_path, overrides={"ropes_scaling": "linear"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_embeddings": False}, r"missing head\.weight; use"),
        ({"n_layer": 1}, r"unexpected blocks\.1\.attn\.proj\.weight, blocks\.1\.attn\.qkv"),
        ({"vocab_size": 65}, r"tok_embd\.weight is \[64, 16\], the model's is \[65, 16\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, message):
    checkpoint = save(tmp_path)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors does not fit.*{message}"):
        load_model(tmp_path, overrides=change)
    model, optimizer = make(config=dataclasses.replace(TINY, **change))
    before = fingerprint(model)
    with pytest.raises(CheckpointError, match=message):
        load_into(checkpoint, model)
    with pytest.raises(CheckpointError, match=r"parameter groups|tok_embd"):
        load_into(checkpoint, model, optimizer)
    assert fingerprint(model) == before


def test_load_into_is_exact_or_refuses(tmp_path):
    checkpoint = save(tmp_path)
    with pytest.raises(CheckpointError, match=r"is F32, the model's is BF16"):
        load_into(checkpoint, GPT(TINY).bfloat16())
    model, _ = make()
    one_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"\(9 \+ 5 parameters\) are not this .*\(14\)"):
        load_into(checkpoint, model, one_group)
    model, optimizer = make()
    without = save(tmp_path, 11, model, None)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        load_into(without, model, optimizer)
    with pytest.raises(ValueError, match="not the model's"):
        save(tmp_path, 12, GPT(TINY), optimizer)


def test_state_is_checked_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="agree with step 10"):
        save(tmp_path, state={"step": 9})
    with pytest.raises(ValueError, match="not hold format"):
        save(tmp_path, state={"files": []})
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, state={"path": tmp_path})
    assert list(tmp_path.iterdir()) == []
    given = {"random_state": {"ranks": [1, 2]}, "step": 10}
    assert load_state(save(tmp_path, state=given))["random_state"] == {"ranks": [1, 2]}
