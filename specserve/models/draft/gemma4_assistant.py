"""Gemma 4's assistant: layers without keys and values of their own, which attend to the target's.

Tensors as transformers writes them: ``pre_projection`` and ``post_projection`` between the target's width and its own,
Gemma 4 layers of queries alone, and, in those for small targets, ``masked_embedding``, which scores only the tokens of
a few clusters.

Shapes: N nodes of a level, X rows of states, H the target's hidden size, D the assistant's, V vocabulary, C clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from specserve_kernels import indexed_linear
from torch import Tensor, nn

from specserve.layers.batch import Attend, TokenBatch
from specserve.layers.config import LayerConfig
from specserve.layers.decoder import DecoderLayer
from specserve.layers.linear import Linear
from specserve.layers.ranks import whole_of
from specserve.methods import MODEL_TYPES, DraftSettings
from specserve.models.base import TargetModel
from specserve.models.config import COUNT, OBJECT, ModelConfig, check, layer_config, read_json
from specserve.models.draft.load import Borrowed, DraftModule, DraftSource
from specserve.models.gemma4 import Gemma4Model, last_stored
from specserve.models.random_tensors import RandomTensors
from specserve.models.tensor_files import TensorFiles

SEES = 1
"""Tokens before the root, besides a whole window of them, that layers with a window see. A target's root sees itself
and one less than a window before it."""


@dataclass(frozen=True, slots=True)
class AssistantSource(DraftSource):
    """``config``: of its layers, each of which reads a layer of the target. ``clusters``: their number, and how many of
    them are scored; None: all tokens are."""

    config: ModelConfig
    clusters: tuple[int, int] | None
    unread = ("lm_head.weight",)  # the embedding again

    def stored(self, name: str) -> str:
        return name.removeprefix("model.")


def open_assistant(draft: DraftSettings, target: ModelConfig) -> AssistantSource:
    """Read a directory. Raises ValueError naming the file and the field if it holds no assistant of this target."""
    file = draft.path / "config.json"
    fields = read_json(file)
    if (kind := fields.get("model_type")) not in [*MODEL_TYPES]:
        raise ValueError(f"{file}: model_type must be {' or '.join(MODEL_TYPES)}, found {kind!r}")
    check(fields, file, OBJECT, "text_config")
    files = RandomTensors(draft.path, {}, "draft.") if draft.random else TensorFiles(draft.path)
    config = _read_layers({**fields, **fields["text_config"]}, file, target)
    clusters = None
    if fields.get("use_ordered_embeddings"):
        fields = {"num_centroids": 2048, "centroid_intermediate_top_k": 32, **fields}
        check(fields, file, COUNT, "num_centroids", "centroid_intermediate_top_k")
        clusters = count, best = fields["num_centroids"], fields["centroid_intermediate_top_k"]
        if config.vocab_size % count:
            words = f"num_centroids {count} does not divide the vocabulary of {config.vocab_size}"
            raise ValueError(f"{file}: {words}")
        if best > count:
            words = f"centroid_intermediate_top_k must be at most num_centroids {count}, found {best}"
            raise ValueError(f"{file}: {words}")
    source = AssistantSource(files, config=config, clusters=clusters)
    scored = f"{clusters[1]} of {clusters[0]} clusters of tokens" if clusters else "all tokens"
    reads = ", ".join(str(layer.reads) for layer in config.layers)
    source.note(f"of {config.num_layers} layers, which read the target's layers {reads}; it scores {scored}")
    return source


def _read_layers(fields: Mapping[str, Any], file: Path, target: ModelConfig) -> ModelConfig:
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
    fields = {**Gemma4Model.defaults, **fields, **own}
    check(fields, file, COUNT, "vocab_size", "num_hidden_layers", "backbone_hidden_size")
    for name, found in (("backbone_hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if fields[name] != found:
            raise ValueError(f"{file}: {name} {fields[name]} does not fit the target's {found}")
    try:
        layer = layer_config(fields, file, Gemma4Model.activations, Gemma4Model.activation_field)
        layers = Gemma4Model.read_layers(layer, fields)
        layers = [_reading(layer, target) for layer in layers]
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return ModelConfig(
        architecture="Gemma4ForCausalLM",
        vocab_size=fields["vocab_size"],
        layers=tuple(layers),
        ropes=Gemma4Model.read_ropes(fields, file),
        tie_word_embeddings=True,
        max_position_embeddings=target.max_position_embeddings,
        eos_token_ids=(),
        bos_token_id=None,
        dtype=None,
    )


def _reading(layer: LayerConfig, target: ModelConfig) -> LayerConfig:
    """Let a layer read the target's last keys and values of its kind. Ranks share it out like that one."""
    number = last_stored(target.layers).get(layer.rope)
    if number is None:
        raise ValueError("its layers with a window read such a layer of the target, which has none")
    read, softmax = target.layers[number], layer.softmax
    kv_heads = whole_of(read.num_kv_heads)
    if layer.head_dim != read.head_dim or layer.num_heads % kv_heads:
        raise ValueError(
            f"{layer.num_heads} heads of {layer.head_dim} do not fit the target's layer {number}, of "
            f"{kv_heads} KV heads of {read.head_dim}"
        )
    if softmax.window is not None:
        softmax = replace(softmax, window=softmax.window + SEES)
    return replace(layer, num_kv_heads=kv_heads, reads=number, softmax=softmax).on(target.ranks)


