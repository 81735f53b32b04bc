"""What an engine is built from: settings and the model's configuration with every choice made, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.config.settings import SETTINGS, Settings
from specserve.config.speculation import DYNAMIC, shape_of
from specserve.methods import Copies, Method, method_of

if TYPE_CHECKING:
    from specserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DynamicMap:
    """``size`` tokens (None: the default), looked at every ``interval`` steps; no ``start``: from the lowest ids."""

    size: int | None
    interval: int
    start: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """How tokens are drafted. ``path``: of the checkpoint, for a method that has one; ``topk``: most candidates of a
    node in a fixed shape."""

    method: Method
    name: str
    path: Path
    config_override: str | None
    quantization: str
    token_map: Path | DynamicMap | None
    topk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``cores``: those of the machine that the engine may use.

    None is a choice, too. ``cpu_threads``: as many of ``cores`` as are measured to be fastest. ``max_total_tokens``:
    what ``mem_fraction_static`` of the device leaves. ``largest_graph``: no CUDA graphs, else their largest batch.
    ``draft``: plain decoding. ``shape`` (steps, topk, tokens): plain decoding or, where ``adaptive``, the
    controller's choice."""

    model: ModelConfig
    model_path: Path
    tokenizer_path: Path
    device: str
    dtype: str
    cpu_threads: int | None
    cores: int
    context_length: int
    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens_per_step: int
    page_size: int
    max_total_tokens: int | None
    mem_fraction_static: float
    attention_backend: str
    largest_graph: int | None
    prefix_cache: bool
    overlap: bool
    random_seed: int | None
    all_greedy: bool
    draft: DraftSettings | None
    shape: tuple[int, int, int] | None
    adaptive: bool

    @classmethod
    def of(cls, settings: Settings, model: ModelConfig, cores: int) -> EngineConfig:
        """Take what ``resolve`` returned."""
        same: dict[str, Any] = {
            field.name: getattr(settings, field.name) for field in fields(cls) if field.name in SETTINGS
        }
        places = {"model_path": Path(same["model_path"])}
        places["tokenizer_path"] = Path(settings.tokenizer_path or places["model_path"])
        return cls(
            **same | places,
            model=model,
            cores=cores,
            largest_graph=settings.cuda_graph_max_bs,
            prefix_cache=not settings.disable_radix_cache,
            overlap=settings.overlap_schedule == "on",
            all_greedy=settings.requests_all_greedy,
            draft=_draft(settings),
            shape=shape_of(settings),
            adaptive=bool(settings.speculative_adaptive),
        )

    @property
    def draft_copies(self) -> Copies:
        """Which drafts are copied from a text."""
        return "none" if self.draft is None else self.draft.method.copies

    @property
    def longest_launch(self) -> int:
        """Most tokens of one prompt that a launch has, where a token is to follow them."""
        return min(self.chunked_prefill_size, self.context_length - 1)


def _draft(settings: Settings) -> DraftSettings | None:
    method = method_of(settings.speculative_algorithm)
    if method is None:
        return None
    return DraftSettings(
        method=method,
        name=settings.speculative_algorithm,
        path=Path(settings.speculative_draft_model_path or ""),
        config_override=settings.speculative_draft_config_override,
        quantization=settings.speculative_draft_quantization,
        token_map=_token_map(settings),
        topk=settings.speculative_eagle_topk or 1,
    )


def _token_map(settings: Settings) -> Path | DynamicMap | None:
    given, start = settings.speculative_token_map, settings.speculative_token_map_start
    if given != DYNAMIC:
        return None if given is None else Path(given)
    assert settings.speculative_token_map_interval is not None
    return DynamicMap(
        settings.speculative_token_map_size,
        settings.speculative_token_map_interval,
        None if start is None else Path(start),
    )
