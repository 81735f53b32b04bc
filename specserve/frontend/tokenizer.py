"""The tokenizer and its chat template, and text from tokens that arrive in pieces."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specserve.frontend.conversation import ANSWER, Conversation, Turn
from specserve.frontend.template import ChatTemplate, replace_template
from specserve.frontend.tools import Tool

CHARACTERS = 16  # per token; longer texts are tokenized in parts first
CONTEXT = 6  # tokens of the prompt decoded before the first piece
LONGEST = 64  # tokens after which a window without a clean end is cut (random bytes, not text)
_BROKEN = "�"  # what decoders return for bytes that are not (or not yet) a character
Decode = Callable[[Sequence[int]], str]


def hide_torch() -> None:
    """Keep Transformers from importing PyTorch into this process. No tokenizer needs it, except ones with the model's
    own code. Has no effect once PyTorch is imported."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type] # None: there is no such module
    # Suppresses the note that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


_READ = "model_type", "model_name", "tokenizer_class"  # of config.json, by AutoTokenizer


def load_tokenizer(path: str | os.PathLike[str], trust_remote_code: bool = False) -> Any:
    """Return the Transformers tokenizer of a directory; raises errors of many types. It is given a configuration,
    because Transformers warns of models that it does not know, such as MiMo, and refuses the dtype "auto". Of the model
    that has what chooses a tokenizer, such as the name of its class: the class imports much of PyTorch, if there is
    one, and without it other fields, such as those of rotary embeddings, can't be read."""
    from transformers import AutoTokenizer, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    fields, _ = PreTrainedConfig.get_config_dict(path)
    kind: Any = PreTrainedConfig
    if known := CONFIG_MAPPING_NAMES.get(fields.get("model_type")):
        kind = type(known, (kind,), {"model_type": fields["model_type"]})
    read = {name: fields[name] for name in _READ if name in fields}
    config = kind.from_dict(read, name_or_path=path)
    found = AutoTokenizer.from_pretrained(path, config=config, trust_remote_code=trust_remote_code)
    _take_pipeline(found, os.path.join(path, "tokenizer.json"))
    return found


def _take_pipeline(tokenizer: Any, file: str) -> None:
    """Split texts as a tokenizer.json of bytes says: some classes of Transformers, such as GPT2Tokenizer, take its
    vocabulary alone and split in their own way."""
    from tokenizers import Tokenizer as Backend
    from transformers import TokenizersBackend

    own_class = isinstance(tokenizer, TokenizersBackend) and type(tokenizer) is not TokenizersBackend
    if not own_class or not os.path.exists(file):
        return
    with open(file, encoding="utf-8") as read:
        fields = json.load(read)
    if "merges" not in fields["model"] or "ByteLevel" not in json.dumps(fields["pre_tokenizer"]):
        return
    fields |= {"added_tokens": [], "model": {**fields["model"], "vocab": {}, "merges": []}}  # quick to read
    taken, given = tokenizer.backend_tokenizer, Backend.from_str(json.dumps(fields))
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(taken, part, getattr(given, part))
    taken.model.ignore_merges = given.model.ignore_merges


class TooLong(ValueError):
    """A text has more tokens than allowed; its beginning already shows that."""


