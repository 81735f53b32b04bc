"""Count which schemas of a public suite can be enforced, and check that no accepted one lets invalid JSON through.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python -m benchmarks.json_schema JSON-Schema-Test-Suite

A schema is refused, with a reason, or accepted. For an accepted one, texts are drawn from the grammar, token by token
of the bundled vocabulary and without a model, and those that end are checked by ``jsonschema``. The suite's instances
are also given to the grammar: accepting an invalid one is a violation; rejecting a valid one makes the grammar narrower
than the schema. ``format`` is only an annotation in these drafts, as in the suite; its optional tests are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np

from benchmarks.common import write_results
from specserve import grammar
from specserve.config.paths import BUNDLED_MODEL
from specserve.engine.grammars import GrammarError, Grammars

DRAFTS = {
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}
VOCABULARY, END = 4096, 1
TEXTS, MOST = 6, 150  # of a schema, and tokens of each


class Held:
    """Draw answers of the bundled vocabulary from grammars."""

    def __init__(self) -> None:
        path = BUNDLED_MODEL / "tokenizer.json"
        self._grammars = Grammars(path, VOCABULARY, [END])
        self._tokenizer = llguidance.LLTokenizer(str(path), n_vocab=VOCABULARY, eos_token=[END])
        texts = [self._tokenizer.decode_bytes([token]) for token in range(VOCABULARY)]
        self._closing = np.array([text.strip() in (b"}", b"]", b'"', b",", b":") for text in texts])

    def draw(self, text: str, rng: np.random.Generator) -> str | None:
        """A text of a grammar, None for one that does not end in time. The longer it is the rather it closes."""
        matcher, answer = self._grammars.start(text, []), b""
        for step in range(MOST):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[:VOCABULARY].astype(bool)
            if bits[END] and (bits.sum() == 1 or rng.random() < 0.1 + step / MOST):
                return answer.decode(errors="replace")
            bits[[0, *range(END, 6)]] = False
            closing = bits & self._closing
            pick = closing if closing.any() and rng.random() < 0.3 + step / MOST else bits
            if not pick.any():
                return None
            token = int(rng.choice(pick.nonzero()[0]))
            matcher.consume([token])
            answer += self._tokenizer.decode_bytes([token])
        return None

    def accepts(self, text: str, written: str) -> bool:
        matcher = llguidance.LLMatcher(self._tokenizer, text)
        tokens = self._tokenizer.tokenize_str(written)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def groups(suite: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted((suite / "tests" / draft).glob("*.json")):
        for group in json.loads(file.read_text()):
            yield file.stem, group


def is_valid(checker: Any, value: Any) -> bool | None:
    """None where jsonschema can't say, as it has no other documents."""
    try:
        return bool(checker.is_valid(value))
    except Exception:
        return None


def measure(suite: Path, draft: str, held: Held) -> dict[str, Any]:
    count, refused, kinds = Counter[str](), Counter[str](), Counter[str]()
    violated: list[str] = []
    for place, (kind, group) in enumerate(groups(suite, draft)):
        schema, name = group["schema"], f"{kind}: {group['description']}"
        if isinstance(schema, dict):  # says which draft it is of
            schema = {"$schema": DRAFTS[draft].META_SCHEMA["$schema"], **schema}
        count["schemas"] += 1
        try:
            text = grammar.json_schema(schema)
        except ValueError as error:
            count["refused"] += 1
            refused[str(error)[:70]] += 1
            continue
        count["taken"] += 1
        kinds[kind] += 1
        checker, rng = DRAFTS[draft](schema), np.random.default_rng(place)
        ended = 0
        for _ in range(TEXTS):
            try:
                drawn = held.draw(text, rng)
            except GrammarError:
                count["drawn without an end"] += 1
                continue
            verdict = None if drawn is None else is_valid(checker, json.loads(drawn))
            ended += verdict is not None
            count["drawn texts that ended"] += verdict is not None
            if verdict is False:
                violated.append(f"{name}: {drawn}")
        count["taken, of which a text ended"] += ended > 0
        narrow = False
        for test in group["tests"]:
            accepted = held.accepts(text, json.dumps(test["data"], ensure_ascii=False))
            count[f"{'valid' if test['valid'] else 'invalid'} instances"] += 1
            narrow |= test["valid"] and not accepted
            if accepted and not test["valid"]:
                violated.append(f"{name}: {json.dumps(test['data'])}")
        count["taken, narrower than the schema"] += narrow
    print(draft, dict(count), f"{len(violated)} violated", sep="\n")
    for each in violated[:40]:
        print("   ", each[:200])
    return {
        "counts": dict(count),
        "share taken": round(count["taken"] / count["schemas"], 3),
        "violated": len(violated),
        "refused for": dict(refused.most_common(12)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    held = Held()
    figures = {draft: measure(options.suite, draft, held) for draft in DRAFTS}
    versions = {name: version(name) for name in ("llguidance", "jsonschema")}
    write_results("json_schema", {**versions, **figures}, options.output)


if __name__ == "__main__":
    main()
