"""Draw answers from a grammar, and tell whether it admits one."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import llguidance
import numpy as np

from specserve.config.paths import BUNDLED_MODEL
from specserve.constraints.marks import Marks
from specserve.constraints.matcher import Grammars
from specserve.frontend.parsers.json_calls import DEEPSEEK_MARKS, KIMI_MARKS
from specserve.frontend.parsers.text_calls import DSML, GLM_MARKS, MINIMAX_MARKS

END = 1
ENDS = ("}", "]", '"', "t", ")", "\n</parameter>\n</function>")
TOKENS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<other>"),
    *("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>"),
    *(*DEEPSEEK_MARKS, *KIMI_MARKS, *GLM_MARKS[2:], *MINIMAX_MARKS, DSML),
)


class Walker:
    """Draw answers from a grammar, preferring marks, brackets and the end."""

    def __init__(self, folder: Path, added: Sequence[str]) -> None:
        given = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
        plain = {**given["added_tokens"][0], "special": False}
        self.vocabulary: dict[str, int] = given["model"]["vocab"]
        self.added = {text: 4096 + index for index, text in enumerate(added)}
        given["added_tokens"] += [
            {**plain, "id": token, "content": text, "special": text == DSML}
            for text, token in self.added.items()
        ]
        (folder / "tokenizer.json").write_text(json.dumps(given))
        self.size = 4096 + len(added)
        self.grammars = Grammars(folder / "tokenizer.json", self.size, [END])
        self._bytes = llguidance.LLTokenizer(
            str(folder / "tokenizer.json"), n_vocab=self.size, eos_token=[END]
        )
        self._names = {token: text for text, token in self.added.items()}

    @property
    def marks(self) -> Marks:
        return Marks({**self.added, "<|begin|>": 0, "<|end|>": END}, [END])

    def draw(self, text: str, rng: random.Random, begin: str = "", most: int = 150) -> str | None:
        """None for one that does not end in time. ``begin``: what it begins with, where that is allowed."""
        matcher, answer = self.grammars.start(text, []), b""
        wishes = self._spelled(begin)
        for step in range(most):
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[: self.size]
            if bits[END] and (bits.sum() == 1 or (not wishes and rng.random() < step / most)):
                return answer.decode()
            bits[[0, END, 2, 3, 4, 5]] = 0
            if not wishes and rng.random() < 0.7:
                wishes = self._spelled(rng.choice((*TOKENS, *ENDS)))
            wished = wishes[0] if wishes and bits[wishes[0]] else None
            token = int(rng.choice(bits.nonzero()[0])) if wished is None else wished
            matcher.consume([token])
            text = self._text(token)
            answer += text
            while (
                text and wishes and text.startswith(self._text(wishes[0]))
            ):  # what is forced may be longer tokens
                text = text.removeprefix(self._text(wishes.pop(0)))
            if text:
                wishes = []
        return None

    def _text(self, token: int) -> bytes:
        if token in self._names:
            return self._names[token].encode()
        return bytes(self._bytes.decode_bytes([token]))

    def admits(self, text: str, *answer: str) -> bool:
        """Whether an answer is one that the grammar allows, in characters; its parts are tokenized apart."""
        matcher = self.grammars.start(text, [])
        for token in [*chain.from_iterable(map(self._bytes.tokenize_str, answer)), END]:
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            if not bits[token]:
                return False
            if token != END:
                matcher.consume([token])
        return True

    def _spelled(self, text: str) -> list[int]:
        pieces = re.findall("|".join(map(re.escape, (*self.added, "."))).replace(r"\.", "(?s:.)"), text)
        return [
            token
            for piece in pieces
            for token in ([self.added[piece]] if piece in self.added else self._bytes.tokenize_str(piece))
        ]
