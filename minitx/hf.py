"""Models in Hugging Face folders: config.json, model.safetensors (or its shards), tokenizer.json.

Three architectures, by the name in config.json: LlamaForCausalLM (Llama, SmolLM2), Qwen3ForCausalLM
and GPT2LMHeadModel. Only JSON and safetensors are read; the transformers library is not needed. A
setting that the model here does not have (a sliding window, say) is refused, since leaving it out
would give another function.

    theirs                               ours
    q_proj, k_proj, v_proj   [*, E]      attn.qkv   one over the other
    gate_proj, up_proj       [*, E]      mlp.up     one over the other
    GPT-2's Conv1D           [in, out]   Linear     [out, in], transposed
    rotate-half RoPE                     the same (rope.py)
"""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minitx.checkpoint import CheckpointError
from minitx.model import GPT, GPTConfig
from minitx.named_state import named_tensors
from minitx.rope import LLAMA3_FAST, LLAMA3_SLOW, YARN_FAST, YARN_SLOW

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = WEIGHTS + ".index.json"

Spec = dict[str, Any]  # the content of config.json

# Our module -> theirs; several are put one over the other. Inside of blocks.N, then outside.
LLAMA_LAYER = {
    "attn_norm": ["input_layernorm"],
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "mlp_norm": ["post_attention_layernorm"],
    "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.proj": ["mlp.down_proj"],
}
LLAMA_MODEL = {"tok_embd": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
GPT2_LAYER = {
    "attn_norm": ["ln_1"],
    "attn.qkv": ["attn.c_attn"],
    "attn.proj": ["attn.c_proj"],
    "mlp_norm": ["ln_2"],
    "mlp.up": ["mlp.c_fc"],
    "mlp.proj": ["mlp.c_proj"],
}
GPT2_MODEL = {"tok_embd": "wte", "pos_embd": "wpe", "norm": "ln_f", "head": "lm_head"}
# Settings by the kind of their values.
MAY_BE_NULL = {"num_key_value_heads", "head_dim", "n_inner"}
WHOLE_NUMBERS = MAY_BE_NULL | {
    *("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size"),
    *("max_position_embeddings", "original_max_position_embeddings", "vocab_size"),
    *("n_layer", "n_head", "n_embd", "n_positions"),
}
NUMBERS = {"rms_norm_eps", "layer_norm_epsilon", "rope_theta", "factor"}
ROPE_OBJECTS = {"rope_parameters", "rope_scaling"}
# Masks and frequencies that old versions stored beside the weights.
NO_WEIGHTS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq")
CONV1D = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")


def is_hf_folder(path: Path) -> bool:
    """Whether a folder is one of Hugging Face's, and not one that minitx wrote."""
    own = (path / "state.json").exists() or (path / "checkpoints").exists()
    return (path / CONFIG).is_file() and not own


def read_config(folder: Path) -> GPTConfig:
    """config.json as a GPTConfig. Raises CheckpointError for what this model cannot express."""
    path = folder / CONFIG
    spec = _read_json(path)
    names = spec.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    readers = {
        "LlamaForCausalLM": _llama,
        "Qwen3ForCausalLM": _qwen3,
        "GPT2LMHeadModel": _gpt2,
    }
    if not isinstance(name, str) or name not in readers:
        raise CheckpointError(f"{path}: unknown architecture {name}; expected {', '.join(readers)}")
    _require(path, spec, quantization_config=None)
    _check_kinds(path, spec)
    try:
        return GPTConfig(**readers[name](path, spec))
    except KeyError as error:
        raise CheckpointError(
            f"{path} lacks {error.args[0]}, which {name} needs; download the folder again"
        ) from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def load_hf(
    folder: Path,
    *,
    kernel: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    overrides: dict[str, Any] | None = None,
) -> tuple[GPT, dict[str, Any]]:
    """The model of a Hugging Face folder, in evaluation mode, and what is known of it.

    Arguments as in checkpoint.load_model. Raises CheckpointError for an architecture or a setting
    that this model does not have, for files that are missing or damaged, and for missing,
    unexpected or misshapen tensors, by name.
    """
    config = dataclasses.replace(read_config(folder), **overrides or {})
    with torch.device("meta"):
        model = GPT(config, kernel)
    own = named_tensors(model)
    with contextlib.ExitStack() as stack:
        stored = _open_all(folder, stack)
        wanted = {name: _sources(name, config) for name in own}
        _check_names(folder, own, wanted, stored)
        if config.tie_embeddings and "lm_head.weight" in stored:
            embedding = _read(stored, wanted["tok_embd.weight"][0])
            if not torch.equal(_read(stored, "lm_head.weight"), embedding):
                raise CheckpointError(
                    f"{folder}: lm_head.weight is not the embedding, though {CONFIG} ties them; "
                    "set tie_word_embeddings to false there"
                )
        weights = {
            name: torch.cat([_read(stored, source) for source in sources]).to(device, dtype)
            for name, sources in wanted.items()
        }
    model.load_state_dict(weights, assign=True)
    state = {"step": None, "config": {}, "model_config": dataclasses.asdict(config)}
    return model.to(device).eval(), state


# -- config.json --------------------------------------------------------------------------------


def _check_kinds(path: Path, spec: Spec) -> None:
    """Raises CheckpointError for a value that is no number, or no object, where one is meant."""
    for name, value in spec.items():
        if name in WHOLE_NUMBERS:
            right = type(value) is int or (value is None and name in MAY_BE_NULL)
            expected = "a whole number"
        elif name in NUMBERS:
            right, expected = type(value) in (int, float), "a number"
        elif name in ROPE_OBJECTS:
            right, expected = isinstance(value, dict | None), "an object"
            if isinstance(value, dict):
                _check_kinds(path, {k: v for k, v in value.items() if v is not None})
        else:
            continue
        if not right:
            raise CheckpointError(
                f"{path} is damaged: {name} is {json.dumps(value)}; expected {expected}"
            )


def _require(path: Path, spec: Spec, **values: object) -> None:
    """Raises CheckpointError for a setting that is there and has another value."""
    for name, value in values.items():
        if spec.get(name, value) != value:
            raise CheckpointError(
                f"{path}: {name} {json.dumps(spec[name])} is not supported; expected "
                f"{json.dumps(value)}"
            )


def _llama(path: Path, spec: Spec) -> dict[str, Any]:
    has_bias = bool(spec.get("attention_bias", False))
    # Here all linear layers have a bias, or none.
    _require(path, spec, mlp_bias=has_bias, sliding_window=None)
    return _llama_like(path, spec) | {"bias": has_bias, "head_dim": spec.get("head_dim")}


def _qwen3(path: Path, spec: Spec) -> dict[str, Any]:
    _require(path, spec, attention_bias=False, use_sliding_window=False)
    return _llama_like(path, spec) | {"qk_norm": True, "head_dim": spec["head_dim"]}


def _llama_like(path: Path, spec: Spec) -> dict[str, Any]:
    n_layer = spec["num_hidden_layers"]
    _require(path, spec, hidden_act="silu", rope_interleaved=False)
    _require(path, spec, layer_types=["full_attention"] * n_layer)
    return {
        "n_layer": n_layer,
        "n_head": spec["num_attention_heads"],
        "n_kv_head": spec.get("num_key_value_heads"),
        "n_embd": spec["hidden_size"],
        "max_seq_len": spec["max_position_embeddings"],
        "vocab_size": spec["vocab_size"],
        "norm": "rms",
        "norm_eps": spec.get("rms_norm_eps", 1e-6),
        "mlp": "swiglu",
        "mlp_hidden": spec["intermediate_size"],
        "tie_embeddings": spec.get("tie_word_embeddings", False),
        **_rope(path, spec),
    }


def _rope(path: Path, spec: Spec) -> dict[str, Any]:
    """RoPE's settings: `rope_parameters` as of transformers 5, `rope_scaling` before."""
    given = spec.get("rope_parameters") or spec.get("rope_scaling") or {}
    usual: dict[str, Any] = {"partial_rotary_factor": 1.0}  # and what rope.py has as constants
    rope = {"rope_theta": 10_000.0} | {
        name: spec[name] for name in ("rope_theta", *usual) if name in spec
    }
    rope |= {name: value for name, value in given.items() if value is not None}
    kind = rope.pop("rope_type", rope.get("type", "default"))
    rope.pop("type", None)  # the older name
    fields: dict[str, Any] = {"pos": "rope", "rope_base": float(rope.pop("rope_theta"))}
    if kind in ("linear", "llama3", "yarn"):
        factor = float(rope.pop("factor"))
        fields |= {"rope_scaling": kind, "rope_factor": factor}
    elif kind != "default":
        raise CheckpointError(
            f"{path}: RoPE scaling {kind} is not supported; expected linear, yarn or llama3"
        )
    if kind in ("llama3", "yarn"):
        fields["rope_trained_len"] = rope.pop("original_max_position_embeddings", None)
    if kind == "llama3":
        usual |= {"low_freq_factor": LLAMA3_SLOW, "high_freq_factor": LLAMA3_FAST}
    elif kind == "yarn":
        usual |= {"beta_fast": YARN_FAST, "beta_slow": YARN_SLOW, "truncate": True}
    if unknown := sorted(rope.keys() - usual.keys()):
        raise CheckpointError(
            f"{path}: RoPE setting {', '.join(unknown)} is not supported with {kind}"
        )
    _require(path, rope, **usual)
    return fields


def _gpt2(path: Path, spec: Spec) -> dict[str, Any]:
    _require(
        path,
        spec,
        activation_function="gelu_new",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    return {
        "n_layer": spec["n_layer"],
        "n_head": spec["n_head"],
        "n_embd": spec["n_embd"],
        "max_seq_len": spec["n_positions"],
        "vocab_size": spec["vocab_size"],
        "pos": "learned",
        "norm": "layer",
        "norm_eps": spec.get("layer_norm_epsilon", 1e-5),
        "mlp": "gelu",
        "mlp_hidden": spec.get("n_inner"),
        "tie_embeddings": spec.get("tie_word_embeddings", True),
        "bias": True,
    }


# -- weights ------------------------------------------------------------------------------------


def _sources(name: str, config: GPTConfig) -> list[str]:
    """Their names of what makes up our tensor."""
    module, _, kind = name.rpartition(".")
    is_gpt2 = config.pos == "learned"
    layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
    if layer is None:
        return [f"{(GPT2_MODEL if is_gpt2 else LLAMA_MODEL)[module]}.{kind}"]
    prefix = f"h.{layer[1]}" if is_gpt2 else f"model.layers.{layer[1]}"
    parts = (GPT2_LAYER if is_gpt2 else LLAMA_LAYER)[layer[2]]
    return [f"{prefix}.{part}.{kind}" for part in parts]


def _open_all(folder: Path, stack: contextlib.ExitStack) -> dict[str, tuple[Any, str]]:
    """Every tensor's name, without GPT-2's prefix, -> its open file and its name there."""
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        named = list(weight_map.values()) if isinstance(weight_map, dict) else []
        files = sorted({file for file in named if isinstance(file, str) and file})
        if not files or any(file not in files or Path(file).name != file for file in named):
            raise CheckpointError(f"{folder / INDEX} is damaged: it names no files of its folder")
    else:
        files = [WEIGHTS]
    stored: dict[str, tuple[Any, str]] = {}
    for file in files:
        path = folder / file
        if not path.is_file():
            raise CheckpointError(
                f"{path}: no such file; give a folder with its weights in safetensors"
            )
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}; download it again") from error
        for name in sorted(opened.keys()):
            ours = name.removeprefix("transformer.")
            if not NO_WEIGHTS.fullmatch(ours):
                stored[ours] = (opened, name)
    return stored


def _read(stored: dict[str, tuple[Any, str]], name: str) -> torch.Tensor:
    opened, full_name = stored[name]
    tensor = opened.get_tensor(full_name)
    return tensor.T if CONV1D.fullmatch(name) else tensor


def _check_names(
    folder: Path,
    own: dict[str, torch.Tensor],
    wanted: dict[str, list[str]],
    stored: dict[str, tuple[Any, str]],
) -> None:
    """Raises CheckpointError for tensors that are missing, unexpected or of another shape."""
    names = {source for sources in wanted.values() for source in sources}
    extra = stored.keys() - names - ({"lm_head.weight"} if "head.weight" not in own else set())
    problems = [
        f"{what} {', '.join(sorted(some))}"
        for what, some in (("missing", names - stored.keys()), ("unexpected", extra))
        if some
    ]
    for name, sources in wanted.items():
        if any(source not in stored for source in sources):
            continue
        shapes = [stored[source][0].get_slice(stored[source][1]).get_shape() for source in sources]
        shapes = [
            s[::-1] if CONV1D.fullmatch(n) else s for n, s in zip(sources, shapes, strict=True)
        ]
        whole = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        expected = list(own[name].shape)
        if whole != expected or any(shape[1:] != expected[1:] for shape in shapes):
            problems.append(f"{' + '.join(sources)} is {shapes}, {CONFIG} says {expected} in all")
    if problems:
        raise CheckpointError(f"{folder} does not fit its {CONFIG}: {'; '.join(problems)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON; download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object; download it again")
    return content
