"""Load model weights: map Hugging Face names in files to fused projections in modules."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specserve.layers.formats.fp8 import KV_SCALES
from specserve.layers.linear import PLAIN
from specserve.layers.ranks import ONE, Along, Cut, Ranks, Share
from specserve.layers.weights import FLOATS, Projection, WeightFormat
from specserve.models.base import TargetModel
from specserve.models.config import ModelConfig, read_json
from specserve.models.random_tensors import RandomTensors
from specserve.models.read_config import load_model_config
from specserve.models.registry import model_class
from specserve.models.tensor_files import EXPERT, TensorFiles

log = logging.getLogger(__name__)

READERS = 4  # threads: disk and device copy have more bandwidth than one thread uses
DTYPES = FLOATS
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ROWS = 1024  # compared at a time


def file_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of ``module`` under the names of a file, with fused ones split, as views."""
    return {
        name: tensor for stored in _stored(module) for part in stored.parts for name, tensor in part.items()
    }


@dataclass(frozen=True, slots=True)
class _Stored:
    """A module's own tensors: for each part, by their names in a file."""

    path: str
    module: nn.Module
    parts: list[dict[str, Tensor]]
    cuts: Mapping[str, Cut]  # of those that ranks share

    def load(self, files: TensorFiles, rename: Callable[[str], str], inference: bool) -> int:
        """Fill them and return the bytes read. Sets PyTorch's modes, because each thread has its own. On ``meta`` only
        what decides about kernels is read."""
        size, found = 0, list[dict[str, Tensor]]()
        for part in self.parts:
            found.append({})
            for name, target in part.items():
                each = target
                if not (self.on_meta and target.is_meta):
                    each = files.fill(rename(name), target, self.module, self.cuts.get(name))
                    if name.endswith(".bias") and self._summed_later:
                        each = torch.zeros_like(each)
                found[-1][name.rpartition(".")[2]] = each
                size += each.nbytes
        with torch.no_grad(), torch.inference_mode(inference):
            if isinstance(self.module, Projection):
                try:
                    self.module.load(found)
                except ValueError as error:
                    raise ValueError(f"{files.path}: {self.path}: {error}") from None
            elif (load := getattr(self.module, "load", None)) is not None:
                load(found[0])
            else:
                for name, target in self.parts[0].items():
                    target.copy_(found[0][name.rpartition(".")[2]])
        return 0 if self.on_meta else size

    @property
    def _summed_later(self) -> bool:
        """Whether this is not the first of the ranks whose sum the bias is added to once."""
        inputs = getattr(self.module, "inputs", None)
        return isinstance(inputs, Share) and inputs.ranges[0][0] > 0

    @property
    def on_meta(self) -> bool:
        module = self.module
        device = module.device if isinstance(module, Projection) else next(module.parameters(False)).device
        return device.type == "meta"


