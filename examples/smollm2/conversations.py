"""Let a chat model ask itself questions and answer them: data for a draft, where there are no prompts.

    python -m examples.smollm2.conversations MODEL answers.npz [--count 6000] [--max-tokens 512] [--temperatures 0 1]

A chat model that is given the beginning of a user's message writes one (Xu et al., "Magpie", arXiv 2406.08464).
Questions are sampled at temperature 1. Answers have the model's own values, or these temperatures in turn: give those
that the draft will be used at. The file is one of docs/training.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from specserve import LLM, SamplingParams

PLACE = "\N{SECTION SIGN}"


def questions(llm: LLM, count: int) -> list[str]:
    """``count`` at most, each once."""
    begun = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": PLACE}], tokenize=False)
    params = [SamplingParams(temperature=1.0, max_tokens=128, seed=seed) for seed in range(count)]
    found = llm.generate([begun.partition(PLACE)[0]] * count, params, use_tqdm=True)
    ended = (each.text.strip() for each in found if each.finish_reason == "stop")
    return [*dict.fromkeys(text for text in ended if text)]


def write_answers(
    llm: LLM, asked: Sequence[str], most: int, output: Path, temperatures: Sequence[float] = ()
) -> None:
    own = msgspec.structs.replace(llm.get_default_sampling_params(), max_tokens=most)
    turns = [msgspec.structs.replace(own, temperature=each) for each in temperatures] or [own]
    params = [turns[index % len(turns)] for index in range(len(asked))]
    prompts = [[{"role": "user", "content": text}] for text in asked]
    answers = llm.chat(prompts, params, use_tqdm=True)
    tokens = [[*each.prompt_token_ids, *each.token_ids] for each in answers]
    learned = [[0] * len(each.prompt_token_ids) + [1] * len(each.token_ids) for each in answers]
    starts = np.cumsum([0, *map(len, tokens)])
    np.savez(output, tokens=np.concatenate(tokens), mask=np.concatenate(learned), starts=starts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[])
    args = parser.parse_args()
    if not args.output.parent.is_dir():
        parser.error(f"there is no directory {args.output.parent}")
    with LLM(args.model) as llm:
        asked = questions(llm, args.count)
        write_answers(llm, asked, args.max_tokens, args.output, args.temperatures)
    print(f"{len(asked)} questions and answers")


if __name__ == "__main__":
    main()
