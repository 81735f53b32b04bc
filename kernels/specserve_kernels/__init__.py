"""Kernels of specserve: one function a name, its torch reference in ``reference/``.

The references are the CPU backend as well as the oracle that faster versions are tested against.
"""

from specserve_kernels.reference.activation import silu_and_mul
from specserve_kernels.reference.attention import group_bias, paged_attention, visible_to_bias
from specserve_kernels.reference.norm import add_rms_norm, rms_norm
from specserve_kernels.reference.philox import gumbel_noise, philox4x32
from specserve_kernels.reference.rotary import apply_rotary, rotary_store_kv, rotary_table, store_kv
from specserve_kernels.reference.sampling import add_bias, penalize, perturb, truncate
from specserve_kernels.reference.tree import (
    MAX_NODES,
    accept_walk,
    chain_masks,
    select_nodes,
    tree_masks,
)

__all__ = [
    "MAX_NODES",
    "accept_walk",
    "add_bias",
    "add_rms_norm",
    "apply_rotary",
    "chain_masks",
    "group_bias",
    "gumbel_noise",
    "paged_attention",
    "penalize",
    "perturb",
    "philox4x32",
    "rms_norm",
    "rotary_store_kv",
    "rotary_table",
    "select_nodes",
    "silu_and_mul",
    "store_kv",
    "tree_masks",
    "truncate",
    "visible_to_bias",
]