class _Dequantized(Projection):
    """Fills the weight of a module that takes it plain from a file that has it quantized, which ``reader`` reads."""

    def __init__(self, weight: nn.Parameter, reader: Projection) -> None:
        super().__init__()
        self.parts, self.weight, self._reader = {}, weight, reader
        reader.kept_plain = True

    def stored(self) -> list[dict[str, Tensor]]:
        return self._reader.stored()

    def cuts(self) -> list[dict[str, Cut]]:
        return self._reader.cuts()

    def load(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        self._reader.load(files)
        self.weight.detach().copy_(self._reader.rows(None)[0])
        del self._reader


def _stored(
    module: nn.Module, rename: Callable[[str], str] = lambda name: name, weights: WeightFormat = PLAIN
) -> Iterator[_Stored]:
    seen = set[nn.Parameter]()
    for path, child in module.named_modules():
        own = dict(child.named_parameters(recurse=isinstance(child, Projection)))
        if seen.issuperset(own.values()):
            continue  # no parameters, or tied ones
        seen.update(own.values())
        if "weight" in own and weights.stores(name := rename(_join(path, "weight")).removesuffix(".weight")):
            weight = own.pop("weight")
            rows = getattr(child, "shares", {}).get("weight", len(weight))
            with building(weight.dtype, weight.device):
                reader = weights.projection("", weight.shape[1], {name: rows}, bias=False)
            yield _stored_of(path, _Dequantized(weight, reader), {})
        if own:
            yield _stored_of(path, child, own)


def _stored_of(path: str, child: nn.Module, own: Mapping[str, nn.Parameter]) -> _Stored:
    """Return what files have of a module; ``own``: its parameters."""
    if isinstance(child, Projection):
        outside, _, name = path.rpartition(".")
        places = [_join(outside, part) for part in child.parts or [name]]
        parts, cuts = child.stored(), child.cuts()
    else:
        places, parts = [path], [{kind: each.detach() for kind, each in own.items()}]
        cuts = [_cuts(own, getattr(child, "shares", {}))]
    named, cut = list[dict[str, Tensor]](), dict[str, Cut]()
    for at, part, shared in zip(places, parts, cuts, strict=True):
        named.append({_join(at, kind): each for kind, each in part.items()})
        cut |= {_join(at, kind): each for kind, each in shared.items()}
    return _Stored(path, child, named, cut)


def _cuts(own: Mapping[str, Tensor], shares: Mapping[str, int]) -> dict[str, Cut]:
    """Return the cuts of tensors whose first dimensions are ``shares``."""
    found = {}
    for name, size in shares.items():
        if name in own and isinstance(size, Share):
            shape = size.whole, *own[name].shape[1:]
            found[name] = Cut(shape, (Along(size.ranges), *[None] * (len(shape) - 1)))
    return found


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def load_parameters(
    module: nn.Module,
    files: TensorFiles,
    rename: Callable[[str], str] = lambda name: name,
    weights: WeightFormat = PLAIN,
) -> list[str]:
    """Fill every parameter of ``module``, converting to its dtype and device. Each projection is prepared as soon as it
    is read, so that few of them are held in two forms. Return the tensors' names inside the module.

    ``rename`` turns a name inside the module into a canonical one. ``weights``: the files' format, also of weights that
    the module takes plain. Raises ValueError, before anything is read, naming the file and a tensor that is missing or
    has the wrong shape or dtype.
    """
    stored, names = list(_stored(module, rename, weights)), list[str]()
    inference = torch.is_inference_mode_enabled()
    for each in stored:
        for name, target in itertools.chain.from_iterable(part.items() for part in each.parts):
            names.append(name)
            if not (each.on_meta and target.is_meta):
                files.check(rename(name), target, each.cuts.get(name))
    begin = time.perf_counter()
    with ThreadPoolExecutor(READERS, "weights") as readers:
        run = map if all(each.on_meta for each in stored) else readers.map
        size = sum(run(lambda each: each.load(files, rename, inference), stored))
    if size:
        seconds = time.perf_counter() - begin
        words = "%s: %s %.2f GB in %.1f s, %.2f GB/s"
        log.info(words, files.path, files.verb, size / 1e9, seconds, size / 1e9 / seconds)
    return names


_INIT = (Tensor.uniform_, Tensor.normal_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _SkipInit(TorchFunctionMode):
    """Skips the initialization of parameters, which are about to be loaded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INIT:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Give modules made in this context this dtype and device, and uninitialized parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, _SkipInit():
            yield
    finally:
        torch.set_default_dtype(before)


def load_target(
    model_path: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    config: ModelConfig | None = None,
    ranks: Ranks = ONE,
) -> TargetModel:
    """Load a target model, or a rank's part of it, from a Hugging Face directory. ``config`` replaces the directory's.
    Raises ValueError naming what does not fit."""
    config = config or load_model_config(model_path)
    if config.random is None:
        files = TensorFiles(model_path)
        config = _with_head(config, model_path, files)
    else:
        files = RandomTensors(model_path, {}, config.random)
    with building(dtype, device):
        positions = max_positions or config.max_position_embeddings
        try:
            model = model_class(config.architecture, model_path)(config.on(ranks), positions)
        except ValueError as error:
            raise ValueError(f"{model_path}: {error}") from None
    only_head = config.tie_word_embeddings and _HEAD in files and _EMBEDDING not in files

    def rename(name: str) -> str:
        return ".".join(model.renamed.get(part, part) for part in name.split("."))

    names = load_parameters(
        model,
        files,
        lambda name: _HEAD if only_head and name == _EMBEDDING else rename(name),
        config.weights,
    )
    if device.type != "meta":  # without data, not even the weights' format may be that of the files
        known = {*map(rename, names), *([_HEAD] if config.tie_word_embeddings else [])}
        _warn_of_unread(model, known, files)
    return model


def _with_head(config: ModelConfig, model_path: Path, files: TensorFiles) -> ModelConfig:
    """Return a config that says whether embedding and head are one tensor in the file."""
    head = {name for name in files.names() if name.startswith("lm_head.")}
    if not config.tie_word_embeddings:
        return config if head else _tied(config, model_path, files)
    both = _HEAD in files and _EMBEDDING in files
    if head <= {_HEAD} and not (both and _differ(files[_HEAD], files[_EMBEDDING])):
        return config
    log.warning(
        "%s has an lm_head of its own, though its config ties it to the embedding: using it. To silence this, write "
        "tie_word_embeddings false into config.json",
        model_path,
    )
    return replace(config, tie_word_embeddings=False)


def _differ(a: Tensor, b: Tensor) -> bool:
    """Compare two tensors, and read no further than to where they differ."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return True
    return not all(map(torch.equal, a.split(_ROWS), b.split(_ROWS)))


def _tied(config: ModelConfig, model_path: Path, files: TensorFiles) -> ModelConfig:
    """Return a config that uses the embedding as the head, which the file lacks. Raises ValueError if the config says
    that the two are not tied."""
    source = model_path / "config.json"
    if read_json(source).get("tie_word_embeddings") is False:
        raise ValueError(
            f"{model_path} has no tensor lm_head.weight: expected in {files.where}, since {source.name} has "
            "tie_word_embeddings false"
        )
    log.warning("%s has no lm_head.weight, and its config does not tie it: using the embedding's", model_path)
    return replace(config, tie_word_embeddings=True)


def unread_ends(config: ModelConfig) -> tuple[str, ...]:
    """Return the ends of names of tensors that a file may have although no parameter reads them."""
    return tuple(f".{kind}" for kind in (*config.weights.unread, *KV_SCALES))


def _warn_of_unread(model: TargetModel, known: Collection[str], files: TensorFiles) -> None:
    """Warn of tensors that no parameter reads: the model may differ from what its config says."""
    beside = [name for name in files.names() if name.startswith(model.beside)]
    if beside:
        parts = ", ".join(sorted({name.partition(".")[0] for name in beside}))
        log.info("%s: the text part alone: left out %d tensors of %s", files.path, len(beside), parts)
    draft = f"layers.{model.config.num_layers}."  # for multi-token prediction
    drafts = [name for name in files.names() if f"{draft}eh_proj.weight" in files and name.startswith(draft)]
    known = {*known, *beside, *drafts}
    ends = unread_ends(model.config)
    unread = [
        name
        for name in files.names()
        if name not in known and not any(part in name for part in model.unread) and not name.endswith(ends)
    ]
    if model.config.ranks.experts > 1:  # other ranks read other experts
        read = {EXPERT.sub(".", name) for name in known}
        unread = [name for name in unread if EXPERT.sub(".", name) not in read]
    if unread:
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        log.warning("%s: no parameter reads %s%s", files.path, ", ".join(unread[:5]), more)
