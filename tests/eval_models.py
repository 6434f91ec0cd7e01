"""Models to evaluate: one whose probabilities are known, and a GPT of a few weights."""

import torch

from minitx.model import GPT, GPTConfig


class Bigram:
    """logits of what follows token t: row t of a table [V, V]."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.output_weight = logits.T.contiguous()
        self.calls: list[torch.Tensor] = []

    def hidden(self, tokens: torch.Tensor, cache: object = None) -> torch.Tensor:
        self.calls.append(tokens)
        return torch.nn.functional.one_hot(tokens, self.output_weight.shape[1]).float()


def tiny_gpt(**settings) -> GPT:
    torch.manual_seed(0)
    config = dict(n_layer=2, n_head=2, n_embd=16, max_seq_len=32, vocab_size=50) | settings
    model = GPT(GPTConfig(**config), "eager").eval()
    with torch.no_grad():  # larger weights: attention that is far from uniform
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(8)
    return model
