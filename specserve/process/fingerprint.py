"""The ``system_fingerprint`` of answers: a hash of everything but the request that the text depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

from specserve.config.engine import EngineConfig
from specserve.layers.ranks import ONE, Ranks
from specserve.version import __version__

_WORD = 8  # bytes
_ROWS = 4096  # at a time


def fingerprint(
    model: nn.Module,
    config: EngineConfig,
    kv_scales: Sequence[tuple[float, float] | None] = (),
    ranks: Ranks = ONE,
) -> str:
    """Hash the target's configuration, loaded weights and KV scales, the dtypes, the defaults of requests, the versions
    of kernels and grammars, and the GPU's name. The draft is not included: it only proposes.
    A server whose acceptance is drawn says so."""
    digest = hashlib.sha256()
    what = [
        __version__,
        torch.__version__,
        config.device,
        config.dtype,
        config.attention_backend,
        _llguidance(),
    ]
    if config.device == "cuda":
        import triton

        what += [triton.__version__, torch.cuda.get_device_name(), str(torch.version.cuda)]
    what += [config.kv_cache_dtype, config.mamba_ssm_dtype, str(kv_scales), str(config.request_defaults)]
    digest.update(repr((what, config.model)).encode())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        if name.startswith("rope"):  # determined by the configuration, except for its length
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_sums(tensor.detach()).cpu().numpy().tobytes())
    if ranks.peers is not None:  # texts depend on how sums are divided
        own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
        digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in ranks.peers.exchange(own)))
    mark = "synthetic_" if config.draft is not None and config.draft.synthetic else ""
    return f"fp_{mark}{digest.hexdigest()[:16]}"


def _llguidance() -> str:
    try:
        return version("llguidance")
    except PackageNotFoundError:
        return "none"


def _sums(tensor: Tensor) -> Tensor:
    """Return wrap-around sums of a tensor's bytes, eight at a time, over all but its last dimension. Each row has a
    factor of its own, so that rows can't change places."""
    if tensor.numel() == 0:
        return torch.zeros(1, dtype=torch.int64)
    rows = tensor.contiguous().view(-1, tensor.shape[-1] if tensor.ndim else 1)
    whole = rows.shape[1] * rows.element_size() % _WORD == 0
    words = rows.view(torch.int64 if whole else torch.uint8)
    factors = torch.arange(1, 2 * len(rows), 2, device=rows.device)[:, None]
    chunks = zip(words.split(_ROWS), factors.split(_ROWS), strict=True)
    return torch.stack([(chunk * factor).sum(0) for chunk, factor in chunks]).sum(0)
