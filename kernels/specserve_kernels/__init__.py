"""Kernels of specserve: each function exists in PyTorch (``reference/``) and in Triton (``ops/``) under the same name.

The references are the CPU backend and the oracle that the Triton versions are tested against.
"""

from specserve_kernels.dispatch import dispatched, on_gpu, runs_triton
from specserve_kernels.reference.attention import latent
from specserve_kernels.reference.attention.attention import group_bias, paged_attention, visible_to_bias
from specserve_kernels.reference.experts import experts as _experts
from specserve_kernels.reference.experts import route as _route
from specserve_kernels.reference.experts.experts import ExpertWeights
from specserve_kernels.reference.experts.route import Routes, Routing
from specserve_kernels.reference.layer import activation, embed_and_concat, norm, rotary
from specserve_kernels.reference.layer.activation import Gate
from specserve_kernels.reference.layer.rotary import apply_rotary, first_parts, normed_heads, rotary_table
from specserve_kernels.reference.linear import indexed, integer, packed, quantized
from specserve_kernels.reference.linear import linear as _linear
from specserve_kernels.reference.linear import quantize as _quantize
from specserve_kernels.reference.linear.packed import (
    Numbers,
    Packed,
    dequantize_numbers,
    dequantize_packed,
    pack,
)
from specserve_kernels.reference.linear.quantize import FP8, GROUP, PAIRED, Rounded, given, rounded_inputs
from specserve_kernels.reference.linear.quantized import dequantize, quantize
from specserve_kernels.reference.recurrent import delta_rule as _delta_rule
from specserve_kernels.reference.recurrent import inputs as _delta_inputs
from specserve_kernels.reference.recurrent.delta_rule import DeltaInputs, Lagged, Left, Runs
from specserve_kernels.reference.recurrent.inputs import NEVER
from specserve_kernels.reference.sampling.philox import gumbel_noise
from specserve_kernels.reference.sampling.sampling import add_bias, penalize, perturb, truncate
from specserve_kernels.reference.tree import (
    accept,
    commit,
    continuation,
    deferred,
    grow,
    lookup,
    merge,
    prediction,
    select,
    sources,
)
from specserve_kernels.reference.tree import gather_slots as _gather_slots
from specserve_kernels.reference.tree.commit import count_tokens, store_page_features
from specserve_kernels.reference.tree.deferred import LeftTokens
from specserve_kernels.reference.tree.nodes import (
    address,
    chain_masks,
    first_children,
    first_places,
    tree_masks,
)
from specserve_kernels.types import (
    MAX_NODES,
    Accepted,
    Continuations,
    HeadNorms,
    KVScales,
    Level,
    Parts,
    Pool,
    Prediction,
    Shared,
    Slots,
    SlotTables,
    Sources,
    Tree,
    tree_pool_size,
)

absorb_queries = dispatched(latent.absorb_queries)
accept_path = dispatched(accept.accept_path)
add_rms_norm = dispatched(norm.add_rms_norm)
add_rms_norm_rounded = dispatched(norm.add_rms_norm_rounded)
advance = dispatched(commit.advance)
apply_gate = dispatched(activation.apply_gate)
cut_paths = dispatched(_delta_inputs.cut_paths)
delta_inputs = dispatched(_delta_inputs.delta_inputs)
delta_nodes = dispatched(_delta_rule.delta_nodes)
delta_prompts = dispatched(_delta_rule.delta_prompts)
embed_rms_norm = dispatched(norm.embed_rms_norm)
find_continuations = dispatched(lookup.find_continuations)
fold_states = dispatched(_delta_rule.fold_states)
follow_continuation = dispatched(continuation.follow_continuation)
follow_prediction = dispatched(prediction.follow_prediction)
gate_heads = dispatched(norm.gate_heads)
gate_rounded = dispatched(packed.gate_rounded)
gate_rows = dispatched(activation.gate_rows)
gather_slots = dispatched(_gather_slots.gather_slots)
grow_level = dispatched(grow.grow_level)
indexed_linear = dispatched(indexed.indexed_linear)
integer_linear = dispatched(integer.integer_linear)
keep_last = dispatched(_delta_inputs.keep_last)
keep_states = dispatched(deferred.keep_states)
linear = dispatched(_linear.linear)
linear_ahead = dispatched(_linear.linear_ahead)
merge_pools = dispatched(merge.merge_pools)
move_kv = dispatched(commit.move_kv)
multiply_heads = dispatched(latent.multiply_heads)
observe_source = dispatched(sources.observe_source)
pair_inputs = dispatched(embed_and_concat.pair_inputs)
packed_linear = dispatched(packed.packed_linear)
pair_inputs_rounded = dispatched(embed_and_concat.pair_inputs_rounded)
quantized_linear = dispatched(quantized.quantized_linear)
rms_norm = dispatched(norm.rms_norm)
root_level = dispatched(grow.root_level)
round_inputs = dispatched(_quantize.round_inputs)
rotary_store_kv = dispatched(rotary.rotary_store_kv)
route = dispatched(_route.route)
run_experts = dispatched(_experts.run_experts)
select_tree = dispatched(select.select_tree)
single_nodes = dispatched(select.single_nodes)
store_latents = dispatched(latent.store_latents)
take_states = dispatched(deferred.take_states)
trace_back = dispatched(_delta_inputs.trace_back)
