"""Hugging Face folders: the transformers library's own logits, where it is installed; and what is
refused, which needs no more than the files."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from eval_runs import TEXT, make_run, nll_of, one_line, report_of, run_eval
from safetensors.torch import load_file, save_file

from minitx.checkpoint import CheckpointError
from minitx.generate import main as generate_main
from minitx.hf import load_hf, read_config
from minitx.tokenizer import ByteTokenizer
from minitx.trained import find_trained, load_trained, trained_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 300,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 16}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
# name -> config.json; each has a mistake in it that no other one shows
MODELS = {
    "gpt2": GPT2,  # Conv1D, learned positions, biases
    "gpt2-untied": GPT2 | {"tie_word_embeddings": False, "n_inner": 40},
    "llama": LLAMA,  # key heads shared, as in SmolLM2
    "llama-untied": LLAMA | {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "llama-bias": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-3": LLAMA | {"rope_parameters": LLAMA3},
    "llama-yarn": LLAMA | {"rope_parameters": YARN},
    "llama-linear": LLAMA | {"rope_parameters": YARN | {"rope_type": "linear"}},
    "qwen3": QWEN3,  # norms on queries and keys, heads wider than n_embd / n_head
}
del MODELS["llama-linear"]["rope_parameters"]["original_max_position_embeddings"]


def names_and_shapes(config: dict) -> dict[str, list[int]]:
    """The tensors of a folder of this config, written out by hand."""
    E, V = 32, 300
    if config["architectures"] == ["GPT2LMHeadModel"]:
        shapes = {"wte.weight": [V, E], "wpe.weight": [64, E]}
        for layer in ("h.0.", "h.1."):
            for name, rows, columns in (
                ("attn.c_attn", E, 3 * E),
                ("attn.c_proj", E, E),
                ("mlp.c_fc", E, 4 * E),
                ("mlp.c_proj", 4 * E, E),
            ):
                shapes |= {f"{layer}{name}.weight": [rows, columns]}
                shapes |= {f"{layer}{name}.bias": [columns]}
            shapes |= {f"{layer}ln_{i}.{kind}": [E] for i in (1, 2) for kind in ("weight", "bias")}
        return shapes | {"ln_f.weight": [E], "ln_f.bias": [E]}
    D, F = config.get("head_dim", 8), 48
    shapes = {"model.embed_tokens.weight": [V, E], "model.norm.weight": [E]}
    for layer in ("model.layers.0.", "model.layers.1."):
        attention = {"q_proj": [4 * D, E], "k_proj": [2 * D, E], "v_proj": [2 * D, E]}
        attention |= {"o_proj": [E, 4 * D]}
        if config["architectures"] == ["Qwen3ForCausalLM"]:
            attention |= {"q_norm": [D], "k_norm": [D]}
        mlp = {"gate_proj": [F, E], "up_proj": [F, E], "down_proj": [E, F]}
        shapes |= {f"{layer}self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{layer}mlp.{name}.weight": shape for name, shape in mlp.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{layer}{name}.weight": [E] for name in norms}
    return shapes


def make_folder(folder: Path, config: dict, prefix: str = "") -> Path:
    """A folder of random weights, with a tokenizer of bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        prefix + name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in names_and_shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ByteTokenizer().save(folder / "tokenizer.json")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITX_CACHE_DIR", str(tmp_path / "cache"))


# -- against transformers -------------------------------------------------------------------------


