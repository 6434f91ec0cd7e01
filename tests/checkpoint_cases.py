"""What the tests of checkpoints save: a tiny model, its optimizer, and a fingerprint of both."""

import hashlib
from pathlib import Path

import torch

from minitx.checkpoint import save_checkpoint
from minitx.model import GPT, GPTConfig
from minitx.named_state import unwrap

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=16, max_seq_len=16, vocab_size=64, dropout=0.1)


def make(device="cpu", config=TINY, **options):
    """A model and its AdamW in two groups, as the trainer has them."""
    model = GPT(config, "eager").to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, **options)


def train(model, optimizer, count, device="cpu"):
    """Steps whose batches and dropout come from the global generators."""
    for _ in range(count):
        tokens = torch.randint(TINY.vocab_size, (2, 9)).to(device)
        loss = unwrap(model).loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fingerprint(model, optimizer=None):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
        for key, value in sorted(optimizer.state[parameter].items() if optimizer else ()):
            digest.update(key.encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


def save(run, step=10, model=None, optimizer=None, state=None, **options):
    if model is None:
        model, optimizer = make()
        train(model, optimizer, 1)
    return save_checkpoint(
        run, step=step, model=model, optimizer=optimizer, state=state or {}, **options
    )


def contents(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}
