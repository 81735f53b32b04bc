"""Projections that keep their weight quantized as in the file, and the format that describes them.

On a GPU the kernel ``packed_linear`` multiplies them, FP8 weights by activations quantized to FP8, floats of 4 bits by
16-bit activations, others by these as 15-bit integers. On a CPU, in float64, and for other weights in float32, the
weight is dequantized to the model's dtype at load, which saves no memory, and activations of FP8 weights are rounded.

Shapes: T tokens, I inputs, O outputs, G groups of inputs, R selected outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from math import gcd
from threading import Lock
from typing import Any, Protocol

import specserve_kernels as kernels
import torch
from specserve_kernels import FP8, PAIRED, Gate, Numbers, Packed, Rounded, on_gpu
from specserve_kernels.ops import device as devices
from torch import Tensor, nn

from specserve.layers.linear import PLAIN, Linear, multiplies_integers, pick_rows
from specserve.layers.ranks import FLAG, Cut, Share, cut_of, ranges_of, whole_of
from specserve.layers.weights import Place, Projection, WeightFormat

LEAST_GROUP = 32  # inputs that share a scale, for which there are kernels
FP8_CAPABILITY = (8, 9)  # compute capability of the first GPUs with FP8 conversion in hardware
_ARRIVALS = Lock()  # threads load weights that are stored together


class Layout(Protocol):
    """The storage layout of one projection's weight in a file. Immutable; equal if it means the same."""

    @property
    def words(self) -> str:
        """Its description in logs."""
        ...

    @property
    def split(self) -> int:
        """Into how many groups one of the file is cut, with the same scale."""
        ...

    def tensors(self, outputs: int, inputs: int) -> dict[str, Tensor]:
        """Return a file's tensors, empty, by the last part of their names. On the CPU: those whose values are needed to
        choose kernels. Raises ValueError for an impossible shape."""
        ...

    def fitted(self, outputs: int, inputs: int) -> Layout:
        """Return the layout of a rank's part, ``Share``s of a weight. Raises ValueError if it can't be cut there."""
        ...

    def numbers(self, stored: Mapping[str, Tensor], device: torch.device) -> Numbers:
        """Return on ``device`` the weight that a file's tensors encode; ``order_I`` is on the CPU. Raises ValueError
        for values that they can't have."""
        ...


