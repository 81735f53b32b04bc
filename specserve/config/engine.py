"""The configuration that an engine is built from, with every choice made and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specserve.config.choices import DUMMY
from specserve.config.settings import SETTINGS, Settings
from specserve.config.speculation import DYNAMIC, acceptance_rates, lookahead_of, shape_of
from specserve.methods import ANY, Drafts, DraftSettings, MapPlan, method_of

if TYPE_CHECKING:
    from specserve.layers.ranks import Peers, Ranks
    from specserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine. ``cores``: number of cores that it may use.

    None has a meaning in some fields. ``cpu_threads``: the fastest number up to ``cores``, as measured.
    ``max_total_tokens``: what ``mem_fraction_static`` allows. ``largest_graph`` (the largest batch
    with a CUDA graph): no graphs. ``draft``: plain decoding. ``shape`` (steps, topk, tokens): plain decoding or, if
    ``adaptive``, the controller's choice. ``speculative_max_slowdown``: no bound. ``request_defaults``: sampling
    parameters of requests that don't set them; the front applies them.
    """

    model: ModelConfig
    model_path: Path
    tokenizer_path: Path
    device: str
    dtype: str
    cpu_threads: int | None
    cores: int
    tensor_parallel_size: int
    expert_parallel_size: int
    dist_timeout: float
    context_length: int
    max_running_requests: int
    chunked_prefill_size: int
    max_prefill_tokens_per_step: int
    page_size: int
    max_total_tokens: int | None
    mem_fraction_static: float
    attention_backend: str
    kv_cache_dtype: str
    mamba_ssm_dtype: str
    max_mamba_cache_size: int | None
    mamba_full_memory_ratio: float
    largest_graph: int | None
    prefix_cache: bool
    disable_hybrid_kv_cache_manager: bool
    overlap: bool
    random_seed: int | None
    all_greedy: bool
    draft: DraftSettings | None
    shape: tuple[int, int, int] | None
    adaptive: bool
    speculative_max_slowdown: float | None
    request_defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, model: ModelConfig, cores: int) -> EngineConfig:
        """Build it from resolved settings. Raises ValueError for a shape deeper than the draft, or than the target
        verifies."""
        same: dict[str, Any] = {
            field.name: getattr(settings, field.name) for field in fields(cls) if field.name in SETTINGS
        }
        lookahead, most = lookahead_of(settings), model.most_levels
        if lookahead is not None and most is not None and (steps := lookahead.shape[0]) > most:
            raise ValueError(
                "--speculative-lookahead-ngram, --speculative-lookahead-window: "
                f"{model.architecture} verifies at most {most} levels, found {steps}"
            )
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
            draft=_draft(settings, places["tokenizer_path"]),
            shape=shape_of(settings),
            adaptive=bool(settings.speculative_adaptive),
        )

    @property
    def snapshots(self) -> int | None:
        """States that are kept for cached prefixes, None: what ``mamba_full_memory_ratio`` allows."""
        if not self.prefix_cache or not self.model.states:
            return 0
        most = self.max_mamba_cache_size
        return None if most is None else most - self.max_running_requests

    @property
    def threads(self) -> int:
        """The CPU threads of a rank, if there are several."""
        return self.cpu_threads or self.cores

    def place(self, rank: int, peers: Peers | None = None) -> Ranks:
        from specserve.layers.ranks import Ranks  # imports torch, which the command line does not need

        return Ranks(rank, self.tensor_parallel_size, peers, self.expert_parallel_size)

    @property
    def most_slowdown(self) -> float:
        return inf if self.speculative_max_slowdown is None else self.speculative_max_slowdown

    @property
    def drafts(self) -> Drafts:
        """Return the limits of drafting."""
        return ANY if self.draft is None else self.draft.drafts

    @property
    def longest_launch(self) -> int:
        """Return the maximum number of tokens of one prompt in a launch, leaving room for one further token."""
        return min(self.chunked_prefill_size, self.context_length - 1)


def _draft(settings: Settings, tokenizer: Path) -> DraftSettings | None:
    method = method_of(settings.speculative_algorithm)
    if method is None:
        return None
    path, steps = Path(settings.speculative_draft_model_path or ""), settings.speculative_num_steps
    drafts = replace(method.drafts(path), lookahead=lookahead_of(settings))
    if drafts.most_levels is not None and steps is not None and steps > drafts.most_levels:
        raise ValueError(
            f"--speculative-num-steps: the draft {path} has at most {drafts.most_levels} levels, found {steps}"
        )
    return DraftSettings(
        name=settings.speculative_algorithm,
        path=path,
        config_override=settings.speculative_draft_config_override,
        quantization=settings.speculative_draft_quantization,
        token_map=_token_map(settings),
        topk=settings.speculative_eagle_topk or 1,
        drafts=drafts,
        tokenizer=tokenizer,
        recalled=settings.speculative_suffix_cache_tokens or 0,
        synthetic=acceptance_rates(settings),
        random=settings.load_format == DUMMY,
        datastore=Path(settings.speculative_datastore) if settings.speculative_datastore else None,
    )


def _token_map(settings: Settings) -> Path | MapPlan | None:
    given, start = settings.speculative_token_map, settings.speculative_token_map_start
    if given != DYNAMIC:
        return None if given is None else Path(given)
    assert settings.speculative_token_map_interval is not None
    return MapPlan(
        settings.speculative_token_map_size,
        settings.speculative_token_map_interval,
        None if start is None else Path(start),
    )
