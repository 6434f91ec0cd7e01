"""Model FLOP/s utilisation: the share of a device's peak that the model's own products take."""

import torch

from minitx.model import GPTConfig

# Dense bfloat16 tensor-core peaks in FLOP/s, from the vendors' datasheets, by a part of the name
# that torch.cuda.get_device_name gives. A device that is not here has no MFU.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s that the device could do at best in bfloat16, or None if it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def flops_per_token(config: GPTConfig, seq_len: int) -> float:
    """Floating-point operations to train on one token, forward and backward, at a context of
    seq_len.

        6 N + 12 n_layer n_head head_dim * (seq_len + 1) / 2

    N counts the weights that multiply (linear layers and the output head; not embeddings, norms,
    biases): 2 operations forward and 4 backward each. Attention multiplies twice (q k^T, p v) over
    on average (seq_len + 1) / 2 visible keys; the skipped upper triangle is not counted as work.
    Recomputation is not counted either: this is model FLOPs, as in PaLM (arXiv:2204.02311, appendix
    B), made causal.
    """
    assert config.vocab_size is not None
    H, Hkv, D, E = config.n_head, config.kv_heads, config.head_width, config.n_embd
    attention_weights = E * (H + 2 * Hkv) * D + H * D * E
    mlp_weights = (3 if config.mlp == "swiglu" else 2) * E * config.mlp_width
    n = config.n_layer * (attention_weights + mlp_weights) + E * config.vocab_size
    return 6.0 * n + 12.0 * config.n_layer * H * D * (seq_len + 1) / 2


def mfu(
    device: torch.device, model: GPTConfig, seq_len: int, tok_per_s: float | None
) -> float | None:
    """Share of the device's bfloat16 peak that the model's own FLOPs take; None if unknown."""
    peak = peak_flops(device)
    if peak is None or tok_per_s is None:
        return None
    return tok_per_s * flops_per_token(model, seq_len) / peak