class StoredProjection(Projection):
    """A projection in one layout. Until it is loaded it holds nothing; then it has either ``plain`` (dequantized),
    ``apart`` (its parts separately), or ``packed``, whose tensors are buffers too. ``awaited``: whether another's
    weight is stored behind it."""

    packed: Packed
    bias_O: Tensor | None
    awaited: bool = False

    def __init__(self, layout: Layout, inputs: int, parts: Mapping[str, int], bias: bool) -> None:
        super().__init__()
        self.parts = parts
        self._filed, self._bias = layout, bias
        self.layout = layout = reduce(lambda found, each: found.fitted(each, inputs), parts.values(), layout)
        self._dtype, self._device = torch.get_default_dtype(), torch.empty(0).device
        self.inputs = inputs
        self._arrived: dict[int, list[Numbers]] = {}
        self.plain: Linear | None = None
        self.apart: Joined | None = None
        self._files = nn.ModuleDict()  # by number of outputs: thousands of experts have the same
        with torch.device("meta"):
            for outputs in set(parts.values()):
                tensors = layout.tensors(outputs, inputs)
                if bias:
                    tensors["bias"] = torch.empty(outputs)
                # Without memory.
                shapes = {name: each.new_empty(()).expand_as(each) for name, each in tensors.items()}
                parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in shapes.items()}
                self._files[str(outputs)] = nn.ParameterDict(parameters)
        if any(part["weight"].dtype == FP8 for part in self.stored() if "weight" in part):
            check_capability(self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def _instead(self) -> Projection | None:
        return self.apart or self.plain

    def stored(self) -> list[dict[str, Tensor]]:
        found = {
            size: {name: each.detach() for name, each in part.named_parameters()}
            for size, part in self._files.items()
        }
        return [found[str(outputs)] for outputs in self.parts.values()]

    def cuts(self) -> list[dict[str, Cut]]:
        places = [(whole_of(outputs), *ranges_of(outputs)) for outputs in self.parts.values()]
        distinct = dict(zip(places, zip(self.parts.values(), self.stored(), strict=True), strict=True))
        found = {place: self._cuts(*each) for place, each in distinct.items()}
        return [found[place] for place in places]

    def _cuts(self, outputs: int, part: Mapping[str, Tensor]) -> dict[str, Cut]:
        if not isinstance(self.inputs, Share) and self.layout == self._filed and outputs == whole_of(outputs):
            return {}
        sizes = whole_of(outputs), whole_of(self.inputs)
        with torch.device("meta"):
            bias = {"bias": torch.empty(sizes[0])} if self._bias else {}
            filed, fitted = (each.tensors(*sizes) | bias for each in (self._filed, self.layout))
        shares = outputs, self.inputs, self.layout.split
        cuts = {name: cut_of(filed[name], fitted[name], each, *shares) for name, each in part.items()}
        return {name: cut for name, cut in cuts.items() if cut is not None}

    def load(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        del self._files
        numbers = self._numbers(files)
        if self.stacked and any(part.order_I is not None for part in numbers):
            raise ValueError("experts need inputs in their order, found another one in g_idx")
        if self.place is not None:
            assert isinstance(self.place.behind, StoredProjection)
            self.place.behind._hold_both(1, self.place.order(_pieces(part, self.place) for part in numbers))
            return
        if self.awaited:
            self._hold_both(0, numbers)
            return
        biases = [moved(part["bias"], self._device, self._dtype) for part in files if "bias" in part]
        if self.order_O is not None:
            numbers = [_reordered(part, self.order_O) for part in numbers]
            biases = [each[self.order_O] for each in biases]
        if _in_one_order(numbers):
            self._hold(numbers, torch.cat(biases) if biases else None)
        else:
            self.apart = self._each_part(numbers, biases or [None] * len(numbers))

    def _numbers(self, files: Sequence[Mapping[str, Tensor]]) -> list[Numbers]:
        """Return each part's weight. Parts without data, such as thousands of experts, may be the same tensors: their
        numbers are copied, which takes as many bytes and less time."""
        numbers, made = list[Numbers](), dict[tuple[int, ...], Numbers]()
        for name, part in zip(self.parts, files, strict=True):
            tensors = tuple(map(id, part.values()))
            if tensors in made:
                numbers.append(_copied(made[tensors]))
                continue
            made[tensors] = found = self.layout.numbers(self._in_order(part), self._device)
            numbers.append(found)
            for each in (found.scale_SG, found.unit_O1):
                if each is not None and not each.is_meta and not each.isfinite().all():
                    raise ValueError(f"the scales of {name} must be finite numbers, found others")
        return numbers

    def _in_order(self, part: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a rank's inputs without the numbers of their groups. Raises ValueError unless these follow each other,
        for then no scale belongs to inputs of different ranks."""
        names = [name for name in part if name.endswith("g_idx") and isinstance(self.inputs, Share)]
        for name in names:
            index_I, ((begin, end),) = part[name], ranges_of(self.inputs)
            group = getattr(self._filed, "group", 0) or whole_of(self.inputs)
            if not (index_I < 0).all() and not torch.equal(index_I.long(), torch.arange(begin, end) // group):
                raise ValueError(f"{FLAG} must be 1: inputs that g_idx puts into another order are not cut")
        return {name: each for name, each in part.items() if name not in names}

    def fits(self, place: Place) -> bool:
        other, sizes = place.behind, [next(iter(self.parts.values())), self.inputs]
        if type(other) is not StoredProjection or other.layout != self.layout or self._bias or other._bias:
            return False
        each = sizes[place.along] // place.many
        sizes[place.along] = Share(each * place.many, [(each, 2 * each)])
        try:
            return place.many == 1 or self.layout.fitted(*sizes) == self.layout
        except ValueError:
            return False

    def move(self, place: Place) -> None:
        assert isinstance(place.behind, StoredProjection)
        self.place, self.stacked, place.behind.awaited = place, True, True

    def _hold_both(self, at: int, numbers: list[Numbers]) -> None:
        """Keep own parts and those of a weight behind them as one, when both are there."""
        with _ARRIVALS:
            self._arrived[at] = numbers
            if len(self._arrived) < 2:
                return
        both = self._arrived.pop(0)
        both += self._arrived.pop(1)
        self._hold(both, None)

    def _hold(self, numbers: list[Numbers], bias_O: Tensor | None) -> None:
        """Keep these parts as one weight. ``numbers`` is emptied, so that memory never holds three copies."""
        fused = fuse(numbers)
        numbers.clear()
        if is_fp8 := fused.values_OI.dtype == FP8:
            check_capability(self._device)
            served = on_gpu(self._device) and self._dtype != torch.float64
        else:
            served = multiplies_integers(self._device, self._dtype)
        if not served or self.kept_plain:
            self.plain = Linear.of(kernels.dequantize_numbers(fused, self._dtype), bias_O)
            self.plain.rounding = FP8 if is_fp8 else None
            self.plain.stacked, self.plain.kept_plain = self.stacked, self.kept_plain
            return
        self.packed = kernels.pack(fused, self.stacked)
        for name, each in {**self.packed._asdict(), "bias_O": bias_O}.items():
            if each is None or isinstance(each, Tensor):
                self.register_buffer(name, each, persistent=False)

    def _each_part(self, numbers: Sequence[Numbers], biases: Sequence[Tensor | None]) -> Joined:
        """Keep each part separately: parts with different orders have no inputs in common."""
        pieces = []
        for (name, outputs), part, bias_O in zip(self.parts.items(), numbers, biases, strict=True):
            piece = StoredProjection(self.layout, self.inputs, {name: outputs}, bias=False)
            del piece._files
            piece._device, piece._dtype = self._device, self._dtype
            piece._hold([part], bias_O)
            pieces.append(piece)
        return Joined(pieces)

    def forward(self, x_TI: Tensor | Rounded, gated: Gate = None, out: Tensor | None = None) -> Tensor:
        if (instead := self._instead) is not None:
            found: Tensor = instead(x_TI, gated, out)
            return found
        found = kernels.packed_linear(x_TI, self.packed, self.bias_O, gated)
        return found if out is None else out.copy_(found)

    def gate_for(self, reader: Projection, x_TI: Tensor | Rounded, gated: Gate) -> Tensor | Rounded:
        rounding = reader.rounds_to(len(x_TI) if isinstance(x_TI, Tensor) else x_TI.unit_GT.shape[1])
        if self._instead is not None or rounding not in (FP8, PAIRED):
            return super().gate_for(reader, x_TI, gated)
        return kernels.gate_rounded(x_TI, self.packed, self.bias_O, rounding, gated)

    def rounds_to(self, tokens: int) -> torch.dtype | None:
        if self._instead is not None or self.packed.order_I is not None:
            return None
        rounding = self.packed.rounding
        return None if self.stacked and rounding != FP8 else rounding

    def rows(self, ids_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if (instead := self._instead) is not None:
            return instead.rows(ids_R)
        bias_O = self.bias_O if ids_R is None or self.bias_O is None else self.bias_O[ids_R]
        return kernels.dequantize_packed(self.packed, self._dtype, ids_R), bias_O

    def of_experts(self, count: int) -> tuple[Tensor | Packed, Tensor | None, bool]:
        if self._instead is not None:
            return self._instead.of_experts(count)
        return self.packed, None if self.bias_O is None else self.bias_O.unflatten(0, (count, -1)), False


def check_cuts(outputs: int, inputs: int, *units: int) -> None:
    """Raise ValueError unless ranks' parts of outputs and inputs begin and end at multiples of ``units``."""
    for size, unit, words in zip((outputs, inputs), units, ("outputs", "inputs"), strict=True):
        if isinstance(size, Share) and size.multiple % unit:
            raise ValueError(f"{FLAG}: weights are cut at multiples of {unit} {words}, found {size.multiple}")


def smaller_groups(group: int, size: int) -> tuple[int, int]:
    """Return the largest groups that parts of a size can have, if it is shared out, and how many make up one of the
    file. ``group`` 0: all."""
    smaller = gcd(group, size.multiple) if group and isinstance(size, Share) else group
    return smaller, group // smaller if smaller else 1


def moved(found: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a file's tensor on ``device``: on a GPU always a copy."""
    return found.to(device, dtype or found.dtype, copy=on_gpu(device))


def check_capability(device: torch.device) -> None:
    """Raise ValueError if this GPU, or for ``meta`` the one that kernels are compiled for, has no FP8."""
    if on_gpu(device) and (found := devices.capability_of(device)) < FP8_CAPABILITY:
        raise ValueError(
            "FP8 weights need a GPU of compute capability 8.9 or more, this one has "
            f"{'.'.join(map(str, found))}: accepted are int8, 4 bits and 16 bits"
        )


def fuse(parts: Sequence[Numbers]) -> Numbers:
    """Stack weights of one layout and order with their scales. If a part ends inside a block of outputs, scales are
    repeated for each output."""
    rows = parts[0].rows
    if any(len(part.values_OI) % rows for part in parts[:-1]):
        parts, rows = [_each_output(part) for part in parts], 1
    zeros, units = (
        [each for part in parts if (each := getattr(part, name)) is not None]
        for name in ("zero_OG", "unit_O1")
    )
    values_OI, order_I = parts[0].values_OI, parts[0].order_I
    return Numbers(
        torch.cat([part.values_OI.view(torch.uint8) for part in parts]).view(values_OI.dtype),
        torch.cat([part.scale_SG for part in parts]),
        torch.cat(zeros) if zeros else None,
        parts[0].group,
        rows,
        None if order_I is None else order_I.to(values_OI.device),
        parts[0].floats,
        torch.cat(units) if units else None,
    )


def _reordered(part: Numbers, order_O: Tensor) -> Numbers:
    """Return these outputs. Where blocks of outputs do not stay whole, scales are repeated for each output."""
    blocks_O = order_O // part.rows
    if len(order_O) % part.rows or not blocks_O.view(-1, part.rows).diff().eq(0).all():
        part, blocks_O = _each_output(part), order_O
    values_OI = part.values_OI.view(torch.uint8)[order_O].view(part.values_OI.dtype)
    zero_OG, unit_O1 = (None if each is None else each[order_O] for each in (part.zero_OG, part.unit_O1))
    scale_SG = part.scale_SG[blocks_O[:: part.rows]]
    return part._replace(values_OI=values_OI, scale_SG=scale_SG, zero_OG=zero_OG, unit_O1=unit_O1)


def _pieces(part: Numbers, place: Place) -> list[Numbers]:
    """Cut a weight. Scales of all inputs are those of each piece."""
    many, along = place.many, place.along
    cut = {
        name: [each] * many if each.shape[along] == 1 else each.chunk(many, along)
        for name, each in part._asdict().items()
        if isinstance(each, Tensor)
    }
    changes: list[dict[str, Any]] = [{name: each[i] for name, each in cut.items()} for i in range(many)]
    return [part._replace(**each) for each in changes]


def _in_one_order(parts: Sequence[Numbers]) -> bool:
    orders = [part.order_I for part in parts if part.order_I is not None]
    return not orders or (len(orders) == len(parts) and all(torch.equal(each, orders[0]) for each in orders))


def _copied(part: Numbers) -> Numbers:
    changes: dict[str, Any] = {
        name: each.clone() for name, each in part._asdict().items() if isinstance(each, Tensor)
    }
    return part._replace(**changes)


def _each_output(part: Numbers) -> Numbers:
    scale_SG = part.scale_SG.repeat_interleave(part.rows, 0)[: len(part.values_OI)]
    return part._replace(scale_SG=scale_SG, rows=1)


class Joined(Projection):
    """Projections of the same inputs, concatenated: for parts that are stored in different ways."""

    def __init__(self, pieces: Sequence[Projection]) -> None:
        super().__init__()
        self.parts = {name: outputs for piece in pieces for name, outputs in piece.parts.items()}
        self._pieces = nn.ModuleList(pieces)

    @property
    def pieces(self) -> list[Projection]:
        return [piece for piece in self._pieces if isinstance(piece, Projection)]

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device

    def stored(self) -> list[dict[str, Tensor]]:
        return [part for piece in self.pieces for part in piece.stored()]

    def cuts(self) -> list[dict[str, Cut]]:
        return [part for piece in self.pieces for part in piece.cuts()]

    def load(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        left = iter(files)
        for piece in self.pieces:
            piece.load([next(left) for _ in piece.parts])

    def forward(self, x_TI: Tensor | Rounded, gated: Gate = None, out: Tensor | None = None) -> Tensor:
        found = torch.cat([piece(x_TI) for piece in self.pieces], -1)
        found = kernels.apply_gate(found, gated)
        return found if out is None else out.copy_(found)

    def rounds_to(self, tokens: int) -> torch.dtype | None:
        found = {piece.rounds_to(tokens) for piece in self.pieces}
        return found.pop() if len(found) == 1 else None

    def rows(self, ids_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weights, biases = zip(*(piece.rows(None) for piece in self.pieces), strict=True)
        weight_OI, bias_O = torch.cat(weights), None
        if any(each is not None for each in biases):
            zeros = [weight.new_zeros(len(weight)) for weight in weights]
            bias_O = torch.cat(
                [zero if each is None else each for each, zero in zip(biases, zeros, strict=True)]
            )
        return (weight_OI, bias_O) if ids_R is None else pick_rows(weight_OI, bias_O, ids_R)


@dataclass(frozen=True)
class StoredWeights(WeightFormat):
    """``layouts``: those of the quantized modules by name without ``model.``, none if only the KV cache is quantized;
    all other modules are plain. ``unread``: tensors that ``dialect`` writes and nothing reads, as in
    ``WeightFormat``."""

    dialect: str
    layouts: Mapping[str, Layout] = field(hash=False)
    unread: tuple[str, ...] = ()

    @cached_property
    def unit(self) -> int:
        return LEAST_GROUP if any(getattr(layout, "group", 0) for layout in self.layouts.values()) else 1

    @cached_property
    def words(self) -> str:
        kinds = dict.fromkeys(layout.words for layout in self.layouts.values())
        return f"{self.dialect}: {', '.join(kinds)}" if kinds else ""

    def stores(self, module: str) -> bool:
        return module in self.layouts

    def projection(self, name: str, inputs: int, parts: Mapping[str, int], bias: bool) -> Projection:
        """Return one projection if all parts are stored in the same way, otherwise one for each part."""
        found = [self.layouts.get(f"{name}.{part}" if name else part) for part in parts]

        def make(layout: Layout | None, of: Mapping[str, int]) -> Projection:
            if layout is None:
                return PLAIN.projection(name, inputs, of, bias)
            return stored_projection(layout, name, inputs, of, bias)

        if all(layout == found[0] for layout in found):
            return make(found[0], parts)
        pairs = zip(found, parts.items(), strict=True)
        return Joined([make(layout, {part: outputs}) for layout, (part, outputs) in pairs])


def stored_projection(
    layout: Layout, name: str, inputs: int, parts: Mapping[str, int], bias: bool
) -> StoredProjection:
    """Make a projection as a ``WeightFormat`` does. Raises ValueError naming its modules."""
    try:
        return StoredProjection(layout, inputs, parts, bias)
    except ValueError as error:
        names = [full_name(f"{name}.{part}" if name else part) for part in parts]
        names[3:] = [f"{len(names) - 3} more"] * (len(names) > 3)
        raise ValueError(f"{', '.join(names)}: {error}") from None


def stored_weights(dialect: str, layouts: Mapping[str, Layout], unread: Sequence[str]) -> StoredWeights:
    """Return the format. Raises ValueError if no module is quantized."""
    if not layouts:
        raise ValueError(f"quantization_config says {dialect}, but the files hold no weight with scales")
    return StoredWeights(dialect, layouts, tuple(unread))


def one_of(config: Mapping[str, Any], field: str, accepted: Collection[object]) -> Any:
    """Return the value of a field, None if it is absent. Raises ValueError unless it is one of the accepted values."""
    found = config.get(field)
    if found is not None and found not in accepted:
        words = ", ".join(str(each) for each in accepted)
        raise ValueError(f"quantization_config: {field} must be {words}, found {found!r}")
    return found


def texts(config: Mapping[str, Any], field: str) -> list[str]:
    """Return a list of names or patterns, empty if there is none. Raises ValueError for anything else."""
    found = config.get(field) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"quantization_config: {field} must be a list of names, found {found!r}")
    return [text_name(each) for each in found]


def objects(config: Mapping[str, Any], field: str) -> Mapping[str, Mapping[str, Any]]:
    """Return an object of objects by names or patterns, empty if there is none. Raises ValueError for anything else."""
    found = config.get(field) or {}
    if not isinstance(found, Mapping) or not all(isinstance(each, Mapping) for each in found.values()):
        raise ValueError(f"quantization_config: {field} must be an object of objects, found {found!r}")
    return found


def text_name(name: str) -> str:
    """Return a name or pattern as the configuration of a language model alone would write it."""
    return re.sub(r"language_model(\\?\.(?![*+?{]))?", "", name)


def modules_with(names: Collection[str], *kinds: str) -> list[str]:
    """Return the modules that have a tensor of one of these kinds (the last part of its name), sorted."""
    return sorted(
        {name.removesuffix(f".{kind}") for name in names for kind in kinds if name.endswith(f".{kind}")}
    )


def matches(pattern: str, module: str) -> bool:
    """Return whether a module's name begins with a match of a regular expression. Raises ValueError if it is
    invalid."""
    return _compiled(pattern).match(module) is not None


@cache  # re has one for 512
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"quantization_config: {pattern!r} is not a regular expression: {error}") from None


def full_name(module: str) -> str:
    """Return a module's name as configurations write it."""
    return module if module.startswith("lm_head") else f"model.{module}"


class ExcludedError(ValueError):
    """The configuration excludes a module whose tensors are quantized."""


def check_left_out(modules: Collection[str], field: str, leaves_out: Callable[[str], bool]) -> None:
    """Raise ExcludedError for a module that ``field`` excludes although its tensors are quantized."""
    for module in modules:
        if leaves_out(full_name(module)):
            raise ExcludedError(f"{field} excludes {full_name(module)}, which the files hold quantized")