def oracle(config: dict):
    """A random model of the transformers library, with this config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers", minversion="5.0")
        transformers.logging.set_verbosity_error()
        name = config["architectures"][0]
        kind = name.removesuffix("LMHeadModel").removesuffix("ForCausalLM")
        torch.manual_seed(0)
        settings = {k: v for k, v in config.items() if k != "architectures"}
        model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**settings))
    with torch.no_grad():  # far from uniform attention, norms and biases that are not 1 and 0
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (parameter == 1))
    return model.float().eval()


def save(model, folder: Path, **how) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **how)
    return folder


@torch.no_grad()
def check_logits(model, folder: Path, kernel: str = "eager") -> None:
    tokens = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(1))
    want = model(tokens).logits
    ours, state = load_hf(folder, kernel=kernel)
    torch.testing.assert_close(ours(tokens), want, atol=1e-5, rtol=0)
    assert want.std() > 0.1
    assert (state["step"], state["model_config"]["n_layer"]) == (None, 2)
    assert not ours.training


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(name, tmp_path):
    model = oracle(MODELS[name])
    check_logits(model, save(model, tmp_path / "hf"))


def test_shards_and_another_kernel(tmp_path):
    model = oracle(QWEN3)
    folder = save(model, tmp_path / "hf", max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    check_logits(model, folder, "sdpa")


def test_names_as_published_checkpoints_have_them(tmp_path):
    """GPT-2's without a prefix and with its masks; Llama's with frequencies, and RoPE's settings in
    the words of transformers 4."""
    for config, prefix, more in (
        (GPT2, "transformer.", {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in (0, 1)}),
        (
            MODELS["llama-3"],
            "",
            {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in (0, 1)},
        ),
    ):
        model = oracle(config)
        folder = save(model, tmp_path / config["architectures"][0])
        tensors = load_file(folder / "model.safetensors")
        tensors = {name.removeprefix(prefix): t for name, t in tensors.items()}
        tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
        save_file(tensors | more, folder / "model.safetensors")
        spec = json.loads((folder / "config.json").read_text())
        if rope := spec.pop("rope_parameters", None):
            spec["rope_theta"] = rope.pop("rope_theta")
            rope["type"] = rope["rope_type"]
            spec["rope_scaling"] = rope
        (folder / "config.json").write_text(json.dumps(spec))
        check_logits(model, folder)


# -- from the files alone -------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])
def test_the_commands_take_a_folder(config, tmp_path, capsys):
    folder = make_folder(tmp_path / "hf", config)
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT[:150])
    (got,) = nll_of(folder, text, tmp_path / "out", "--context_lengths", 64)
    model, _ = load_hf(folder, kernel="eager")
    x = torch.tensor(list(TEXT[:65]))[None]
    (first,) = nll_of(
        *(folder, text, tmp_path / "first", "--context_lengths", 64),
        *("--max_tokens", 65),
    )
    want = model.token_losses(x[:, :-1], x[:, 1:]).mean().item()
    assert first == pytest.approx(want, abs=1e-5)
    assert got != first
    report = report_of(tmp_path / "out")
    assert (report["step"], report["trained_context"]) == (None, 64)
    assert f"model: {folder}, " in capsys.readouterr().out
    assert generate_main(["--checkpoint", str(folder), "--max_tokens", "5", "--device=cpu"]) == 0
    assert "5 tokens, " in capsys.readouterr().err


def test_rope_can_be_stretched_further(tmp_path):
    folder = make_folder(tmp_path / "hf", LLAMA | {"rope_parameters": LLAMA3})
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    args = ("--context_lengths", 128, "--rope_scaling", "yarn")
    nll_of(folder, text, tmp_path / "out", *args)
    report = report_of(tmp_path / "out")
    # Of the 16 tokens it was trained to, not of the 64 that llama3's scaling made of them.
    assert (report["rope_scaling"], report["rope_factor"]) == ("yarn", 8.0)
    assert report["trained_context"] == 16


REFUSED = [
    ({"architectures": ["MambaForCausalLM"]}, "unknown architecture MambaForCausalLM"),
    ({"architectures": None}, "unknown architecture None"),
    ({"sliding_window": 4096}, "sliding_window 4096 is not supported; expected null"),
    ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported; expected "silu"'),
    ({"rope_interleaved": True}, "rope_interleaved true is not supported; expected false"),
    ({"attention_bias": True, "mlp_bias": False}, "mlp_bias false is not supported"),
    ({"quantization_config": {"bits": 4}}, 'quantization_config {"bits": 4} is not supported'),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling dynamic is not"),
    ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
    ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0 is not"),
    ({"rope_parameters": YARN | {"mscale": 1.0}}, "RoPE setting mscale is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ({"num_attention_heads": 3, "num_key_value_heads": None}, "multiple of n_head"),
]
REFUSED += [  # values that no download has, unless it was edited or damaged
    ({"num_hidden_layers": None}, "num_hidden_layers is null; expected a whole number"),
    ({"hidden_size": "32"}, 'hidden_size is "32"; expected a whole number'),
    ({"vocab_size": 300.5}, "vocab_size is 300.5; expected a whole number"),
    ({"num_key_value_heads": 0}, "config.json: n_kv_head must be at least 1, got 0"),
    ({"intermediate_size": -1}, "config.json: mlp_hidden must be at least 1, got -1"),
    ({"max_position_embeddings": 10**14}, "position tables do not fit in memory"),
    ({"rms_norm_eps": "x"}, 'rms_norm_eps is "x"; expected a number'),
    ({"rope_theta": None}, "rope_theta is null; expected a number"),
    ({"rope_theta": 0}, "config.json: rope_base must be a finite number above 1, got 0.0"),
    ({"rope_scaling": "yarn"}, 'rope_scaling is "yarn"; expected an object'),
    ({"rope_scaling": ["yarn"]}, 'rope_scaling is ["yarn"]; expected an object'),
    ({"rope_scaling": YARN | {"factor": "x"}}, 'factor is "x"; expected a number'),
]
REFUSED_QWEN3 = [
    ({"use_sliding_window": True}, "use_sliding_window true is not supported"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"attention_bias": True}, "attention_bias true is not supported"),
]
REFUSED_GPT2 = [
    ({"activation_function": "relu"}, 'activation_function "relu" is not supported'),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true is not"),
    ({"scale_attn_weights": False}, "scale_attn_weights false is not"),
    ({"add_cross_attention": True}, "add_cross_attention true is not"),
]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [(LLAMA, *case) for case in REFUSED]
    + [(QWEN3, *case) for case in REFUSED_QWEN3]
    + [(GPT2, *case) for case in REFUSED_GPT2],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_this_model_does_not_have_is_refused(config, change, message, tmp_path, capsys):
    folder = make_folder(tmp_path / "hf", config)
    (folder / "config.json").write_text(json.dumps(config | change))
    assert run_eval("--checkpoint", folder) == 2
    assert message in one_line(capsys)
    assert not (folder / "eval" / "eval.json").exists()


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


K0 = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(K0), f"missing {K0}"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected extra"),
        (lambda t: rename(t, K0, K0 + "s"), f"missing {K0}; unexpected {K0}s"),
        (lambda t: t.update({K0: torch.ones(15, 32)}), "[[32, 32], [15, 32], [16, 32]]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight is [[31]]"),
        (lambda t: t.update({"lm_head.weight": torch.ones(300, 32)}), "is not the embedding"),
    ],
)
def test_weights_that_do_not_fit(change, message, tmp_path, capsys):
    folder = make_folder(tmp_path / "hf", LLAMA)
    edit(folder, change)
    assert run_eval("--checkpoint", folder) == 2
    error = one_line(capsys)
    assert message in error
    assert str(folder) in error


def test_conv1d_is_not_taken_for_a_linear_layer(tmp_path):
    folder = make_folder(tmp_path / "hf", GPT2)
    model, _ = load_hf(folder)
    stored = load_file(folder / "model.safetensors")
    # Square, so that only its values tell.
    torch.testing.assert_close(
        model.blocks[0].attn.proj.weight, stored["h.0.attn.c_proj.weight"].T, atol=0, rtol=0
    )
    torch.testing.assert_close(model.pos_embd.weight, stored["wpe.weight"], atol=0, rtol=0)
    edit(
        folder, lambda t: t.update({"h.0.mlp.c_fc.weight": t["h.0.mlp.c_fc.weight"].T.contiguous()})
    )
    with pytest.raises(CheckpointError, match=r"c_fc.weight is \[\[32, 128\]\], config.json says"):
        load_hf(folder)


def test_files_that_are_not_whole(tmp_path, capsys):
    good = make_folder(tmp_path / "good", LLAMA)

    def broken(name: str, message: str, **files: bytes | None) -> None:
        folder = Path(shutil.copytree(good, tmp_path / name))
        for file, content in files.items():
            path = folder / file.replace("__", ".")
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        assert run_eval("--checkpoint", folder) == 2
        error = one_line(capsys)
        assert message in error
        assert name in error

    weights = (good / "model.safetensors").read_bytes()
    for name, weight_map in (("lists", {"a": ["b"]}), ("numbers", {"a": 3}), ("blank", {"a": ""})):
        index = json.dumps({"weight_map": weight_map}).encode()
        broken(name, "names no files of its folder", model__safetensors__index__json=index)
    broken("torn", "is damaged", model__safetensors=weights[:-100])
    broken("empty", "is damaged", model__safetensors=b"")
    broken("pickled", "no such file; give", model__safetensors=None, pytorch_model__bin=b"x")
    broken("no-json", "it is no JSON", config__json=b"{")
    broken("a-list", "it holds no object", config__json=b"[]")
    broken("no-tokenizer", "tokenizer.json", tokenizer__json=None)
    lacking = {k: v for k, v in LLAMA.items() if k != "hidden_size"}
    broken("lacking", "lacks hidden_size", config__json=json.dumps(lacking).encode())
    index = "model__safetensors__index__json"
    outside = json.dumps({"weight_map": {"a": "../good/model.safetensors"}}).encode()
    broken("outside", "names no files of its folder", **{index: outside})
    gone = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
    broken("gone", "model-1.safetensors: no such file", **{index: gone})


def test_a_folder_that_minitx_wrote_is_not_taken_for_one(tmp_path):
    """Someone may keep a config.json of their own in a run's folder."""
    run = make_run(tmp_path / "run")
    (run / "config.json").write_text("{}")
    checkpoint = find_trained(run)
    assert checkpoint.name == "step_00000007"
    assert load_trained(checkpoint)[1]["step"] == 7
    assert trained_config(checkpoint)["n_embd"] == 16
    folder = make_folder(tmp_path / "hf", LLAMA)
    assert find_trained(folder) == folder
    assert trained_config(folder) == vars(read_config(folder))
