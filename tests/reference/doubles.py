"""transformers in true float64, for comparison with the references."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def float32_means_float64() -> Iterator[None]:
    """transformers casts to float32 in its norms, softmax and rotary embedding. Build rotary embeddings in
    here too, but load checkpoints outside: safetensors finds its dtypes by these names."""
    double = torch.float64
    with (
        patch.object(torch, "float32", double),
        patch.object(torch, "float", double),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
