"""What the benchmarks share: the held-out prompts, and results as JSON with hardware, commit and command."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from specserve import LLM, SamplingParams
from specserve.llm import RequestOutput

ROOT = Path(__file__).parent.parent
PROMPTS = ROOT / "examples" / "bundled_model" / "prompts.jsonl"
CODE_TOKENS = 128  # a code prompt has no natural end


def load_prompts() -> list[dict[str, Any]]:
    """The held-out prompts: ``{"messages"}`` dialogues and ``{"prompt"}`` code prefixes."""
    return [json.loads(line) for line in PROMPTS.read_text().splitlines()]


def run_prompts(llm: LLM, rows: Sequence[dict[str, Any]], **params: Any) -> list[RequestOutput]:
    """Dialogues to their natural end, code for ``CODE_TOKENS`` tokens; all in one call, seeded by position."""
    tokenizer = llm._tokenizer
    assert tokenizer is not None
    prompts = [
        tokenizer.encode_chat(row["messages"]) if "messages" in row else tokenizer.encode(row["prompt"])
        for row in rows
    ]
    each = [
        SamplingParams(seed=index, max_tokens=512 if "messages" in row else CODE_TOKENS, **params)
        for index, row in enumerate(rows)
    ]
    return llm.generate(prompts, each)


def hardware() -> str:
    """The processor or GPU that the figures were measured on."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"


def write_results(name: str, figures: Any, output: Path | None = None) -> Path:
    """Writes ``benchmarks/results/NAME.json``; the commit is marked when the tree had changes."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    record = {
        "command": "python -m " + " ".join([_main_module(), *sys.argv[1:]]),
        "commit": commit,
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "figures": figures,
    }
    path = output or ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _main_module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).stem
