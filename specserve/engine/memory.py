"""The size of the KV pool."""

from __future__ import annotations

import gc

import torch

from specserve.kv.pool import PoolConfig


def return_memory() -> None:
    """Return unused device memory to the driver, so that the next pool can be sized by it."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def pool_pages(
    config: PoolConfig, max_total_tokens: int | None, mem_fraction: float, device: torch.device
) -> int:
    """Return the pool's number of pages, the dummy page included: enough for ``max_total_tokens``, or what
    ``mem_fraction`` of the GPU's memory leaves next to the weights already on it. Raises ValueError when nothing is
    left."""
    if max_total_tokens is not None:
        return -(-max_total_tokens // config.page_size) + 1
    assert device.type == "cuda", "without a GPU the settings name max_total_tokens"
    return_memory()  # temporary buffers of loading and quantization
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * mem_fraction) - (total - free)
    pages = budget // config.page_bytes
    if pages < 2:
        raise ValueError(
            f"mem_fraction_static {mem_fraction} of {total / 2**30:.1f} GiB leaves no room for a KV pool next to the "
            f"{(total - free) / 2**30:.1f} GiB already used; raise it, or set max_total_tokens"
        )
    return pages
