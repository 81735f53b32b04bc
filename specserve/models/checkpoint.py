"""Model weights on disk: Hugging Face names in files, fused projections in modules, which say what they are made of.

Names are compared without a leading ``model.`` and
with ``midlayer.`` read as ``layers.0.``, so every published flavour of a draft head looks the same.
"""

from __future__ import annotations

import logging
import pickle
import re
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specserve.layers.weights import Projection
from specserve.models.config import ModelConfig, read_json
from specserve.models.llama import LlamaModel
from specserve.models.read_config import load_model_config
from specserve.models.registry import model_class

log = logging.getLogger(__name__)

READERS = 4  # tensors read at a time: a disk, and the copy to a device, are faster than one of them
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def canonical(name: str) -> str:
    """The name under which a file's tensor is known here."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


class TensorFiles:
    """The tensors of a checkpoint directory by canonical name. One of a safetensors file is a mapping of its own: what
    was read of it is no longer held in memory than the tensor, so that never a whole copy of the weights is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, tuple[Path, str]] = {}
        self._pickled: dict[Path, dict[str, Tensor]] = {}
        listed = _weight_files(path)
        self.where = listed[0].name if len(listed) == 1 else f"{listed[0].name} to {listed[-1].name}"
        for file in listed:
            if file.suffix == ".safetensors":
                names = list(_open_safetensors(file).keys())
            else:
                names = list(self._pickled.setdefault(file, _load_pickle(file)))
            self._files.update((canonical(name), (file, name)) for name in names)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def file(self, name: str) -> Path:
        """The file that holds the tensor ``name``. Raises ValueError when there is none."""
        if name not in self._files:
            raise ValueError(f"{self.path} has no tensor {name}: expected in {self.where}")
        return self._files[name][0]

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self.file(name), self._files[name][1]
        if file in self._pickled:
            return self._pickled[file][stored]
        found = _open_safetensors(file).get_tensor(stored)
        assert isinstance(found, Tensor)
        return found


def _weight_files(path: Path) -> list[Path]:
    """The files that hold a checkpoint's weights. Raises ValueError naming what is missing."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory with a checkpoint")
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{stem}.index.json"
        if index.exists():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ValueError(f"{index}: weight_map must be an object that is not empty")
            if odd := [name for name, file in shards.items() if not isinstance(file, str)]:
                raise ValueError(
                    f"{index}: weight_map must name a file for {odd[0]}, found {shards[odd[0]]!r}"
                )
            files = [path / name for name in sorted(set(shards.values()))]
            for file in files:
                if not file.exists():
                    raise ValueError(f"{file} is named by {index.name} but does not exist")
            return files
        if (path / stem).exists():
            return [path / stem]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{path} has no weights: neither *.safetensors nor pytorch_model.bin")
    return found


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from None


def _load_pickle(file: Path) -> dict[str, Tensor]:
    try:
        mmap = zipfile.is_zipfile(file)  # files of before PyTorch 1.6 are none
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:  # its own words advise to run the code
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"it wants to run {found[1]}" if found else "it is damaged or more than plain data"
        raise ValueError(
            f"{file} is not a readable torch checkpoint: {why}; expected tensors alone"
        ) from None
    except Exception as error:  # a damaged file: the unpickler raises nearly everything
        raise ValueError(f"{file} is not a readable torch checkpoint: {_words(error)}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{file} must hold a dictionary of tensors, found {type(state).__name__}")
    return {str(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def file_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of ``module`` under the names of a file, fused ones split. Views, not copies."""
    tensors: dict[str, Tensor] = {}
    seen = set[nn.Parameter]()
    for path, child in module.named_modules():
        own = dict(child.named_parameters(recurse=False))
        if seen.issuperset(own.values()):
            continue  # none, or tied to another's
        seen.update(own.values())
        stored: Iterable[tuple[str, Mapping[str, Tensor]]] = [(path, own)]
        if isinstance(child, Projection):
            outside, _, name = path.rpartition(".")
            parts = [_join(outside, part) for part in child.parts or [name]]
            stored = zip(parts, child.stored(), strict=True)
        for prefix, found in stored:
            tensors.update({_join(prefix, kind): tensor.detach() for kind, tensor in found.items()})
    return tensors


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


