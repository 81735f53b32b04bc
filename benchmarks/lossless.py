"""Check that texts are the same with and without speculation, over a pairwise-covering set of configurations.

    python -m benchmarks.lossless --texts 4200 --dtype float64 --output benchmarks/results/lossless_float64.json
    for k in 0 1 2 3: python -m benchmarks.lossless --part $k/4 --dtype bfloat16 --output part$k.json
    python -m benchmarks.lossless --merge part*.json --dtype bfloat16 --output merged.json

Each configuration answers its share of the requests, whose sampling differs (greedy, nucleus, top-k, min-p, penalties,
bias, all at once) within every batch. Each answer is compared, token for token, with that of plain decoding with a
large pool and no prefix cache. At float64, and in bfloat16 on a GPU, none may differ. Each first difference is reported
with its gap, by which the plain run preferred its token in perturbed logits, and with whether plain decoding in the
same batches, chunks and pages also differs, since launches of other sizes may round differently.

``EXTRAS`` come after the covering set: batches of 64, and the controller, which chooses shapes by measured time. Each
configuration has at least a full batch of texts. ``--only`` leaves methods out of the covering set, not of the extras.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from torch import Tensor

import specserve.speculation.sampler
from benchmarks.common import ADAPTIVE, PROMPTS, read_prompts, scheduler_of, shape_settings, tokens_per_step
from benchmarks.configurations import CHOICES, EXTRAS, SAMPLING, SPECULATION, Configuration, pairwise
from benchmarks.results import options, write_results
from specserve import LLM, SamplingParams
from specserve.config.paths import BUNDLED_DRAFTS, BUNDLED_MODEL
from specserve.config.settings import ROUNDED
from specserve.core import Speculation
from specserve.methods import JOIN, method_of

TOGGLES = [Speculation(), Speculation(enabled=False), Speculation(max_draft_tokens=3)]
TIES = {"float64": 0.0, "float32": 1e-4, "bfloat16": 0.0, "float16": 0.05}
GIVEN = ("quantization", "kv_cache_dtype", "max_tokens", "requests")
"""Options that are written to the report."""
LARGE_POOL = 40_000  # tokens: no batch here is preempted, and nothing is taken from other processes


@dataclass(frozen=True)
class Models:
    """Checkpoints, with their device and dtype. A datastore is for the method ``REST``. What is expected of several
    ranks is what one process says."""

    target: Path
    drafts: Mapping[str, Path]
    dtype: str = "float64"
    device: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    tensor_parallel_size: int = 1

    @property
    def alone(self) -> Models:
        return replace(self, tensor_parallel_size=1)

    def draft_of(self, algorithm: str) -> Path | None:
        """The checkpoint of a method, or of the one that is merged with a lookup."""
        return self.drafts.get(algorithm.partition(JOIN)[0])

    @property
    def choices(self) -> dict[str, Sequence[Any]]:
        """``CHOICES`` without the methods whose draft is not there."""
        kept = [name for name, given in SPECULATION.items() if given is None or self._serves(given[0])]
        return {**CHOICES, "speculation": kept}

    def configurations(self, only: Sequence[str] = ()) -> list[Configuration]:
        """A cover of all pairs of ``choices``, of ``only`` these speculations if there are any, and the extras."""
        choices = self.choices
        kept = [name for name in choices["speculation"] if not only or name in only]
        extras = [each for each in EXTRAS if each["speculation"] in choices["speculation"]]
        return pairwise({**choices, "speculation": kept}) + extras

    def _serves(self, algorithm: str) -> bool:
        method = method_of(algorithm)
        assert method is not None
        drafts = not method.needs_draft or self.draft_of(algorithm) is not None
        return drafts and (not method.reads_datastore or "REST" in self.drafts)


@dataclass(frozen=True)
class Item:
    """A request and its sampling."""

    prompt: tuple[int, ...]
    params: SamplingParams
    sampling: str

    @property
    def limit(self) -> int:
        assert self.params.max_tokens is not None
        return len(self.prompt) + self.params.max_tokens


@dataclass(frozen=True)
class Difference:
    """The first token that differs. ``gap``: the plain run's best perturbed logit there minus its second best.
    ``speculation``: plain decoding in the same batches, chunks and pages gives the expected text."""

    configuration: int
    sampling: str
    index: int
    gap: float
    speculation: bool


@dataclass
class Row:
    """One configuration's outcome."""

    configuration: Configuration
    texts: int
    identical: int
    preemptions: int
    cached_tokens: int
    mean_accepted_length: float
    seconds: float


