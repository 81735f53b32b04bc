"""Embed a small trained family in a large shape: the cost of the large one, the text and acceptance of the small one.

    python -m benchmarks.cost_faithful --output DIR [--shape llama-3.1-8b] [--dtype bfloat16] [--random]

Writes DIR/target, DIR/eagle, DIR/eagle3 and DIR/eagle3_useless (the same head negated, so that nothing it drafts is
accepted: steps of full batches are timed with it), ordinary Hugging Face checkpoints for any server. The small model's
numbers are in the first d of D channels; everything else costs as much as in the large model, and adds zero:

- Hidden size: matrices that write the residual stream have zero rows beyond d, so it stays zero there. A norm divides
  by the root of a mean over D instead of d: weights carry sqrt(d / D), eps is scaled by d / D.
- Attention: rotary pair i goes to pair i * (D's head size / d's), where the large table has the same frequency; q
  carries the root of that ratio; a small group of query heads goes inside one large group.
- Unused heads, inner rows and layers have random weights before zero columns of o_proj and down_proj.
- Unused tokens: channel d holds the constant ``MARK`` in every embedding. No layer writes or reads it (norm weight
  0), the last norm passes it, and the head's rows of unused tokens hold ``-REPEL`` there: their logits are far below
  all others. Drafts get the constant through ``fc``: from the embedding (EAGLE) or from the first tap (EAGLE-3).
- An idle layer stands right after each boundary that EAGLE-3 reads, so the streams at boundaries k and k + 1 are the
  same and servers that read the list of aux layers as inputs or as outputs of layers agree.

Shapes: d, D small and wide hidden size; R, C rows and columns of a small matrix.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.results import options
from examples.bundled_model.save_target import target_config
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.layers.config import LayerConfig
from specserve.models.checkpoint import DTYPES
from specserve.models.config import layer_config, read_json, rope_config
from specserve.models.read_config import load_model_config
from specserve.models.tensor_files import TensorFiles

MARK, REPEL = 2.0**-10, 2.0**20  # powers of two: exact in bfloat16
NOISE = 0.02
Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the large family; the drafts have one layer of the same geometry."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int

    def layer(self, small: LayerConfig) -> LayerConfig:
        """The geometry of a layer; eps makes up for the wider mean and for ``MARK`` in it."""
        eps = (small.rms_norm_eps * small.hidden_size - MARK**2) / self.hidden
        return LayerConfig(
            self.hidden, self.inner, self.heads, self.kv_heads, self.head_dim, eps, input_size=self.hidden
        )


SHAPES = {"llama-3.1-8b": Sizes(4096, 14336, 32, 32, 8, 128, 128256, 32000)}


class Embedding:
    """Embed the tensors of one small geometry in wide ones. Small tensors are read as float64."""

    def __init__(self, small: LayerConfig, shape: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.small, self.shape = small, shape
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(0)
        self._norm_scale = (small.hidden_size / shape.hidden) ** 0.5

    def noise(self, *size: int) -> Tensor:
        empty = torch.empty(*size, dtype=self._dtype, device=self._device)
        return empty.normal_(std=NOISE, generator=self._generator)

    def zeros(self, *size: int) -> Tensor:
        return torch.zeros(*size, dtype=self._dtype, device=self._device)

    def put(self, wide: Tensor, small_RC: Tensor, rows_R: Tensor, columns_C: Tensor) -> None:
        """Write ``small`` into ``wide`` at these rows and columns."""
        rows_R, columns_C = rows_R.to(self._device), columns_C.to(self._device)
        wide[rows_R[:, None], columns_C] = small_RC.to(self._device, self._dtype)

    def channels(self, blocks: int = 1) -> Tensor:
        """Where the small channels of ``blocks`` concatenated hidden states stand."""
        d, D = self.small.hidden_size, self.shape.hidden
        return (torch.arange(blocks)[:, None] * D + torch.arange(d)).flatten()

    @cached_property
    def _dims(self) -> Tensor:
        """Where a small head's dimensions stand in a wide one: both halves of each rotary pair."""
        small, wide = self.small.head_dim // 2, self.shape.head_dim // 2
        pairs = torch.arange(small) * (wide // small)
        return torch.cat([pairs, pairs + wide])

    def _head_rows(self, heads: Tensor) -> Tensor:
        return (heads[:, None] * self.shape.head_dim + self._dims).flatten()

    @cached_property
    def query_rows(self) -> Tensor:
        small, wide = self.small.num_heads // self.small.num_kv_heads, self.shape.heads // self.shape.kv_heads
        heads = torch.arange(self.small.num_heads)
        return self._head_rows(heads // small * wide + heads % small)

    def norm(self, small: Tensor | None, mark: float = 0.0) -> Tensor:
        """A norm's weight: ones without a small one, ``mark`` at the constant's channel."""
        d, weight = self.small.hidden_size, torch.ones(self.shape.hidden, dtype=torch.float64)
        if small is not None:
            weight[:d] = small.double() * self._norm_scale
        weight[d] = mark
        return weight.to(self._device, self._dtype)

    def embedding(self, small: Tensor) -> Tensor:
        """Unused tokens are read as used ones, over and over."""
        wide = self.zeros(self.shape.vocab, self.shape.hidden)
        ids = torch.arange(self.shape.vocab)
        self.put(wide, small[ids % len(small)], ids, self.channels())
        wide[:, self.small.hidden_size] = MARK
        return wide

    def head(self, small: Tensor, rows: int) -> Tensor:
        wide, used = self.noise(rows, self.shape.hidden), len(small)
        self.put(wide, small, torch.arange(used), self.channels())
        wide[:used, self.small.hidden_size] = 0
        wide[used:, self.small.hidden_size] = -REPEL
        return wide

    def fc(self, small: Tensor) -> Tensor:
        """Read concatenated states; pass the constant of the first on."""
        d, blocks = self.small.hidden_size, small.shape[1] // self.small.hidden_size
        wide = self.zeros(self.shape.hidden, blocks * self.shape.hidden)
        self.put(wide, small, self.channels(), self.channels(blocks))
        wide[d, d] = 1
        return wide

    def layer(self, small: Mapping[str, Tensor], inputs: int = 1) -> Named:
        """The matrices of a decoder layer; an idle one where ``small`` is empty. ``inputs``: width read by q, k, v."""
        shape, x, width = self.shape, self.channels(), inputs * self.shape.hidden
        y, scale = self.channels(inputs), (shape.head_dim / self.small.head_dim) ** 0.5
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # Unused dimensions of a used head must not enter the score: q is zero there, k and v need not be.
        used_heads = (self.query_rows // shape.head_dim).unique()
        key_rows = self._head_rows(torch.arange(self.small.num_kv_heads))
        inner_rows = torch.arange(self.small.intermediate_size)
        plan = {
            "self_attn.q_proj": (self.noise(queries, width), self.query_rows, y),
            "self_attn.k_proj": (self.noise(keys, width), key_rows, y),
            "self_attn.v_proj": (self.noise(keys, width), key_rows, y),
            "self_attn.o_proj": (self.zeros(shape.hidden, queries), x, self.query_rows),
            "mlp.gate_proj": (self.noise(shape.inner, shape.hidden), inner_rows, x),
            "mlp.up_proj": (self.noise(shape.inner, shape.hidden), inner_rows, x),
            "mlp.down_proj": (self.zeros(shape.hidden, shape.inner), x, inner_rows),
        }
        for name, (wide, rows, columns) in plan.items():
            if small:
                values = small[f"{name}.weight"].double()
                if name.endswith("q_proj"):
                    values = values * scale
                    wide.view(shape.heads, shape.head_dim, width)[used_heads.to(wide.device)] = 0
                wide[:, self.small.hidden_size] = 0  # EAGLE has no norm that keeps the constant out
                self.put(wide, values, rows, columns)
            yield f"{name}.weight", wide


def check(small: LayerConfig, shape: Sizes, source: Path) -> None:
    """Raise ValueError saying which size of the small model has no place in ``shape``."""
    wide = shape.layer(small)
    groups = [c.num_heads // c.num_kv_heads for c in (small, wide)]
    fits = {
        "hidden_size": small.hidden_size < wide.hidden_size,
        "intermediate_size": small.intermediate_size <= wide.intermediate_size,
        "num_key_value_heads": small.num_kv_heads <= wide.num_kv_heads,
        "query heads of a key head": groups[0] <= groups[1],
        "head_dim": wide.head_dim % small.head_dim == 0,
        "rms_norm_eps": wide.rms_norm_eps > 0,
    }
    for name, good in fits.items():
        if not good:
            raise ValueError(f"{source}: {name} does not fit into {shape}")


INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 * 10**9


def layer_order(layers: int, taps: Sequence[int], wide_layers: int) -> tuple[list[int | None], list[int]]:
    """The small layer in each wide one, None for an idle one; and the wide boundaries that stand for ``taps``."""
    order: list[int | None] = []
    wide_taps = []
    for layer in range(layers + 1):
        if layer in taps:
            wide_taps.append(len(order))
            order.append(None)
        if layer < layers:
            order.append(layer)
    if len(order) > wide_layers:
        raise ValueError(f"{layers} layers, and an idle one at each of {list(taps)}, don't fit {wide_layers}")
    return order + [None] * (wide_layers - len(order)), wide_taps


def part(files: TensorFiles, prefix: str) -> dict[str, Tensor]:
    """The tensors below ``prefix``, which is cut off."""
    tensors = {n.removeprefix(prefix): files[n] for n in files.names() if n.startswith(prefix)}
    if "self_attn.q_proj.bias" in tensors:
        raise ValueError(f"{files.path}: biases of q, k and v are not supported")
    return tensors


def target_tensors(wide: Embedding, files: TensorFiles, order: Sequence[int | None]) -> Named:
    yield "model.embed_tokens.weight", wide.embedding(files["embed_tokens.weight"])
    for index, source in enumerate(order):
        small = {} if source is None else part(files, f"layers.{source}.")
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield f"model.layers.{index}.{name}", wide.norm(small.get(name))
        for name, tensor in wide.layer(small):
            yield f"model.layers.{index}.{name}", tensor
    yield "model.norm.weight", wide.norm(files["norm.weight"], mark=1.0)
    head = "lm_head.weight" if "lm_head.weight" in files else "embed_tokens.weight"
    yield "lm_head.weight", wide.head(files[head], wide.shape.vocab)


def fc_tensors(wide: Embedding, files: TensorFiles) -> Named:
    yield "fc.weight", wide.fc(files["fc.weight"])
    if "fc.bias" in files:
        bias = wide.zeros(wide.shape.hidden)
        bias[: wide.small.hidden_size] = files["fc.bias"].to(bias)
        yield "fc.bias", bias


def eagle_tensors(wide: Embedding, files: TensorFiles, embed: Tensor) -> Named:
    small = part(files, "layers.0.")
    yield "embed_tokens.weight", wide.embedding(embed)
    yield from fc_tensors(wide, files)
    norm = "post_attention_layernorm.weight"
    yield f"layers.0.{norm}", wide.norm(small[norm])
    for name, tensor in wide.layer(small):
        yield f"layers.0.{name}", tensor


def eagle3_tensors(wide: Embedding, files: TensorFiles, vocab: int) -> Named:
    """``vocab`` is the small target's: the first unused token's id."""
    small, shape = part(files, "layers.0."), wide.shape
    yield from fc_tensors(wide, files)
    for name in ("input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"):
        yield f"midlayer.{name}", wide.norm(small[name])
    for name, tensor in wide.layer(small, inputs=2):
        yield f"midlayer.{name}", tensor
    yield "norm.weight", wide.norm(files["norm.weight"], mark=1.0)
    yield "lm_head.weight", wide.head(files["lm_head.weight"], shape.draft_vocab)
    used = len(files["lm_head.weight"])
    rows = torch.arange(used)
    offsets = files["d2t"] if "d2t" in files else torch.zeros_like(rows)
    ids = torch.cat([rows + offsets, vocab + torch.arange(shape.draft_vocab - used)])
    yield "d2t", ids - torch.arange(shape.draft_vocab)
    yield "t2d", torch.zeros(shape.vocab, dtype=torch.bool).index_fill_(0, ids, True)


def negate_head(tensors: Named) -> Named:
    """A draft that picks what its target never picks, at the same cost."""
    return ((name, -each if name == "lm_head.weight" else each) for name, each in tensors)


def scramble(tensors: Named) -> Named:
    """Random matrices, norms of one; vocabulary maps stay."""
    for name, each in tensors:
        if not each.is_floating_point():
            yield name, each
        else:
            yield name, torch.randn_like(each) * STD if each.dim() > 1 else torch.ones_like(each)


def shards(tensors: Named, limit: int) -> Iterator[dict[str, Tensor]]:
    """Groups of tensors on the CPU, of at most ``limit`` bytes unless one tensor alone is larger."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if group and size + tensor.nbytes > limit:
            yield group
            group, size = {}, 0
        group[name] = tensor.cpu()
        size += tensor.nbytes
    yield group


def write(tensors: Named, config: Mapping[str, Any], path: Path, limit: int = SHARD_BYTES) -> None:
    """A checkpoint directory: ``config.json``, one file of weights, or several and their index."""
    path.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    total = 0
    for number, group in enumerate(shards(tensors, limit), 1):
        file = f"model-{number:05}.safetensors"
        save_file(group, path / file, metadata={"format": "pt"})
        (path / file).chmod(0o644)
        files |= dict.fromkeys(group, file)
        total += sum(tensor.nbytes for tensor in group.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (path / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def wide_draft_config(
    small: Mapping[str, Any], layer: LayerConfig, shape: Sizes, dtype: torch.dtype
) -> dict[str, Any]:
    """The small draft's config with the sizes of the large."""
    return {
        **small,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "vocab_size": shape.vocab,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


USELESS, RANDOM = "eagle3_useless", "random"
STD = 0.02


@dataclass(frozen=True, slots=True)
class Family:
    """Directories of a target and its two drafts."""

    target: Path = BUNDLED_MODEL
    eagle: Path = BUNDLED_DRAFTS["EAGLE"]
    eagle3: Path = BUNDLED_DRAFTS["EAGLE3"]


@dataclass(frozen=True, slots=True)
class Maker:
    """Make the wide family of ``small``."""

    small: Family
    shape: Sizes
    dtype: torch.dtype
    device: torch.device

    def run(self, output: Path) -> Family:
        made = Family(output / "target", output / "eagle", output / "eagle3")
        self.target(made.target)
        self.eagle(made.eagle)
        self.eagle3(made.eagle3)
        self.eagle3(output / USELESS, change=negate_head)
        return made

    def random(self, output: Path) -> None:
        """A target and an EAGLE-3 draft of the same shapes with random numbers everywhere, for timing alone: zeros draw
        less power than numbers, so GEMMs that heat the card run faster on the family above."""
        self.target(output / "target", scramble)
        self.eagle3(output / "eagle3", change=scramble)

    def target(self, output: Path, change: Callable[[Named], Named] = lambda tensors: tensors) -> None:
        config = load_model_config(self.small.target)
        wide = self._embedding(config.draft_layer, self.small.target)
        order, _ = layer_order(config.num_layers, self._taps(), self.shape.layers)
        layers = (self.shape.layer(config.draft_layer),) * self.shape.layers
        made = dataclasses.replace(
            config, vocab_size=self.shape.vocab, layers=layers, tie_word_embeddings=False
        )
        tensors = change(target_tensors(wide, TensorFiles(self.small.target), order))
        write(tensors, target_config(made, self.dtype), output)
        for file in self.small.target.iterdir():  # the tokenizer and the generation config
            if file.suffix in (".json", ".model", ".jinja") and file.name not in ("config.json", INDEX):
                shutil.copy(file, output)

    def eagle(self, output: Path) -> None:
        wide, config = self._draft(self.small.eagle)
        embed = TensorFiles(self.small.target)["embed_tokens.weight"]
        write(eagle_tensors(wide, TensorFiles(self.small.eagle), embed), config, output)

    def eagle3(self, output: Path, change: Callable[[Named], Named] = lambda tensors: tensors) -> None:
        wide, config = self._draft(self.small.eagle3)
        target = load_model_config(self.small.target)
        _, taps = layer_order(target.num_layers, self._taps(), self.shape.layers)
        name = "eagle_aux_hidden_state_layer_ids"
        config |= {"draft_vocab_size": self.shape.draft_vocab, "target_hidden_size": self.shape.hidden}
        config |= {
            "eagle_config": {"use_aux_hidden_state": True, name: taps},
            name: taps,
        }  # vLLM reads the second
        tensors = eagle3_tensors(wide, TensorFiles(self.small.eagle3), target.vocab_size)
        write(change(tensors), config, output)

    def _taps(self) -> list[int]:
        """Boundaries that the small EAGLE-3 reads, which its config must name as inputs of layers."""
        config = read_json(self.small.eagle3 / "config.json")
        taps = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if not taps or taps[0] == 1:
            raise ValueError(
                f"{self.small.eagle3}: eagle_aux_hidden_state_layer_ids must name inputs of layers"
            )
        return list(taps)

    def _draft(self, path: Path) -> tuple[Embedding, dict[str, Any]]:
        config = read_json(path / "config.json")
        layer = layer_config(config, path)
        wide = self._embedding(layer, path)
        return wide, wide_draft_config(config, wide.shape.layer(layer), self.shape, self.dtype)

    def _embedding(self, layer: LayerConfig, path: Path) -> Embedding:
        kind = rope_config(read_json(path / "config.json"), path).kind
        if kind != "default":
            raise ValueError(f"{path}: {kind} rope scaling is not supported, only default")
        check(layer, self.shape, path)
        return Embedding(layer, self.shape, self.dtype, self.device)


def main() -> None:
    parser = options(__doc__, output=False)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    random = "write DIR/random/target and eagle3 too, or only these"
    parser.add_argument("--random", nargs="?", const="too", choices=("too", "only"), help=random)
    for name, default in dataclasses.asdict(Family()).items():
        parser.add_argument(f"--{name}", type=Path, default=default)
    args = parser.parse_args()
    available = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(available if args.device == "auto" else args.device)
    small = Family(args.target, args.eagle, args.eagle3)
    maker = Maker(small, SHAPES[args.shape], DTYPES[args.dtype], device)
    if args.random:
        maker.random(args.output / RANDOM)
    if args.random == "only":
        return
    made = maker.run(args.output)
    print(made.target, made.eagle, made.eagle3, args.output / USELESS, sep="\n")


if __name__ == "__main__":
    main()