@torch.no_grad()
def load_parameters(
    module: nn.Module, files: TensorFiles, rename: Callable[[str], str] = lambda name: name
) -> None:
    """Fills every parameter of ``module``, converting to its dtype and device.

    ``rename`` turns a name inside the module into a canonical one. Raises ValueError naming the file and
    tensor when one is missing, of another shape or no plain number; before any is read.
    """
    targets = [(rename(name), target) for name, target in file_tensors(module).items() if not target.is_meta]
    for name, target in targets:
        _check_tensor(files, name, target)
    begin = time.perf_counter()
    with ThreadPoolExecutor(READERS, "weights") as readers:
        size = sum(readers.map(lambda each: _read(files[each[0]], each[1]), targets))
    if size:
        seconds = time.perf_counter() - begin
        log.info(
            "%s: read %.2f GB in %.1f s, %.2f GB/s", files.path, size / 1e9, seconds, size / 1e9 / seconds
        )
    for child in module.modules():
        if isinstance(child, Projection):
            child.loaded()


def _check_tensor(files: TensorFiles, name: str, target: Tensor) -> None:
    if name not in files:
        wanted = f"expected in {files.where}, of shape {list(target.shape)}"
        raise ValueError(f"{files.path} has no tensor {name}: {wanted}")
    found = files[name]
    if found.shape != target.shape:
        shapes = f"{list(found.shape)}, expected {list(target.shape)}"
        raise ValueError(f"{files.file(name)}: tensor {name} has shape {shapes}")
    accepted = DTYPES.values() if target.dtype in DTYPES.values() else [target.dtype]
    if found.dtype not in accepted:
        dtypes = f"{_name(found.dtype)}, expected {', '.join(map(_name, accepted))}"
        raise ValueError(f"{files.file(name)}: tensor {name} has dtype {dtypes}")


def _read(found: Tensor, target: Tensor) -> int:
    """The bytes that were read. A thread has modes of its own."""
    with torch.no_grad(), torch.inference_mode(target.is_inference()):
        target.copy_(found)
    return found.nbytes


_INIT = (Tensor.uniform_, Tensor.normal_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _SkipInit(TorchFunctionMode):
    """Leaves fresh parameters as they are: they are about to be loaded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INIT:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def building(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Modules made inside have this dtype and device, and parameters that still must be loaded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, _SkipInit():
            yield
    finally:
        torch.set_default_dtype(before)


def load_target(
    model_path: Path, dtype: torch.dtype, device: torch.device, max_positions: int | None = None
) -> LlamaModel:
    """Loads a target model from a Hugging Face directory. Raises ValueError saying what does not fit."""
    config, files = load_model_config(model_path), TensorFiles(model_path)
    if "lm_head.weight" not in files and not config.tie_word_embeddings:
        config = _tied(config, model_path, files)
    with building(dtype, device):
        positions = max_positions or config.max_position_embeddings
        model = model_class(config.architecture, model_path)(config, positions)
    load_parameters(model, files)
    _warn_of_unread(model, files)
    return model


def _tied(config: ModelConfig, model_path: Path, files: TensorFiles) -> ModelConfig:
    """A file without a head takes the embedding, unless its config says that the two are not tied."""
    source = model_path / "config.json"
    if read_json(source).get("tie_word_embeddings") is False:
        raise ValueError(
            f"{model_path} has no tensor lm_head.weight: expected in {files.where}, since {source.name} has "
            "tie_word_embeddings false"
        )
    log.warning(
        "%s has no lm_head.weight and its config does not tie it: the embedding's is taken", model_path
    )
    return replace(config, tie_word_embeddings=True)


def _warn_of_unread(model: LlamaModel, files: TensorFiles) -> None:
    """Tensors that no parameter wants may mean that the model is another than its config says."""
    known = {*file_tensors(model), "lm_head.weight"}
    unread = [n for n in files.names() if n not in known and not any(part in n for part in model.unread)]
    if unread:
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        log.warning("%s: no parameter reads %s%s", files.path, ", ".join(unread[:5]), more)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
