"""The gain from predicted texts: tokens per step and seconds of code answers, one greedy request at a time.

    python -m benchmarks.prediction [--prompts 12] [--repeats 3]

The bundled model can't edit a given file, so the edit is made in reverse: the model continues a held-out code prefix,
and its own answer is turned into what the text may have been before. ``same`` is the answer itself; ``edited`` has its
most frequent name changed, every sixth line left out and every seventh doubled; ``unrelated`` is the answer to another
prompt. All rows have the same texts. Seconds are the minimum of the repeats, summed: wall-clock time, and processor
time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.acceptance import tokens_per_step
from benchmarks.common import CODE_TOKENS, load_prompts, write_results
from specserve import LLM, SamplingParams
from specserve.outputs import RequestOutput

SHAPES: list[tuple[int, int, int] | None] = [None, (5, 1, 6), (8, 1, 9), (5, 4, 16)]
PARAMS = SamplingParams(temperature=0, max_tokens=CODE_TOKENS, ignore_eos=True)
KEYWORDS = {
    "self",
    "return",
    "def",
    "if",
    "in",
    "the",
    "for",
    "not",
    "is",
    "None",
    "class",
    "of",
    "a",
    "and",
    "to",
}


def before_the_edit(text: str) -> str:
    """The text with a name changed, lines left out and lines twice."""
    names = Counter(name for name in re.findall(r"[A-Za-z_]\w*", text) if name not in KEYWORDS)
    if names:
        name = names.most_common(1)[0][0]
        text = re.sub(rf"\b{name}\b", "other_value", text)
    lines = text.split("\n")
    kept = [[line] * (2 if i % 7 == 6 else 1) for i, line in enumerate(lines) if i % 6 != 5]
    return "\n".join(line for each in kept for line in each)


def variants(texts: Sequence[str]) -> dict[str, list[str | None]]:
    """A prediction for each answer."""
    return {
        "none": [None] * len(texts),
        "same": list(texts),
        "edited": [before_the_edit(text) for text in texts],
        "unrelated": [*texts[1:], texts[0]],
    }


def timed(llm: LLM, prompt: str, prediction: str | None, repeats: int) -> tuple[float, float, RequestOutput]:
    """Least seconds of an answer: by the clock, and of the processors' work."""
    params, found = msgspec.structs.replace(PARAMS, prediction=prediction), []
    for _ in range(repeats):
        begin, worked = time.perf_counter(), time.process_time()
        (output,) = llm.generate(prompt, params)
        found.append((time.perf_counter() - begin, time.process_time() - worked))
    return min(wall for wall, _ in found), min(work for _, work in found), output


def open_llm(shape: tuple[int, int, int] | None) -> LLM:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    settings: dict[str, Any] = {} if shape is None else dict(zip(names, shape, strict=True))
    algorithm = "NONE" if shape is None else "EAGLE3"
    return LLM(speculative_algorithm=algorithm, max_running_requests=1, **settings)


def measure(prompts: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    with open_llm(None) as llm:
        texts = [output.text for output in llm.generate(prompts, PARAMS)]
    for shape in SHAPES:
        with open_llm(shape) as llm:
            found: dict[str, list[tuple[float, float, RequestOutput]]] = {}
            given = variants(texts) if shape is not None else {"none": [None] * len(texts)}
            for index, prompt in enumerate(prompts):
                for name, predictions in given.items():
                    found.setdefault(name, []).append(timed(llm, prompt, predictions[index], repeats))
        for name, rows in found.items():
            outputs = [output for _, _, output in rows]
            assert [output.text for output in outputs] == texts, f"{shape}, {name}: another text"
            figures.append(
                {
                    "shape": shape,
                    "prediction": name,
                    "tokens_per_step": round(tokens_per_step(outputs), 2),
                    "predicted": sum(output.speculation.predicted for output in outputs),
                    "tokens": sum(len(output.token_ids) for output in outputs),
                    "seconds": round(sum(wall for wall, _, _ in rows), 2),
                    "processor_seconds": round(sum(work for _, work, _ in rows), 2),
                }
            )
            print(figures[-1], flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    prompts = [row["prompt"] for row in load_prompts() if "prompt" in row][: args.prompts]
    print("written to", write_results("prediction", measure(prompts, args.repeats)))


if __name__ == "__main__":
    main()