@dataclass
class Report:
    """All rows and their sums."""

    rows: list[Row] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def texts(self) -> int:
        return sum(row.texts for row in self.rows)

    @property
    def identical(self) -> int:
        return sum(row.identical for row in self.rows)

    @property
    def preemptions(self) -> int:
        return sum(row.preemptions for row in self.rows)

    def add(self, other: Report) -> None:
        """Take another part's rows."""
        before = len(self.rows)
        self.rows += other.rows
        self.differences += [
            replace(each, configuration=before + each.configuration) for each in other.differences
        ]


def make_items(prompts: Sequence[Sequence[int]], count: int, max_tokens: int) -> list[Item]:
    """Requests that go through the kinds of sampling. Two in three begin with one of three longer beginnings, so
    that prefixes are shared."""
    items, kinds = [], list(SAMPLING)
    starts = [[token for prompt in prompts[i : i + 3] for token in prompt] for i in range(0, 9, 3)]
    for index in range(count):
        prompt = prompts[index % len(prompts)]
        if index % 3:
            prompt = [*starts[index % len(starts)], *prompt]
        kind = kinds[index % len(kinds)]
        params = SamplingParams(max_tokens=max_tokens, seed=2**33 + index, **SAMPLING[kind])
        items.append(Item(tuple(prompt), params, kind))
    return items


def open_llm(models: Models, **settings: Any) -> LLM:
    return LLM(
        str(models.target),
        dtype=models.dtype,
        device=models.device,
        kv_cache_dtype=models.kv_cache_dtype,
        quantization=models.quantization,
        tensor_parallel_size=models.tensor_parallel_size,
        skip_tokenizer_init=True,
        random_seed=0,
        **{"max_total_tokens": LARGE_POOL, **settings},
    )


def plain_llm(models: Models, running: int, **settings: Any) -> LLM:
    return open_llm(models, max_running_requests=running, page_size=16, disable_radix_cache=True, **settings)


def reference_texts(models: Models, items: Sequence[Item]) -> list[list[int]]:
    """What plain decoding answers."""
    with plain_llm(models.alone, 16) as llm:
        outputs = llm.generate([item.prompt for item in items], [item.params for item in items])
    return [output.token_ids for output in outputs]


