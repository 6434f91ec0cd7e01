"""The states of every global random generator, as JSON holds them."""

import base64
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """States of Python's, NumPy's and PyTorch's global generators: CPU, and each CUDA device once
    CUDA is in use."""
    version, words, gauss_next = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return {
        "python": {
            "version": version,
            "words": _encode(np.array(words, dtype=np.uint32)),
            "gauss_next": gauss_next,
        },
        "numpy": {
            "words": _encode(legacy["state"]["key"]),
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
        "torch": _encode(torch.get_rng_state().numpy()),
        "cuda": [_encode(torch.cuda.get_rng_state(i).numpy()) for i in cuda],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets what random_state() gave. CUDA devices that this machine lacks are passed over."""
    python, legacy = state["python"], state["numpy"]
    words = tuple(_decode(python["words"], np.uint32).tolist())
    random.setstate((python["version"], words, python["gauss_next"]))
    key = _decode(legacy["words"], np.uint32)
    np.random.set_state(("MT19937", key, legacy["pos"], legacy["has_gauss"], legacy["gauss"]))
    torch.set_rng_state(_to_tensor(state["torch"]))
    for device in range(min(len(state["cuda"]), torch.cuda.device_count())):
        torch.cuda.set_rng_state(_to_tensor(state["cuda"][device]), device)


def _encode(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _decode(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def _to_tensor(text: str) -> torch.Tensor:
    return torch.from_numpy(_decode(text, np.uint8).copy())  # a tensor must own its memory
