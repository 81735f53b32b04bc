"""Linear layers with weights laid out for the processor that they run on.

On a CPU in float32, PyTorch multiplies with the BLAS it was built with, which reads weights row by row and is slow for
the few rows of a decode step. oneDNN, which PyTorch includes too, takes weights packed once in blocks: measured in
docs/decisions/0007-packed-cpu-weights.md. For bfloat16 it needs a processor with AVX-512. On a GPU
``specserve_kernels.linear`` chooses.

Weights may be quantized to 8 bits. On a GPU, few tokens are then multiplied by the quantized weights, which halves the
bytes read; more tokens are multiplied by the original weights, which are kept next to them. With int8 weights, 16-bit
activations and tensor cores since Ampere, activations are quantized too. On a CPU and in float64, all weights (and with
int8, the activations of few tokens) are only rounded to the quantized values and multiplied as before, so that drafts
are about as good as on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import specserve_kernels as kernels
import torch
from specserve_kernels import FP8, Gate, Rounded, on_gpu, rounded_inputs
from specserve_kernels.ops import device as devices
from torch import Tensor, nn

from specserve.layers.ranks import Cut, cut_of, whole_of
from specserve.layers.weights import Place, Projection, WeightFormat

_ROWS_HINT = 8  # the batch size that oneDNN picks the blocks for; good from 1 row to 512
FEW_TOKENS, FEW_CONVERTED = 128, 32
"""Most tokens to multiply by quantized weights, as integers and after conversion. On an H200, a level of 64 tokens
takes 144 us in int8 and 213 in bfloat16, of 128 tokens 203 and 226; projections of 32, 181 in FP8, 196 in bfloat16."""
QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Dtypes of 8-bit weights, by the settings' names."""
MULTIPLIES_INTEGERS = (8, 0)
"""First compute capability on which Triton multiplies int8 on tensor cores."""


def add_in_order() -> None:
    """Make this process's cuBLAS add inputs like our kernels: 16 at a time, in order, for any number of tokens. It may
    neither split K nor round partial sums."""
    if "Cublaslt" not in str(torch.backends.cuda.preferred_blas_library()):
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