class Tokenizer:
    """A Hugging Face tokenizer, ``wrapped``. ``encode`` and ``encode_chat`` must not run in two threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.wrapped = tokenizer
        self._decode = _decode_of(tokenizer)
        self.template = ChatTemplate(tokenizer)
        self._special = frozenset(_special(tokenizer))
        decoders = _decoders(tokenizer)
        self._alphabet = byte_alphabet() if "ByteLevel" in decoders else {}
        self._byte_tokens = _byte_tokens(tokenizer) if "ByteFallback" in decoders else []
        self._bytes = {token: byte for byte, token in enumerate(self._byte_tokens)}

    @classmethod
    def load(cls, path: str, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Load a tokenizer. Raises ValueError naming the path. ``chat_template``, a text or a file, replaces the
        checkpoint's."""
        try:
            found = load_tokenizer(path, trust_remote_code)
        except Exception as error:  # the library raises many types, from OSError to KeyError
            reason = " ".join(str(error).split()) or type(error).__name__
            files = os.listdir(path) if os.path.isdir(path) else ["tokenizer.json"]
            lacks = not any(map(re.compile(r"tokenizer\.|vocab|tekken|.*\.(model|tiktoken)$").match, files))
            if lacks and "config.json" not in files:
                reason = "it has no tokenizer.json and no config.json"
            elif os.path.join(path, "config.json") in reason:  # the model's file is broken
                raise ValueError(reason) from None
            elif lacks:
                reason = "it has no tokenizer.json; --tokenizer-path names another directory"
            raise ValueError(f"the tokenizer of {path} can't be loaded: {reason}") from None
        if chat_template is not None:
            replace_template(found, chat_template)
        return cls(found)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Return the ids of a plain prompt, with the special tokens that the tokenizer adds. Raises TooLong for a text
        far longer than ``most`` tokens."""
        return self._encode(text, most, True)

    def encode_answer(self, text: str, most: int | None = None) -> list[int]:
        """Return the ids of text that a model might write, without added special tokens. ``most`` as for ``encode``."""
        return self._encode(text, most, False)

    def encode_chat(
        self,
        messages: Conversation,
        most: int | None = None,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        turn: Turn = ANSWER,
    ) -> list[int]:
        """Return the ids of a conversation as its ``template`` renders it. ``most`` as for ``encode``."""
        return self._encode(self.template.render(messages, tools, variables, turn), most, False)

    def with_template(self, given: str) -> Tokenizer:
        """Return this tokenizer with another chat template, a text or a file. Raises ValueError."""
        other = copy.copy(self)
        other.wrapped = copy.copy(self.wrapped)
        replace_template(other.wrapped, given)
        other.template = ChatTemplate(other.wrapped)
        return other

    @property
    def template_text(self) -> str:
        """Return the chat template used with tools, empty if there is none."""
        return self.template.text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        ids = self._valid(token_ids, skip_special_tokens) if self._bytes else list(token_ids)
        return self._decode(ids, skip_special_tokens)

    def _encode(self, text: str, most: int | None, special: bool) -> list[int]:
        """Tokenize a text. If it is far longer than ``most`` tokens can be, tokenize a beginning first, then one twice
        as long, and so on. A beginning of more than twice ``most`` tokens, which its cut end can't explain, is TooLong.
        Whatever the tokenizer drops or joins, it also drops or joins in the beginning, and a text of few long tokens
        passes. Only one fitting text would be refused: more white space than ``most`` tokens before an added token that
        swallows it (``lstrip``)."""
        size = len(text) if most is None else CHARACTERS * (most + 1)
        while most is not None and size < len(text):
            count = len(self._ids(text[:size], False))
            if count > 2 * most:
                raise TooLong(f"has {len(text)} characters, of which the first {size} have {count} tokens")
            size *= 2
        return self._ids(text, special)

    def _ids(self, text: str, special: bool) -> list[int]:
        """Tokenize without the library's warning about the model's length (``verbose``), which is checked elsewhere."""
        return list(self.wrapped.encode(text, add_special_tokens=special, verbose=False))

    def detokenizer(
        self, prompt: Sequence[int], skip_special_tokens: bool, shown: Collection[str] = ()
    ) -> Detokenizer:
        """Return a detokenizer for an answer to ``prompt``. ``shown``: special tokens that are not skipped."""
        hidden = self._special_texts if skip_special_tokens else {}
        decode: Decode = functools.partial(self.decode, skip_special_tokens=skip_special_tokens)
        kept = {token: text for token, text in hidden.items() if text not in shown} if shown else hidden
        if len(kept) < len(hidden):

            def decode(token_ids: Sequence[int]) -> str:
                return self.decode([each for each in token_ids if each not in kept], False)

        marks = {self.added[text]: text for text in shown if text in self.added}
        return Detokenizer(decode, prompt, kept, marks)

    @functools.cached_property
    def _special_texts(self) -> dict[int, str]:
        return {token: str(self.wrapped.convert_ids_to_tokens(token)) for token in self._special}

    @functools.cached_property
    def added(self) -> dict[str, int]:
        """Return the ids of added tokens, special or not, by their text."""
        return {str(token): token_id for token_id, token in self.wrapped.added_tokens_decoder.items()}

    def is_special(self, token_id: int) -> bool:
        """Return whether a token has no text in an answer."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be part of a character."""
        piece = self.wrapped.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id in self._special:
            return str(piece).encode()
        if self._alphabet:
            return b"".join(self._alphabet.get(char, char.encode()) for char in piece)
        if len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("▁", " ").encode()

    def _valid(self, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Return the ids with invalid bytes replaced by the byte tokens of U+FFFD.

        The tokenizer's decoder destroys a whole run of byte tokens if any part of it is invalid, so the result for a
        character would depend on its neighbours.
        """
        if skip_special_tokens:  # bytes on both sides of a special token form one run
            token_ids = [token for token in token_ids if token not in self._special]
        found: list[int] = []
        for is_bytes, run in itertools.groupby(token_ids, self._bytes.__contains__):
            if is_bytes:
                text = bytes(self._bytes[token] for token in run).decode(errors="replace")
                found += (self._byte_tokens[byte] for byte in text.encode())
            else:
                found += run
        return found


def _decode_of(tokenizer: Any) -> Callable[[list[int], bool], str]:
    """Return the backend's decode method if it gives the same result as the library's, which takes four times as long
    for every streamed token."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    if issubclass(kind, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode):
        backend = tokenizer.backend_tokenizer
        return lambda ids, skip: str(backend.decode(ids, skip_special_tokens=skip))
    return lambda ids, skip: str(
        tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


def _special(tokenizer: Any) -> set[int]:
    """Return the special tokens, including those that only tokenizer.json marks. No answer's text contains either."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added if token.special)}


def _decoders(tokenizer: Any) -> set[str]:
    """Return the types of a tokenizer's decoders. One without a backend that tells them may be SentencePiece's own."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {"ByteFallback"}
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return {part["type"] for part in (decoder, *decoder.get("decoders", ())) if "type" in part}


def _byte_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens ``<0x00>`` to ``<0xFF>``; none unless all exist."""
    vocabulary = tokenizer.get_vocab()
    found = [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]
    return [] if None in found else found


@functools.cache
def byte_alphabet() -> dict[str, bytes]:
    """Return the bytes that GPT-2's characters stand for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: bytes([byte]) for byte, char in bytes_to_unicode().items()}


class Detokenizer:
    """Decode a window that begins with text already returned, and return what is new at its end.

    A tokenizer may drop the space before a lone token, so a token is never decoded without the one before it. A
    character may be split over tokens, so an incomplete end is held back until it is complete or nothing follows.
    ``decode`` must convert bytes in any window as UTF-8 does: one U+FFFD for each part of a character. ``hidden``: the
    tokens that it skips, and their text; ``marks``: added tokens that a parser has to know, and theirs.
    """

    def __init__(
        self,
        decode: Decode,
        prompt: Sequence[int] = (),
        hidden: Mapping[int, str] = MappingProxyType({}),
        marks: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.hidden, self.marks = hidden, marks
        self._decode = decode
        self._window = list(prompt[-CONTEXT:])
        self._mark = len(self._window)  # start of the next window, once this one ends cleanly
        self._given = len(decode(self._window))  # characters of the window's text already returned

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Return the text that became certain."""
        self._window += token_ids
        text = self._decode(self._window)
        broken = len(text) - len(text.rstrip(_BROKEN))
        garbage = len(self._window) > LONGEST
        if garbage:
            broken = min(broken, 1)  # the bytes of an incomplete character are one U+FFFD
        new = text[self._given : len(text) - broken]
        self._given += len(new)
        if new and not broken:
            self._move(self._mark, 0)
        elif garbage:
            self._move(len(self._window) - CONTEXT, broken)
        return new

    def flush(self) -> str:
        """Return the text held back. Call it once, when no token follows."""
        text = self._decode(self._window)
        new = text[self._given :]
        self._given = len(text)
        return new

    def _move(self, start: int, broken: int) -> None:
        """Make the window begin at ``start``; the last ``broken`` characters have not been returned yet."""
        self._window = self._window[start:]
        self._mark = len(self._window)
        self._given = max(0, len(self._decode(self._window)) - broken)