def settings_of(models: Models, configuration: Configuration, items: Sequence[Item]) -> dict[str, Any]:
    """The flags of a configuration."""
    settings: dict[str, Any] = {
        "max_running_requests": configuration["batch"],
        "page_size": configuration["page"],
        "chunked_prefill_size": configuration["chunk"],
        "disable_radix_cache": not configuration["prefix_cache"],
        "overlap_schedule": configuration["overlap"],
        "disable_cuda_graph": not configuration.get("graphs", True),
        **configuration.get("settings", {}),
    }
    if configuration["pool"] == "small":  # the longest request fits, and a quarter of another
        page = configuration["page"]
        pages = -(-max(item.limit for item in items) // page)
        settings["max_total_tokens"] = (pages + -(-pages // 4)) * page
    controller = bool(configuration.get("controller"))
    return settings | speculation_settings(models, configuration["speculation"], controller)


def speculation_settings(models: Models, name: str, controller: bool = False) -> dict[str, Any]:
    """The flags of one of ``SPECULATION``; the controller has no fixed shape."""
    if (speculation := SPECULATION[name]) is None:
        return {}
    algorithm, drafting = speculation[0], ADAPTIVE if controller else speculation[1:]
    settings = {"speculative_algorithm": algorithm, **shape_settings(drafting)}
    if draft := models.draft_of(algorithm):
        settings["speculative_draft_model_path"] = str(draft)
    if (method := method_of(algorithm)) is not None and method.reads_datastore:
        settings["speculative_datastore"] = str(models.drafts["REST"])
    return settings


def predicted_text(text: Sequence[int], every: int = 7) -> list[int]:
    """The text with every ``every``-th token changed."""
    return [abs(token - 1) if index % every == every - 1 else token for index, token in enumerate(text)]


def run_configuration(
    models: Models,
    number: int,
    configuration: Configuration,
    items: Sequence[Item],
    texts: Sequence[list[int]],
) -> tuple[Row, list[Difference]]:
    """Answer ``items`` and compare with ``texts``."""
    begin = time.perf_counter()
    params = [item.params for item in items]
    if configuration["toggled"]:
        params = [
            msgspec.structs.replace(each, speculation=TOGGLES[index % len(TOGGLES)])
            for index, each in enumerate(params)
        ]
    if configuration.get("predicted"):  # one in four has no prediction
        params = [
            msgspec.structs.replace(each, prediction=predicted_text(texts[index]) if index % 4 else None)
            for index, each in enumerate(params)
        ]
    prompts = [item.prompt for item in items]
    with open_llm(models, **settings_of(models, configuration, items)) as llm:
        outputs = llm.generate(prompts, params)
        preemptions = scheduler_of(llm).stats().preemptions
    differing = [i for i, output in enumerate(outputs) if output.token_ids != texts[i]]
    differences = []
    if differing:
        plain = settings_of(models, {**configuration, "speculation": "off"}, items)
        with open_llm(models, **plain) as llm:
            without = llm.generate(prompts, [item.params for item in items])
        for i in differing:
            item, index = items[i], first_difference(outputs[i].token_ids, texts[i])
            gap, same = tie_gap(models, item, index), without[i].token_ids == texts[i]
            differences.append(Difference(number, item.sampling, index, gap, same))
    row = Row(
        configuration=configuration,
        texts=len(items),
        identical=len(items) - len(differences),
        preemptions=preemptions,
        cached_tokens=sum(output.cached_tokens for output in outputs),
        mean_accepted_length=tokens_per_step(outputs),
        seconds=time.perf_counter() - begin,
    )
    return row, differences


def first_difference(answer: Sequence[int], expected: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length when one is the other's beginning."""
    pairs = enumerate(zip(answer, expected, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(answer), len(expected)))


def tie_gap(models: Models, item: Item, index: int) -> float:
    """How far apart the two best perturbed logits of the item's token ``index`` are in a plain run of it alone."""
    with plain_llm(models.alone, 1, disable_cuda_graph=True) as llm, recorded_scores() as scores:
        llm.generate([item.prompt], item.params)
    best = scores[min(index, len(scores) - 1)].topk(2).values
    return float(best[0] - best[1])


@contextmanager
def recorded_scores() -> Iterator[list[Tensor]]:
    """The scores ``[V]`` each token of a single plain request is chosen from."""
    scores: list[Tensor] = []
    best: Callable[[Tensor], Tensor] = specserve.speculation.sampler.best

    def recording(scores_NV: Tensor) -> Tensor:
        scores.append(scores_NV[0].clone())
        return best(scores_NV)

    with (
        patch.object(specserve.speculation.sampler, "best", recording),
        patch.object(specserve.speculation.sampler, "runs_triton", lambda _: False),
    ):
        yield scores


def run_matrix(
    models: Models,
    items: Sequence[Item],
    texts: int,
    configurations: Sequence[Configuration],
    show: Callable[[str], None] = print,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Spread at least ``texts`` answers over the configurations, a full batch or more in each. ``keep`` gets the report
    after each of them, so that a run that is cut keeps its rows."""
    expected, report = reference_texts(models, items), Report()
    share, start = -(-texts // len(configurations)), 0
    show(f"{len(items)} requests, {len(configurations)} configurations of {share} texts or a batch")
    for number, configuration in enumerate(configurations):
        count = max(share, configuration["batch"])
        chosen = [(start + offset) % len(items) for offset in range(count)]
        start += count
        row, differences = run_configuration(
            models, number, configuration, [items[i] for i in chosen], [expected[i] for i in chosen]
        )
        report.rows.append(row)
        report.differences += differences
        keep(report)
        show(row_line(number, row))
    for line in summary_lines(report, models.dtype):
        show(line)
    return report


def row_line(number: int, row: Row) -> str:
    chosen = "  ".join(f"{name} {value}" for name, value in row.configuration.items())
    return (
        f"{number:3}  {row.identical}/{row.texts} identical  preempted {row.preemptions:3}  "
        f"cached {row.cached_tokens:6}  {row.mean_accepted_length:.2f} tokens/step  {row.seconds:6.1f} s  {chosen}"
    )


def summary_lines(report: Report, dtype: str) -> list[str]:
    ties = sum(each.gap < TIES[dtype] for each in report.differences)
    drafted = sum(each.speculation for each in report.differences)
    lines = [
        f"texts {report.texts}, identical {report.identical}, preemptions {report.preemptions}",
        f"first differences {len(report.differences)}, of them with a gap below {TIES[dtype]:g}: {ties}, "
        f"with speculation alone: {drafted}",
    ]
    return lines + [f"  {each}" for each in report.differences]


def figures_of(report: Report, dtype: str, **more: Any) -> dict[str, Any]:
    return {
        "dtype": dtype,
        **more,
        "texts": report.texts,
        "identical": report.identical,
        "preemptions": report.preemptions,
        "tie": TIES[dtype],
        **asdict(report),
    }


def merge(paths: Sequence[Path], dtype: str, output: Path | None) -> Report:
    """Write the rows of several parts as one report, with the command of each and the seconds of the slowest."""
    report, parts = Report(), [json.loads(path.read_text()) for path in paths]
    for part in parts:
        figures = part["figures"]
        if figures["dtype"] != dtype:
            raise ValueError(f"the dtype of a part is {figures['dtype']}, not {dtype}")
        rows = [Row(**row) for row in figures["rows"]]
        report.add(Report(rows, [Difference(**each) for each in figures["differences"]]))
    about = [{name: part[name] for name in ("command", "commit", "hardware")} for part in parts]
    seconds = max(part["figures"]["seconds"] for part in parts)
    same, *others = ({name: part["figures"][name] for name in GIVEN} for part in parts)
    if any(other != same for other in others):
        raise ValueError(f"parts must have the same {', '.join(GIVEN)}")
    write_results(
        f"lossless_{dtype}", figures_of(report, dtype, **same, seconds=seconds, parts=about), output
    )
    return report


def exit_code(report: Report, dtype: str) -> int:
    """1 if a text differs where no tie explains it, or if there is no text."""
    return int(not report.texts or not all(each.gap < TIES[dtype] for each in report.differences))


def main() -> None:
    assert __doc__ is not None
    parser = options(__doc__)
    parser.add_argument("--texts", type=int, default=4000, help="answers compared, at least")
    parser.add_argument("--requests", type=int, default=420, help="different requests among them")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float64", choices=list(TIES))
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--quantization", default="none", choices=("none", *ROUNDED))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks")
    parser.add_argument("--model-path", type=Path, default=BUNDLED_MODEL)
    parser.add_argument("--eagle", type=Path, default=BUNDLED_DRAFTS["EAGLE"])
    parser.add_argument("--eagle3", type=Path, default=BUNDLED_DRAFTS["EAGLE3"])
    parser.add_argument("--draft", action="append", default=[], help="METHOD=PATH: one of another method's")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--part", default="0/1", help="K/N: every N-th configuration from the K-th on")
    parser.add_argument("--only", nargs="+", choices=SPECULATION, default=[], metavar="NAME")
    parser.add_argument("--merge", nargs="+", type=Path, help="reports of parts: write them as one")
    args = parser.parse_args()
    if args.merge:
        report = merge(args.merge, args.dtype, args.output)
        print("\n".join(summary_lines(report, args.dtype)))
        raise SystemExit(exit_code(report, args.dtype))
    first, step = map(int, args.part.split("/"))
    drafts = {"EAGLE": args.eagle, "EAGLE3": args.eagle3}
    drafts |= {name: Path(path) for name, _, path in (each.partition("=") for each in args.draft)}
    kinds = args.dtype, args.device, args.kv_cache_dtype, args.quantization, args.tensor_parallel_size
    models = Models(args.model_path, drafts, *kinds)
    prompts = [prompt[:48] for prompt in read_prompts(args.prompts, args.model_path)]
    begin = time.perf_counter()
    items = make_items(prompts, args.requests, args.max_tokens)
    configurations = models.configurations(args.only)[first::step]
    chosen = {name: getattr(args, name) for name in GIVEN}

    def keep(report: Report) -> None:
        if args.output is not None:
            figures = figures_of(report, args.dtype, **chosen, seconds=time.perf_counter() - begin)
            write_results(f"lossless_{args.dtype}", figures, args.output)

    report = run_matrix(models, items, args.texts, configurations, lambda line: print(line, flush=True), keep)
    raise SystemExit(exit_code(report, args.dtype))


if __name__ == "__main__":
    main()
