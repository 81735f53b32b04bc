"""Makes everything that the bundled model is trained and tested on.

    python -m examples.bundled_model.make_data --output DIR [--dialogues 800000] [--seed 0]
        [--tool-share 0.22] [--json-share 0.10] [--processes 1]

`train.npz` and `heldout.npz` hold, for `dialogue` and `text`, the packed `_tokens` (uint16), the `_mask`
(uint8, 1 where a trainer of the draft takes the loss: the assistant's tokens, or the whole text) and the
`_starts` (int64) of the documents. Every document begins with `<|begin|>` and ends with `<|end|>`.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from . import tokenizer as vocabulary
from .dialogues import Dialogue, Shares, dialogues
from .stdlib_text import Module, modules

Arrays = dict[str, np.ndarray[Any, Any]]
HELD_OUT_DIALOGUES = 1000
TOKENIZER_CHARACTERS = 12_000_000
BATCH = 10_000


def pack(documents: Iterable[tuple[list[int], list[int]]], name: str) -> Arrays:
    """The documents' (tokens, mask) one after the other."""
    pairs = [(np.array(tokens, np.uint16), np.array(mask, np.uint8)) for tokens, mask in documents]
    lengths = np.array([len(tokens) for tokens, _ in pairs], dtype=np.int64)
    return {
        f"{name}_tokens": np.concatenate([tokens for tokens, _ in pairs]),
        f"{name}_mask": np.concatenate([mask for _, mask in pairs]),
        f"{name}_starts": np.cumsum(lengths) - lengths,
    }


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of the texts alone, without `<|begin|>`."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def pack_dialogues(tokenizer: Tokenizer, items: Sequence[Dialogue], processes: int = 1) -> Arrays:
    """Dialogues as the chat template writes them, with mask 1 on the assistant's content and `<|end|>`."""
    batches = [items[first : first + BATCH] for first in range(0, len(items), BATCH)]
    encode = partial(_pack_batch, tokenizer)
    if processes == 1:
        return _joined([encode(batch) for batch in batches])
    with ProcessPoolExecutor(processes) as pool:
        return _joined(list(pool.map(encode, batches)))


def _joined(parts: Sequence[Arrays]) -> Arrays:
    """Packed dialogues one part after the other."""
    lengths = [len(part["dialogue_tokens"]) for part in parts]
    before = np.cumsum([0, *lengths[:-1]])
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    starts = [part["dialogue_starts"] + offset for part, offset in zip(parts, before, strict=True)]
    return arrays | {"dialogue_starts": np.concatenate(starts)}


def _pack_batch(tokenizer: Tokenizer, batch: Sequence[Dialogue]) -> Arrays:
    chats = [vocabulary.turns(item["messages"], item.get("tools", ())) for item in batch]
    texts = list({text: None for chat in chats for _, text in chat})
    ids = dict(zip(texts, encode_texts(tokenizer, texts), strict=True))
    documents = []
    for chat in chats:
        tokens, mask = [vocabulary.BEGIN], [0]
        for role, text in chat:
            content = ids[text]
            tokens += [role, *content, vocabulary.END]
            mask += [0, *[int(role == vocabulary.ASSISTANT)] * (len(content) + 1)]
        documents.append((tokens, mask))
    return pack(documents, "dialogue")


def pack_texts(tokenizer: Tokenizer, items: Sequence[Module]) -> Arrays:
    """Modules as plain text; the mask is 1 everywhere."""
    ids = encode_texts(tokenizer, [item.text for item in items])
    documents = [[vocabulary.BEGIN, *tokens, vocabulary.END] for tokens in ids]
    return pack([(tokens, [1] * len(tokens)) for tokens in documents], "text")


def write_lines(path: Path, items: Iterable[object]) -> None:
    """One JSON document a line."""
    with path.open("w", encoding="utf-8") as file:
        for item in items:
            file.write(json.dumps(item, ensure_ascii=False) + "\n")


def tokenizer_texts(train: Sequence[Dialogue], code: Sequence[Module]) -> Iterable[str]:
    """About as many characters of dialogues as of code, evenly taken from all of it."""
    total = sum(len(module.text) for module in code)
    step = max(1, total // TOKENIZER_CHARACTERS)
    yield from (module.text for module in code[::step])
    left = TOKENIZER_CHARACTERS
    for item in train:
        for _, text in vocabulary.turns(item["messages"], item.get("tools", ())):
            left -= len(text)
            yield text
        if left < 0:
            return


def make(output: Path, count: int, seed: int, shares: Shares, processes: int) -> dict[str, Any]:
    """Writes all files and returns their sizes, which it also writes to `manifest.json`."""
    output.mkdir(parents=True, exist_ok=True)
    library = list(modules())
    text = {"train": [m for m in library if not m.held_out], "heldout": [m for m in library if m.held_out]}
    chats = {
        "train": list(dialogues(count, seed, shares=shares, processes=processes)),
        "heldout": list(dialogues(HELD_OUT_DIALOGUES, seed, heldout=True, shares=shares)),
    }
    names = {"train": ("conversations.jsonl", "text.jsonl")}
    names["heldout"] = ("heldout_conversations.jsonl", "heldout_text.jsonl")
    tokenizer = vocabulary.train(tokenizer_texts(chats["train"], text["train"]))
    vocabulary.save(tokenizer, output / "tokenizer")
    manifest: dict[str, Any] = {"seed": seed, "shares": shares._asdict(), "python": platform.python_version()}
    for part, (chat_file, text_file) in names.items():
        write_lines(output / chat_file, chats[part])
        write_lines(output / text_file, (module._asdict() for module in text[part]))
        arrays: dict[str, Any] = pack_dialogues(tokenizer, chats[part], processes) | pack_texts(
            tokenizer, text[part]
        )
        np.savez(output / f"{part}.npz", **arrays)
        manifest[part] = {
            "dialogues": len(chats[part]),
            "modules": len(text[part]),
            "dialogue_tokens": len(arrays["dialogue_tokens"]),
            "answer_tokens": int(arrays["dialogue_mask"].sum()),
            "text_tokens": len(arrays["text_tokens"]),
            "text_characters": sum(len(module.text) for module in text[part]),
            "dialogue_characters": sum(
                len(text)
                for item in chats[part]
                for _, text in vocabulary.turns(item["messages"], item.get("tools", ()))
            ),
            "npz_bytes": (output / f"{part}.npz").stat().st_size,
        }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the training data of the bundled model.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dialogues", type=int, default=800_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tool-share", type=float, default=Shares().tools, help="of the dialogues")
    parser.add_argument("--json-share", type=float, default=Shares().json, help="of the dialogues")
    parser.add_argument(
        "--processes", type=int, default=1, help="that make and encode dialogues; the data are the same"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    shares = Shares(arguments.tool_share, arguments.json_share)
    manifest = make(arguments.output, arguments.dialogues, arguments.seed, shares, arguments.processes)
    print(json.dumps(manifest, indent=2))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