class Clusters(nn.Module):
    """Scores the tokens of the clusters that score best. ``token_ordering``: int64 ``[V]``, tokens, cluster by
    cluster."""

    def __init__(self, config: ModelConfig, count: int, best: int) -> None:
        super().__init__()
        self.centroids = Linear(config.hidden_size, count, bias=False)
        token_V = torch.empty(config.vocab_size, dtype=torch.int64)
        self.token_ordering = nn.Parameter(token_V, requires_grad=False)
        self._best = best

    def load(self, found: Mapping[str, Tensor]) -> None:
        """Take the list; of random numbers, their order."""
        self.token_ordering.copy_(found["token_ordering"].argsort().argsort())

    def forward(self, hidden_ND: Tensor, model: TargetModel) -> Tensor:
        """Return the logits ``[N, V]`` of ``model``'s head, minus infinity for the tokens of other clusters. A few
        nodes read their clusters' rows of the head alone, together, for all of them."""
        best_NK = self.centroids(hidden_ND).topk(self._best, 1).indices
        token_NX = self.token_ordering.view(self.centroids.out_features, -1)[best_NK].flatten(1)
        nodes, vocab = len(hidden_ND), len(self.token_ordering)
        if token_NX.numel() <= vocab // 2:
            of_all_NY = indexed_linear(hidden_ND, model.embed_tokens.weight, token_NX.flatten())
            own_NX = of_all_NY.view(nodes, nodes, -1).diagonal().T
        else:
            own_NX = model.logits(hidden_ND).gather(1, token_NX)
        return own_NX.new_full((nodes, vocab), -torch.inf).scatter_(1, token_NX, own_NX)


class Gemma4Assistant(DraftModule):
    """Runs from a token and the state before it, the target's or its own of the level before."""

    def __init__(self, source: AssistantSource, target: Gemma4Model) -> None:
        super().__init__()
        config, size = source.config, target.config.hidden_size
        self.vocab_size = config.vocab_size
        rotates_alike = config.ropes == target.config.ropes  # then their tables are the target's
        self.model = Gemma4Model(config, 1 if rotates_alike else target.max_positions)
        for name, table in target.named_buffers() if rotates_alike else ():
            if name.startswith("rope"):
                self.model.register_buffer(name, table, persistent=False)
        self.pre_projection = Linear(2 * size, config.hidden_size, bias=False)
        self.post_projection = Linear(config.hidden_size, size, bias=False)
        self.masked_embedding = source.clusters and Clusters(config, *source.clusters)
        self._target = Borrowed(target)

    def forward(
        self, tokens_N: Tensor, states_XH: Tensor, source_N: Tensor, positions_N: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return the logits ``[N, V]`` after the tokens, and the next level's states ``[N, H]``. ``source_N``: each
        token's row of ``states_XH``."""
        pair_NX = torch.cat([self._target.module.embed_tokens(tokens_N), states_XH[source_N]], 1)
        x_ND, first = self.pre_projection(pair_NX), self.model.layers[0]
        assert isinstance(first, DecoderLayer)
        batch = TokenBatch(tokens_N, positions_N, attend)
        hidden_ND, _ = self.model.run(batch, (first.input_layernorm(x_ND), x_ND))
        clusters = self.masked_embedding
        logits_NV = self.model.logits(hidden_ND) if clusters is None else clusters(hidden_ND, self.model)
        return logits_NV, self.post_projection(hidden_ND)
