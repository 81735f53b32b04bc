"""Kernels of specserve: one function a name, in PyTorch (``reference/``) and Triton (``ops/``).

The references are the CPU backend as well as the oracle that the Triton versions are tested against.
"""

from specserve_kernels.dispatch import dispatched, runs_triton
from specserve_kernels.reference import (
    accept,
    activation,
    commit,
    gather,
    grow,
    norm,
    pairs,
    prediction,
    rotary,
    rounding,
    select,
)
from specserve_kernels.reference import indexed_linear as _indexed_linear
from specserve_kernels.reference import integer_linear as _integer_linear
from specserve_kernels.reference import linear as _linear
from specserve_kernels.reference import quantized_linear as _quantized_linear
from specserve_kernels.reference.accept import accept_walk
from specserve_kernels.reference.attention import group_bias, paged_attention, visible_to_bias
from specserve_kernels.reference.commit import count_tokens, store_page_features
from specserve_kernels.reference.philox import gumbel_noise, philox4x32
from specserve_kernels.reference.prediction import Prediction
from specserve_kernels.reference.quantized_linear import dequantize, quantize
from specserve_kernels.reference.rotary import apply_rotary, rotary_table, store_kv
from specserve_kernels.reference.rounding import GROUP, Rounded
from specserve_kernels.reference.sampling import add_bias, penalize, perturb, truncate
from specserve_kernels.reference.select import select_nodes
from specserve_kernels.reference.tree import (
    MAX_NODES,
    Accepted,
    Level,
    Pool,
    Tree,
    address,
    chain_masks,
    tree_masks,
)

accept_path = dispatched(accept.accept_path)
add_rms_norm = dispatched(norm.add_rms_norm)
add_rms_norm_rounded = dispatched(norm.add_rms_norm_rounded)
advance = dispatched(commit.advance)
embed_rms_norm = dispatched(norm.embed_rms_norm)
follow_prediction = dispatched(prediction.follow_prediction)
gather_slots = dispatched(gather.gather_slots)
grow_level = dispatched(grow.grow_level)
indexed_linear = dispatched(_indexed_linear.indexed_linear)
integer_linear = dispatched(_integer_linear.integer_linear)
linear = dispatched(_linear.linear)
move_kv = dispatched(commit.move_kv)
pair_inputs = dispatched(pairs.pair_inputs)
pair_inputs_rounded = dispatched(pairs.pair_inputs_rounded)
quantized_linear = dispatched(_quantized_linear.quantized_linear)
rms_norm = dispatched(norm.rms_norm)
root_level = dispatched(grow.root_level)
round_inputs = dispatched(rounding.round_inputs)
rotary_store_kv = dispatched(rotary.rotary_store_kv)
select_tree = dispatched(select.select_tree)
silu_and_mul = dispatched(activation.silu_and_mul)
single_nodes = dispatched(select.single_nodes)

__all__ = [
    "GROUP",
    "MAX_NODES",
    "Accepted",
    "Level",
    "Pool",
    "Prediction",
    "Rounded",
    "Tree",
    "accept_path",
    "accept_walk",
    "add_bias",
    "add_rms_norm",
    "add_rms_norm_rounded",
    "address",
    "advance",
    "apply_rotary",
    "chain_masks",
    "count_tokens",
    "dequantize",
    "embed_rms_norm",
    "follow_prediction",
    "gather_slots",
    "group_bias",
    "grow_level",
    "gumbel_noise",
    "indexed_linear",
    "integer_linear",
    "linear",
    "move_kv",
    "paged_attention",
    "pair_inputs",
    "pair_inputs_rounded",
    "penalize",
    "perturb",
    "philox4x32",
    "quantize",
    "quantized_linear",
    "rms_norm",
    "root_level",
    "rotary_store_kv",
    "rotary_table",
    "round_inputs",
    "runs_triton",
    "select_nodes",
    "select_tree",
    "silu_and_mul",
    "single_nodes",
    "store_kv",
    "store_page_features",
    "tree_masks",
    "truncate",
    "visible_to_bias",
]
