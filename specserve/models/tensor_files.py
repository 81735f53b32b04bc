"""Read the tensors of a checkpoint directory, from safetensors or pickled files.

Names are compared without a leading ``model.``, ``language_model.`` or ``text_model.`` and with ``midlayer.`` read as
``layers.0.``, so every published variant of a draft head, and the text part of a vision-language file, looks the same.
So do experts: one tensor with the projections of all, ``experts.gate_up_proj`` [E, O, I] or ``experts.down_proj``, is
read as one for each projection of each; gpt-oss and Qwen3-VL have them as [E, I, O], as ``gate_up_proj_scale_inv`` is
then, too. Next to one of their biases, as gpt-oss has it, gates and ups are by turns; so are ``blocks`` and ``scales``
of MXFP4, [E, O, ..]. Tensors of other formats, such as ``gate_up_proj_weight_scale``, have a number or rows for each
expert or each of its projections.
"""

from __future__ import annotations

import itertools
import logging
import math
import pickle
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from specserve.layers.ranks import Cut
from specserve.layers.weights import FLOATS
from specserve.models.config import read_json

log = logging.getLogger(__name__)

_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_EXPERTS = re.compile(
    r"(.*\.experts)\.(gate_up|down)_proj"
    r"(?:[._](bias|blocks|scales|scale_inv|activation_scale|weight(?:_\w+)?|input_\w+))?"
)
EXPERT = re.compile(r"(?<=\.experts)\.\d+\.")  # its number
_DIMENSIONS = {"weight": 3, "bias": 2, "blocks": 4, "scales": 3}
HEADS = "*_lm_head.pt"  # file names of Medusa and similar heads
AT_ONCE = 1 << 13  # numbers that are read for each name in a file until it is mapped again
_MAPPED = 8  # files


class Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Part(NamedTuple):
    """One expert's ``rows`` of a fused tensor, None: all. ``by_inputs``: it is ``[E, I, O]``."""

    expert: int
    rows: slice | None
    by_inputs: bool

    def of(self, fused: Any) -> Tensor:
        """Read it. ``fused``: a tensor, or a slice of a file."""
        if self.rows is not None and self.rows.stop is not None and not self.by_inputs:
            found: Tensor = fused[self.expert, self.rows]
            return found
        one: Tensor = fused[self.expert]
        if self.rows is None:
            return one
        return (one.mT if self.by_inputs else one)[self.rows]

    def header(self, fused: Header) -> Header:
        if self.rows is None:
            return Header(fused.shape[1:], fused.dtype)
        outputs, *inputs = reversed(fused.shape[1:]) if self.by_inputs else fused.shape[1:]
        return Header((len(range(outputs)[self.rows]), *inputs), fused.dtype)


def canonical(name: str) -> str:
    """Return this package's name for a tensor of a file."""
    name = re.sub(r"^((model|language_model|text_model)\.)+", "", name)
    name = re.sub(r"\.experts\.(\w+_proj)\.(\d+)\.", r".experts.\2.\1.", name)  # ModelOpt's
    name = name.replace(".moe.experts.", ".experts.")  # of quantized Gemma 4
    name = name.replace("_moe.e_score_correction_bias", "_moe.gate.e_score_correction_bias")  # MiniMax-M2's
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _projections(experts: str, fused: str) -> list[str]:
    """Return the names of the projections in a fused one."""
    if ".block_sparse_moe." in experts:
        return ["w1", "w3"] if fused == "gate_up" else ["w2"]
    return [f"{part}_proj" for part in fused.split("_")]