class Linear(Projection, nn.Linear):
    """A projection with plain weights. After ``pack`` it holds them only in oneDNN's layout. ``rounding``: what its
    inputs are rounded to, for int8 only those of few tokens."""

    bias: nn.Parameter | None  # type: ignore[assignment]
    parts: Mapping[str, int] = {}  # replaced, never mutated
    packed: Tensor | None = None
    rounding: torch.dtype | None = None

    @property
    def inputs(self) -> int:
        return self.in_features

    @property
    def is_plain(self) -> bool:
        """Whether it does nothing but multiply by its weight."""
        return self.bias is None and self.packed is None and self.rounding is None

    @classmethod
    def of(cls, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """Make a projection that shares another's weights."""
        made = cls(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
        made.weight = _parameter(weight_OI)
        if bias_O is not None:
            made.bias = _parameter(bias_O)
        return made

    def stored(self) -> list[dict[str, Tensor]]:
        sizes = [*self.parts.values()] or [self.out_features]
        pieces = {name: p.detach()[: sum(sizes)].split(sizes) for name, p in self.named_parameters()}
        return [{name: piece[i] for name, piece in pieces.items()} for i in range(len(sizes))]

    def cuts(self) -> list[dict[str, Cut]]:
        inputs, found = self.inputs, list[dict[str, Cut]]()
        for outputs, part in zip(self.parts.values() or [self.out_features], self.stored(), strict=True):
            sizes = {"weight": (whole_of(outputs), whole_of(inputs)), "bias": (whole_of(outputs),)}
            whole = {name: torch.empty((), device="meta").expand(sizes[name]) for name in part}  # no memory
            cuts = {
                name: cut_of(whole[name], whole[name], each, outputs, inputs) for name, each in part.items()
            }
            found.append({name: cut for name, cut in cuts.items() if cut is not None})
        return found

    def forward(self, x_TI: Tensor | Rounded, gated: Gate = None, out: Tensor | None = None) -> Tensor:
        x_TI = self._read(x_TI)
        if self.packed is None:
            return kernels.linear(x_TI, self.weight, self.bias, gated, out)
        found: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x_TI, self.packed, self.bias, "none", [], ""
        )
        found = kernels.apply_gate(found, gated)
        return found if out is None else out.copy_(found)

    def rows_from(self, start: int) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the outputs from ``start`` on."""
        return self.weight[start:], None if self.bias is None else self.bias[start:]

    def outputs_from(self, start: int, x_TI: Tensor | Rounded) -> Tensor:
        return nn.functional.linear(self._read(x_TI), *self.rows_from(start))

    def outputs_at(self, ids_R: Tensor, x_TI: Tensor) -> Tensor:
        self._check_plain()
        out_TR = kernels.indexed_linear(x_TI, self.weight, ids_R)
        return out_TR if self.bias is None else out_TR + self.bias[ids_R]

    def rows(self, ids_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        self._check_plain()
        return (self.weight, self.bias) if ids_R is None else pick_rows(self.weight, self.bias, ids_R)

    def load(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        if self.place is None:
            super().load(files)
            return
        behind, count, along = self.place
        assert isinstance(behind, Linear)
        pieces = self.place.order(part["weight"].chunk(count, along) for part in files)
        sizes = [*map(len, pieces)]
        for own, piece in zip(behind.weight.detach()[-sum(sizes) :].split(sizes), pieces, strict=True):
            own.copy_(piece)
        self.weight = _parameter(self.weight.new_empty(0))

    def fits(self, place: Place) -> bool:
        return type(place.behind) is Linear and self.bias is None and place.behind.bias is None

    def move(self, place: Place) -> None:
        behind = place.behind
        assert isinstance(behind, Linear)
        rows = len(behind.weight) + self.weight.numel() // behind.inputs
        nothing = self.weight.new_empty((), device="meta").expand(self.weight.shape)
        self.place, self.stacked, self.weight = place, True, _parameter(nothing)
        behind.weight = nn.Parameter(behind.weight.new_empty(0))  # memory never holds both
        behind.weight = nn.Parameter(behind.weight.new_empty(rows, behind.inputs))

    def of_experts(self, count: int) -> tuple[Tensor, Tensor | None, bool]:
        self._check_plain()
        bias_EO = None if self.bias is None else self.bias.unflatten(0, (count, -1))
        return self.weight.unflatten(0, (count, -1)), bias_EO, self.rounding == FP8

    def _check_plain(self) -> None:
        assert self.weight.numel(), "a packed weight has no rows to read"

    def _read(self, x_TI: Tensor | Rounded) -> Tensor:
        x_TI = kernels.given(x_TI)
        if self.rounding is None or (self.rounding == torch.int8 and len(x_TI) > FEW_TOKENS):
            return x_TI
        return rounded_inputs(x_TI, self.rounding).to(x_TI.dtype)

    def pack(self, keep_weight: bool) -> None:
        """Pack the weight, and drop the plain one unless it is still needed."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS_HINT)
        if not keep_weight:
            self.weight = nn.Parameter(self.weight.detach().new_empty(0), requires_grad=False)


@dataclass(frozen=True, slots=True)
class PlainWeights(WeightFormat):
    """The format of a checkpoint without ``quantization_config``."""

    def projection(self, name: str, inputs: int, parts: Mapping[str, int], bias: bool) -> Linear:
        made = Linear(inputs, int(sum(parts.values())), bias=bias)
        made.parts = parts
        return made


PLAIN = PlainWeights()


class QuantizedLinear(Projection):
    """A ``Linear`` that keeps its weight and, for few tokens, a copy in int8 or FP8 with a scale for each group of 128
    inputs."""

    weight_OI: Tensor
    scale_OG: Tensor

    def __init__(self, plain: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.plain, self.shares_inputs = plain, plain.shares_inputs
        weight_OI, scale_OG = kernels.quantize(plain.weight.detach(), dtype)
        self.register_buffer("weight_OI", weight_OI, persistent=False)
        self.register_buffer("scale_OG", scale_OG, persistent=False)
        self._integers = dtype == torch.int8 and multiplies_integers(plain.weight.device, plain.weight.dtype)
        self._few = FEW_TOKENS if self._integers else FEW_CONVERTED

    @property
    def device(self) -> torch.device:
        return self.weight_OI.device

    def rounds_to(self, tokens: int) -> torch.dtype | None:
        return torch.int8 if self._integers and tokens <= self._few else None

    def forward(self, x_TI: Tensor | Rounded, gated: Gate = None, out: Tensor | None = None) -> Tensor:
        found = self._multiply(0, x_TI, gated)
        return found if out is None else out.copy_(found)

    def outputs_from(self, start: int, x_TI: Tensor | Rounded) -> Tensor:
        return self._multiply(start, x_TI, None)

    def rows(self, ids_R: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.plain.rows(ids_R)

    def _multiply(self, start: int, x_TI: Tensor | Rounded, gated: Gate) -> Tensor:
        plain_OI, bias_O = self.plain.rows_from(start)
        rows = self.weight_OI[start:], self.scale_OG[start:]
        if isinstance(x_TI, Tensor):
            if len(x_TI) > self._few:
                return kernels.linear(x_TI, plain_OI, bias_O, gated)
            if not self._integers:
                return kernels.quantized_linear(x_TI, *rows, bias_O, gated)
        return kernels.integer_linear(x_TI, *rows, bias_O, gated)


def pick_rows(weight_OI: Tensor, bias_O: Tensor | None, ids_R: Tensor) -> tuple[Tensor, Tensor | None]:
    """Copy the outputs ``ids_R``."""
    return weight_OI[ids_R], None if bias_O is None else bias_O[ids_R]


def multiplies_integers(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels there quantize activations of this dtype to integers."""
    return on_gpu(device) and dtype.itemsize <= 2 and devices.capability_of(device) >= MULTIPLIES_INTEGERS


def _parameter(tensor: Tensor) -> nn.Parameter:
    """Return the same parameter if it is one: holders are counted by identity."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def rounds_in_place(weight_OI: Tensor) -> bool:
    """Return whether a weight that is quantized is only rounded, where it lies."""
    return weight_OI.is_cpu or weight_OI.dtype == torch.float64


@torch.no_grad()
def quantize_linears(module: nn.Module, quantization: str, leave: Collection[str] = ()) -> None:
    """Quantize every ``Linear`` of a module, except experts' and those named in ``leave``. ``quantization``: a key of
    ``QUANTIZED``, or ``none`` to change nothing. On a GPU, and on ``meta``, they become ``QuantizedLinear``s, except in
    float64, for which there is no kernel."""
    if quantization == "none":
        return
    dtype = QUANTIZED[quantization]
    for name, child in list(module.named_modules()):
        if not isinstance(child, Linear) or child.stacked or child.kept_plain or name in leave:
            continue
        if not rounds_in_place(child.weight):
            module.set_submodule(name, QuantizedLinear(child, dtype))
        else:
            child.weight.copy_(kernels.dequantize(*kernels.quantize(child.weight, dtype)))
            child.rounding = dtype if dtype == torch.int8 else None


def pack_linears(module: nn.Module, keep: Sequence[str] = ()) -> None:
    """Pack every ``Linear`` of a module for inference where oneDNN can.

    A weight that another module also holds (tied embeddings) keeps its plain form too; so does a layer whose name ends
    with one of ``keep``, because its owner reads its rows.
    """
    holders = Counter(id(p) for child in module.modules() for p in child.parameters(recurse=False))
    for name, child in module.named_modules():
        if isinstance(child, Linear) and not (child.stacked or child.kept_plain) and packs(child.weight):
            child.pack(keep_weight=holders[id(child.weight)] > 1 or name.endswith(tuple(keep)))


def packs(weight: Tensor) -> bool:
    """Return whether oneDNN multiplies weights of this device and dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
