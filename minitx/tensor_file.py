"""Writing a safetensors file one tensor at a time.

The format (8 bytes of header length, little-endian; a JSON header; the bytes of the tensors without
gaps) is that of https://github.com/huggingface/safetensors, whose library reads these files. Its
own writer wants every tensor in host memory at once, and leaves flushing and hashing to a second
pass.
"""

import hashlib
import json
import os
from pathlib import Path

import torch

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int | str]:
    """Writes tensors of any strides and devices, flushed to the disk; returns size and sha256.

    Only one of them at a time is copied to host memory. Raises OSError when the disk does.
    """
    # The widest first: every tensor then begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            digest.update(part)
            file.write(part)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().flatten()
            part = flat.view(torch.uint8).numpy().data
            digest.update(part)
            file.write(part)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return {"size": size, "sha256": digest.hexdigest()}