class TensorFiles:
    """The tensors of a checkpoint directory by canonical name. What is read of safetensors is mapped, and released
    soon after use, so memory never holds a whole copy of the weights. Not after each tensor: to map a file takes as
    long as reading a thousand numbers for each of its names."""

    verb = "read"

    def __init__(self, path: Path) -> None:
        """Raise ValueError for files that are missing or can't be read, and for a tensor that is there twice unless
        an index says which of them counts."""
        self.path = path
        self._files: dict[str, tuple[Path, str]] = {}
        self._pickled: dict[Path, dict[str, Tensor]] = {}
        self._opened: dict[Path, Any] = {}  # for their headers
        self._mapped: dict[Path, tuple[Any, int]] = {}  # for reading, and how many numbers more
        self._mapping = Lock()  # threads read tensors
        self._parts: dict[str, _Part] = {}  # of fused tensors
        listed, assigned = weight_files(path)
        self.where = listed[0].name if len(listed) == 1 else f"{listed[0].name} to {listed[-1].name}"
        places = [(file, name) for file in listed for name in self._names(file)]
        places.sort(key=lambda place: assigned.get(place[1]) != place[0])
        for file, name in places:
            other = self._files.setdefault(canonical(name), (file, name))
            if other != (file, name) and assigned.get(name) != other[0]:
                twice = f"as {other[1]} in {other[0].name}, as {name} in {file.name}"
                raise ValueError(f"{path} has {canonical(name)} twice: {twice}")
        by_turns = any(name.endswith(".experts.gate_up_proj_bias") for name in self._files)
        fused = [found for name in self.names() if (found := _EXPERTS.fullmatch(name))]
        by_inputs = {found[1] for found in fused if self._are_by_inputs(found[1])}
        for found in fused:
            self._split(found, by_turns, found[1] in by_inputs and found[3] in (None, "scale_inv"))

    def _are_by_inputs(self, experts: str) -> bool:
        """Return whether fused weights are ``[E, I, O]``: then ``down_proj`` has half of the other's outputs in
        front."""
        names = [f"{experts}.{stem}_proj" for stem in ("gate_up", "down")]
        if not all(name in self for name in names):
            return False
        gate_up, down = (self.header(name).shape for name in names)
        return len(gate_up) == len(down) == 3 and gate_up[1:] == (down[2], 2 * down[1])

    def _split(self, found: re.Match[str], by_turns: bool, by_inputs: bool) -> None:
        """Name the projections in a fused tensor. Raises ValueError if its shape can't be theirs, or if one is there
        by itself."""
        fused, (experts, stem, kind) = found[0], found.groups("weight")
        shape, projections = self.header(fused).shape, _projections(experts, stem)
        count, axis = len(projections), 2 if by_inputs else 1
        if kind not in _DIMENSIONS and math.prod(shape) == 1:  # one for all: left as it is
            return
        shared = kind not in _DIMENSIONS and (len(shape) == 1 or (shape[axis] == 1 and count > 1))
        if len(shape) != _DIMENSIONS.get(kind, len(shape)) or (not shared and shape[axis] % count):
            sizes = [f"outputs of {' and '.join(projections)}", "inputs"][:: -1 if by_inputs else 1]
            wanted = f"expected experts, {sizes[0]}, and {sizes[1]}"
            raise ValueError(f"{self.file(fused)}: tensor {fused} has shape {list(shape)}, {wanted}")
        place, size = self._files.pop(fused), 0 if shared else shape[axis] // count
        for number, (expert, part) in enumerate(itertools.product(range(shape[0]), projections)):
            name = f"{experts}.{expert}.{part}.{'weight_' if kind == 'scale_inv' else ''}{kind}"
            if name in self._files:
                raise ValueError(f"{self.path} has {name} twice: by itself, and in {fused}")
            at = number % count
            rows = slice(at, None, count) if by_turns else slice(at * size, (at + 1) * size)
            self._files[name], self._parts[name] = place, _Part(expert, None if shared else rows, by_inputs)

    def _names(self, file: Path) -> list[str]:
        if file.suffix == ".safetensors":
            return list(self._opened.setdefault(file, _open_safetensors(file)).keys())
        return list(self._pickled.setdefault(file, _load_pickle(file)))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    @property
    def contents(self) -> str:
        """The first names and the files' own, for errors."""
        names = self.names()
        return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} in {self.where}"

    def note_unread(self, known: Collection[str], notes: list[str], prefix: str = "") -> None:
        """Note and log a draft's tensors that are not ``known``, because no parameter reads them: it may differ from
        what it seems. Only names that begin with ``prefix`` are a part of the draft. Other ranks read other experts."""
        own = [name for name in self.names() if name.startswith(prefix)]
        read = {EXPERT.sub(".", name) for name in known}
        if unread := [name for name in own if EXPERT.sub(".", name) not in read]:
            notes.append(f"draft tensors that are not read: {', '.join(unread)}")
            log.warning("%s: no parameter reads %s", self.path, ", ".join(unread))

    def dtypes(self) -> dict[str, torch.dtype | None]:
        """Return each tensor's dtype, None unless it is one of ``FLOATS``, from the files' headers."""
        found = {name: self.header(name).dtype for name in self.names()}
        return {name: dtype if dtype in FLOATS.values() else None for name, dtype in found.items()}

    def header(self, name: str) -> Header:
        """Return what is known of the tensor ``name`` without reading it. Raises ValueError if there is none."""
        file, stored = self.file(name), self._files[name][1]
        if file in self._opened:
            found = self._opened[file].get_slice(stored)
            if dtype := _DTYPES.get(found.get_dtype()):
                header = Header(tuple(found.get_shape()), dtype)
                return self._parts[name].header(header) if name in self._parts else header
        return Header(tuple(self[name].shape), self[name].dtype)

    def file(self, name: str) -> Path:
        """Return the file that holds the tensor ``name``. Raises ValueError if there is none."""
        if name not in self._files:
            raise ValueError(f"{self.path} has no tensor {name}: expected in {self.where}")
        return self._files[name][0]

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self.file(name), self._files[name][1]
        if name in self._parts or file in self._pickled:
            found = self._reader(name)
        else:
            found = self._map(name).get_tensor(stored)
        assert isinstance(found, Tensor)
        return found

    def _reader(self, name: str) -> Any:
        """Return the tensor, or an object that reads parts of it."""
        file, stored = self.file(name), self._files[name][1]
        pickled = self._pickled.get(file)
        found = pickled[stored] if pickled is not None else self._map(name).get_slice(stored)
        return self._parts[name].of(found) if name in self._parts else found

    def _map(self, name: str) -> Any:
        """Return a file that is mapped, to read one of its tensors."""
        file, stored = self._files[name]
        shape = self._opened[file].get_slice(stored).get_shape()
        numbers = math.prod(shape[1:] if name in self._parts else shape)
        with self._mapping:
            mapped, left = self._mapped.pop(file, (None, 0))
            if left <= 0:
                mapped = _open_safetensors(file)
                left = AT_ONCE * len(mapped.keys())
            self._mapped[file] = mapped, left - numbers
            if len(self._mapped) > _MAPPED:
                del self._mapped[next(iter(self._mapped))]
        return mapped

    def check(self, name: str, target: Tensor, cut: Cut | None = None) -> None:
        """Raise ValueError naming the file if there is no tensor ``name`` of which a parameter's ``target`` can be the
        whole, or the part that ``cut`` says."""
        wanted = target.shape if cut is None else cut.shape
        if name not in self:
            where = f"expected in {self.where}, of shape {list(wanted)}"
            raise ValueError(f"{self.path} has no tensor {name}: {where}")
        found = self.header(name)
        fits = found.shape == wanted or (*found.shape, 1) == wanted  # a scale an output as [O]
        if not fits and not math.prod(found.shape) == math.prod(wanted) == 1:
            shapes = f"{list(found.shape)}, expected {list(wanted)}"
            raise ValueError(f"{self.file(name)}: tensor {name} has shape {shapes}")
        accepted = FLOATS.values() if target.dtype in FLOATS.values() else [target.dtype]
        accepted = [torch.int32, torch.int64] if name.endswith("g_idx") else accepted
        if found.dtype not in accepted:
            dtypes = f"{_name(found.dtype)}, expected {', '.join(map(_name, accepted))}"
            raise ValueError(f"{self.file(name)}: tensor {name} has dtype {dtypes}")

    def fill(self, name: str, target: Tensor, module: nn.Module, cut: Cut | None = None) -> Tensor:
        """Return the tensor ``name``, or a part of it, in the shape of ``target``, which ``module`` takes."""
        if cut is None:
            return self[name].view(target.shape)
        in_file = cut._replace(along=cut.along[: len(self.header(name).shape)])  # a scale an output as [O]
        return in_file.read(self._reader(name)).reshape(target.shape)


def weight_files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files that hold a checkpoint's weights, and which of them an index assigns to tensors. A layer that
    drafts may be in a file of its own, ``mtp.safetensors``, that the index lacks. Raises ValueError naming what is
    missing."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory with a checkpoint")
    own = sorted(path.glob("*mtp*.safetensors"))
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
            assigned = {name: path / file for name, file in shards.items()}
            files = sorted({*assigned.values(), *own})
            for file in files:
                if not file.exists():
                    raise ValueError(f"{file} is named by {index.name} but does not exist")
            return files, assigned
        if (path / stem).exists():
            return [path / stem, *own], {}
    found = sorted(path.glob("*.safetensors")) or sorted(path.glob(HEADS))
    if not found:
        raise ValueError(
            f"{path} has no weights: neither *.safetensors nor pytorch_model.bin nor {HEADS}; --load-format dummy "
            "draws random ones, for models and for drafts of one layer"
        )
    return found, {}


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from None


def _load_pickle(file: Path) -> dict[str, Tensor]:
    try:
        mmap = zipfile.is_zipfile(file)  # files from before PyTorch 1.6 are not
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:  # PyTorch's own message suggests running the code
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
