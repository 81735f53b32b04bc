"""The tokenizer and its chat template, as the rest of the front sees them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from specserve.frontend.conversation import Conversation
from specserve.frontend.detokenizer import Detokenizer
from specserve.frontend.template import ChatTemplate


class Tokenizer:
    """A Hugging Face tokenizer. ``encode`` and ``encode_chat`` are not for two threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        self._byte_level = _is_byte_level(tokenizer)

    @classmethod
    def load(cls, path: str, trust_remote_code: bool = False) -> Tokenizer:
        """Raises ValueError naming the path."""
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code))
        except Exception as error:  # the library raises nearly everything, from OSError to KeyError
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the tokenizer of {path} can't be loaded: {reason}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer puts around one."""
        return list(self._tokenizer.encode(text))

    def encode_answer(self, text: str) -> list[int]:
        """Ids of what a model might write: no special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_chat(self, messages: Conversation) -> list[int]:
        """Ids of a conversation up to where the assistant answers. Raises ValueError with the reason."""
        return list(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def detokenizer(self, prompt: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(functools.partial(self.decode, skip_special_tokens=skip_special_tokens), prompt)

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no text in an answer."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character."""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id in self._special:
            return str(piece).encode()
        if self._byte_level:
            return b"".join(_BYTES.get(char, char.encode()) for char in piece)
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("▁", " ").encode()


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's alphabet: printable Latin-1 characters are their own byte, the others begin at U+0100."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    alphabet = {chr(byte): bytes([byte]) for byte in own}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
