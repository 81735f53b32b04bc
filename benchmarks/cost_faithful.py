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
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.widen import SHAPES, Embedding, Named, Shape, check
from examples.bundled_model.save_target import target_config
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.layers.decoder import LayerConfig
from specserve.models.checkpoint import DTYPES
from specserve.models.config import ModelConfig, layer_config, read_json, rope_config
from specserve.models.read_config import load_model_config
from specserve.models.tensor_files import TensorFiles

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
    yield (
        "layers.0.post_attention_layernorm.weight",
        wide.norm(small["post_attention_layernorm.weight"]),
    )
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


def wide_target_config(small: ModelConfig, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    wide = dataclasses.replace(
        small,
        vocab_size=shape.vocab,
        layers=(shape.layer(small.layers[0]),) * shape.layers,
        tie_word_embeddings=False,
    )
    return target_config(wide, dtype)


def wide_draft_config(
    small: Mapping[str, Any], layer: LayerConfig, shape: Shape, dtype: torch.dtype
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

    @classmethod
    def below(cls, path: Path) -> Family:
        return cls(path / "target", path / "eagle", path / "eagle3")


@dataclass(frozen=True, slots=True)
class Maker:
    """Make the wide family of ``small``."""

    small: Family
    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def run(self, output: Path) -> Family:
        made = Family.below(output)
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
        wide = self._embedding(config.layers[0], self.small.target)
        order, _ = layer_order(config.num_layers, self._taps(), self.shape.layers)
        tensors = change(target_tensors(wide, TensorFiles(self.small.target), order))
        write(tensors, wide_target_config(config, self.shape, self.dtype), output)
        copy_others(self.small.target, output)

    def eagle(self, output: Path) -> None:
        wide, config = self._draft(self.small.eagle)
        embed = TensorFiles(self.small.target)["embed_tokens.weight"]
        write(eagle_tensors(wide, TensorFiles(self.small.eagle), embed), config, output)

    def eagle3(self, output: Path, change: Callable[[Named], Named] = lambda tensors: tensors) -> None:
        wide, config = self._draft(self.small.eagle3)
        target = load_model_config(self.small.target)
        _, taps = layer_order(target.num_layers, self._taps(), self.shape.layers)
        config["draft_vocab_size"] = self.shape.draft_vocab
        config["target_hidden_size"] = self.shape.hidden
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": taps,
        }
        config["eagle_aux_hidden_state_layer_ids"] = taps  # where vLLM reads it
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


def copy_others(source: Path, output: Path) -> None:
    """The tokenizer and the generation config."""
    for file in source.iterdir():
        if file.suffix in (".json", ".model", ".jinja") and file.name not in ("config.json", INDEX):
            shutil.copy(file, output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="bfloat16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--random",
        nargs="?",
        const="too",
        choices=("too", "only"),
        help="write DIR/random/target and eagle3 too, or only these",
    )
    for name, default in dataclasses.asdict(Family()).items():
        parser.add_argument(f"--{name}", type=Path, default=default)
    args = parser.parse_args()
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if args.device == "auto" else args.device)
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
