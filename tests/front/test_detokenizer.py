"""The detokenizer's pieces joined are the whole text, however the tokens arrive."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specserve.frontend.tokenizer import LONGEST, Detokenizer, Tokenizer
from tests.front.fakes import byte_tokenizer

TEXTS = ["plain words", "naïve café — 日本語 🎉🎉 ok", "👩‍👩‍👧 family", "a\n\n  b\tc", "�x� y", "é", ""]


def sentence_piece_tokenizer() -> Any:
    """Words marked by ▁, a byte fallback, and a decoder that drops the first space: Llama 2's kind."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "!", "lo"]
    backend = Backend(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def ids(*pieces: str) -> list[int]:
    found: list[int] = sentence_piece_tokenizer().convert_tokens_to_ids([*pieces])
    return found


def fallback_ids(raw: bytes) -> list[int]:
    return ids(*(f"<0x{byte:02X}>" for byte in raw))


def pieces(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], rng: random.Random) -> list[str]:
    detokenizer, out, at = tokenizer.detokenizer(prompt, True), [], 0
    while at < len(tokens):
        step = rng.randint(1, 4)
        out.append(detokenizer.push(tokens[at : at + step]))
        at += step
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_random_splits_of_text(text: str) -> None:
    tokenizer, rng = Tokenizer(byte_tokenizer()), random.Random(0)
    tokens = list(text.encode())
    for _ in range(30):
        assert "".join(pieces(tokenizer, list(b"Prompt: "), tokens, rng)) == text


def test_no_piece_holds_half_a_character() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    detokenizer = tokenizer.detokenizer(list(b"p"), True)
    given = [detokenizer.push([byte]) for byte in "a€🎉".encode()]
    assert given == ["a", "", "", "€", "", "", "", "🎉"]
    assert detokenizer.flush() == ""


def test_random_bytes_come_out_as_the_whole_decodes() -> None:
    tokenizer, rng = Tokenizer(byte_tokenizer()), random.Random(1)
    for _ in range(200):
        tokens = [
            rng.choice([65, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0xFF]) for _ in range(rng.randint(1, 30))
        ]
        assert "".join(pieces(tokenizer, [65], tokens, rng)) == tokenizer.decode(tokens)


def test_of_garbage_only_what_may_become_a_character_is_held_back() -> None:
    """From ``LONGEST`` tokens on, one U+FFFD, and if the bytes after it make it whole, the character comes."""
    tokenizer = Tokenizer(byte_tokenizer())
    detokenizer = tokenizer.detokenizer([65], True)
    assert detokenizer.push([0xFF] * LONGEST) == "�" * (LONGEST - 1)
    assert detokenizer.push([*[0xFF] * LONGEST, 0xC3]) == "�" * (LONGEST + 1)
    assert detokenizer.push([0xA9]) == "é"
    assert detokenizer.flush() == ""


def test_endless_garbage_keeps_the_window_short() -> None:
    tokenizer, windows = Tokenizer(byte_tokenizer()), []

    def decode(window: Sequence[int]) -> str:
        windows.append(len(window))
        return tokenizer.decode(window)

    detokenizer = Detokenizer(decode, [65])
    tokens = [0xFF] * 1000
    text = "".join(detokenizer.push([token]) for token in tokens) + detokenizer.flush()
    assert text == "�" * 1000
    assert max(windows) <= LONGEST + 1


def test_first_space_is_kept_behind_a_prompt() -> None:
    tokenizer = Tokenizer(sentence_piece_tokenizer())
    hello, world, bang = ids("▁Hello", "▁world", "!")
    assert tokenizer.decode([world]) == "world"  # alone it loses its space
    for step in (1, 2):
        detokenizer = tokenizer.detokenizer([hello], True)
        tokens = [world, world, bang]
        out = [detokenizer.push(tokens[i : i + step]) for i in range(0, 3, step)]
        assert "".join(out) == " world world!"


def test_bytes_of_the_fallback_join() -> None:
    tokenizer = Tokenizer(sentence_piece_tokenizer())
    tokens = [*ids("▁Hello"), *fallback_ids("é🎉".encode()), *ids("!")]
    for seed in range(20):
        assert "".join(pieces(tokenizer, ids("!"), tokens, random.Random(seed))) == " Helloé🎉!"


ANSWERS = [
    "中".encode() + b"\xff",
    b"\xf0\x9f\x98" * 50,  # longer than a window, and no character is ever whole
    b"\xe4\xb8\xff\xc3\xa9\xed\xa0\x80",
    "日本語 🎉🎉".encode(),
]


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("prompt", ["x", "x😀😀", "😀é"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_bytes_do_not_depend_on_messages_or_prompt(answer: bytes, prompt: str, fallback: bool) -> None:
    """A context may begin inside a character, and how tokens are grouped depends on speculation."""
    tokenizer = Tokenizer(sentence_piece_tokenizer() if fallback else byte_tokenizer())
    before, tokens = (
        fallback_ids(raw) if fallback else list(raw) for raw in (prompt.encode(), answer + b"!")
    )
    for step in (1, 2, 3, len(tokens)):
        detokenizer = tokenizer.detokenizer(before, True)
        out = [detokenizer.push(tokens[at : at + step]) for at in range(0, len(tokens), step)]
        assert "".join([*out, detokenizer.flush()]) == (answer + b"!").decode(errors="replace")
    assert tokenizer.decode(tokens) == (answer + b"!").decode(errors="replace")


def test_bytes_around_a_skipped_token_join() -> None:
    tokenizer = Tokenizer(sentence_piece_tokenizer())
    unknown, (first, *others) = 0, fallback_ids("中".encode())
    assert tokenizer.decode([first, unknown, *others]) == "中"
    assert tokenizer.decode([first, unknown, *others], skip_special_tokens=False) == "�<unk>��"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    for skip, expected in ((True, "ab"), (False, "a<sep>b")):
        detokenizer = tokenizer.detokenizer([65], skip)
        assert "".join(detokenizer.push([token]) for token in (97, 257, 98)) == expected


def test_bytes_of_tokens() -> None:
    byte_level, fallback = Tokenizer(byte_tokenizer()), Tokenizer(sentence_piece_tokenizer())
    assert [byte_level.token_bytes(token) for token in (0, 32, 0xC3, 256)] == [
        b"\x00",
        b" ",
        b"\xc3",
        b"<eos>",
    ]
    assert [fallback.token_bytes(token) for token in ids("▁world", "<0xE2>")] == [b" world", b"\xe2"]
    assert byte_level.token_bytes(10_000) == b""


@pytest.mark.parametrize(
    ("make", "pool"), [(byte_tokenizer, [*range(260)]), (sentence_piece_tokenizer, [0, *range(257, 262)])]
)
def test_texts_are_the_librarys(make: Callable[[], Any], pool: list[int]) -> None:
    """Of all but the bytes of a fallback, whichever of its methods is called."""
    theirs, rng = make(), random.Random(2)
    ours = Tokenizer(theirs)
    for _ in range(100):
        tokens = rng.choices(pool, k=rng.randrange(9))
        for skip in (False, True):
            expected = theirs.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(tokens, skip) == expected


def test_a_class_of_its_own_decodes_as_it_likes() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *given: Any, **named: Any) -> str:
            return str(super()._decode(*given, **named)).upper()  # private: of transformers

    backend = byte_tokenizer().backend_tokenizer
    assert Tokenizer(Loud(tokenizer_object=backend)).decode(list(b"ab c")) == "AB C"
