"""The interface of attention backends.

Each pass over the model makes one plan, which every layer runs. No token sees positions before ``kv_start``; results at
these positions are finite and have no meaning. Shapes: B requests, T packed tokens or nodes, K frontier nodes a
request, A scratch entries that a frontier node sees, M pages a request, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specserve_kernels import KVScales
from torch import Tensor

from specserve.kv.spec import KVSpec
from specserve.layers.batch import Softmax


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prefill: ragged runs of prompt tokens, of requests ``slot_T``, each seeing all positions up to its own."""

    q_start: Tensor  # [B + 1]
    slot_T: Tensor
    positions_T: Tensor
    max_tokens: int  # of one request, known to the host
    max_kv: int  # positions of one request, chunk included, known to the host
    # first position and tokens of each request; None: the host doesn't know them
    spans: Sequence[tuple[int, int]] | None
    kv_start: int = 0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Verify: tree nodes at ``length + local index``, seeing the committed prefix and their ancestors."""

    length_B: Tensor
    q_start: Tensor  # [B + 1]
    slot_T: Tensor  # B for padding
    local_T: Tensor
    mask_T: Tensor  # int64 ancestor bits by local index
    levels: int | None  # largest depth; None: every slot's nodes are a chain
    max_nodes: int
    max_kv: int  # bound on length + max_nodes, known to the host
    kv_start: int = 0  # where there are only chains


@dataclass(frozen=True, slots=True)
class Frontier:
    """One draft level: K nodes a request that see the prefix from ``kv_start`` on, and ``scratch_BKA``."""

    prefix_B: Tensor  # positions below this are the prefix
    kv_start: int
    scratch_BKA: Tensor  # positions of ancestors and self beyond the prefix
    max_kv: int


class Entries(NamedTuple):
    """What a layer's queries attend to. ``cache``: the layer in the pool, with ``scales`` in FP8, and ``pages_BM`` its
    page table. ``kv_TND``: the tokens' own keys and then values, as the cache holds them. ``latent``: its rows are keys
    of all heads, and the first so many of their numbers are values; outputs have as many."""

    cache: Tensor
    pages_BM: Tensor
    kv_TND: Tensor | None = None
    scales: KVScales | None = None
    latent: int = 0


class Plan(Protocol):
    """The plan of one pass over the model; runs one layer's attention. ``reads_own``: it may read the tokens' own keys
    and values from ``kv_TND``."""

    @property
    def reads_own(self) -> bool: ...

    def run(self, q_TND: Tensor, entries: Entries, softmax: Softmax) -> Tensor:
        """Return the outputs ``[T, N, D]``."""
        ...


class AttentionBackend(Protocol):
    """Makes plans. ``unsupported`` returns the reasons why it cannot serve a layer, none if it can."""

    name: str

    def unsupported(self, spec: KVSpec) -> list[str]: ...
    def plan_prefill(self, chunks: Chunks) -> Plan: ...
    def plan_verify(self, nodes: Nodes) -> Plan: ...
    def plan_draft(self, frontier: Frontier) -> Plan: ...
