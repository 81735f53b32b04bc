"""A request's answer: stop strings, finish reasons, counts."""

from __future__ import annotations

import random
import re

import pytest

from specserve.constraints.marks import THINK
from specserve.core import SamplingParams, SpeculationUsage, TokenLogprob
from specserve.frontend.answers import AnswerParser
from specserve.frontend.output import OutputProcessor, StopFinder
from specserve.frontend.parsers.base import Content
from specserve.frontend.parsers.think import ThinkParser
from specserve.frontend.tokenizer import Tokenizer
from specserve.messages import FinishReason, Tokens
from tests.front.fake_engine import EOS
from tests.front.fakes import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())


def processor(**params: object) -> OutputProcessor:
    return OutputProcessor(SamplingParams(**params), TOKENIZER.detokenizer([65], True))  # type: ignore[arg-type]


def tokens(ids: list[int], reason: FinishReason | None = None, **fields: object) -> Tokens:
    return Tokens("r", ids, fields.pop("runs", [len(ids)]), reason, **fields)  # type: ignore[arg-type]


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Read the text a character at a time: the slow way to say which stop string comes first, from where to where."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found), end
    return None


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(0, 5))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_stop_strings_do_not_depend_on_the_pieces() -> None:
    rng, found_some = random.Random(0), 0
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 14)))
        stops = [
            "".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))
        ]
        included = rng.random() < 0.5
        finder, given, found = StopFinder(stops, included), "", False
        for piece in split(text, rng):
            new, found = finder.feed(piece)
            given += new
            if found:
                break
        given += finder.flush()
        place = first_stop(text, stops)
        assert (given, found) == (text if place is None else text[: place[included]], place is not None)
        found_some += found
    assert 500 < found_some < 2900


def test_text_is_held_back_no_longer_than_needed() -> None:
    finder = StopFinder(["STOP"])
    assert [finder.feed(piece)[0] for piece in ("a S", "TO", "X S", "T")] == ["a ", "", "STOX ", ""]
    assert finder.flush() == "ST"


def test_stop_string_over_tokens_trims_text_and_counts() -> None:
    out = processor(stop=["END"], logprobs=0)
    logprobs = [TokenLogprob(token, -1.0, []) for token in b"ab ENDxyz"]
    usage = SpeculationUsage(steps=3, drafted=12, accepted=6)
    first = out.push(
        tokens(list(b"ab E"), runs=[4], logprobs=logprobs[:4], cached_tokens=8, speculation=usage)
    )
    assert (first.text, first.finish_reason, out.must_abort) == ("ab ", None, False)
    usage = SpeculationUsage(steps=5, drafted=20, accepted=9)
    last = out.push(
        tokens(list(b"NDxyz"), runs=[3, 2], logprobs=logprobs[4:], cached_tokens=8, speculation=usage)
    )
    assert (last.text, last.finish_reason, out.must_abort) == ("", "stop", True)
    answer = out.answer
    assert (answer.text, bytes(answer.token_ids)) == ("ab ", b"ab END")
    assert len(answer.logprobs) == 6
    assert answer.cached_tokens == 8
    # The run of 2 is gone with its step and its accepted draft; of the run of 3 one accepted draft is gone.
    assert answer.speculation == SpeculationUsage(steps=4, drafted=20, accepted=7)


def test_predicted_tokens_behind_a_stop_string_do_not_count() -> None:
    """They are the first ones of a message: of four predicted ones in the last, two come before the end."""
    out = processor(stop=["D"])
    out.push(tokens(list(b"abc"), runs=[3], speculation=SpeculationUsage(steps=1, predicted=3)))
    out.push(tokens(list(b"CDEFx"), runs=[5], speculation=SpeculationUsage(steps=2, predicted=7)))
    assert out.answer.speculation.predicted == 5


def test_found_in_the_last_message_needs_no_abort() -> None:
    out = processor(stop=["b"])
    delta = out.push(tokens(list(b"abc"), "length"))
    assert (delta.text, delta.finish_reason, out.must_abort) == ("a", "stop", False)


def test_min_tokens_disarms_stop_strings() -> None:
    out = processor(stop=["b"], min_tokens=3, max_tokens=9)
    out.push(tokens(list(b"ab")))
    out.push(tokens(list(b"a")))
    delta = out.push(tokens(list(b"ab")))
    assert (out.answer.text, delta.finish_reason) == ("abaa", "stop")
    out = processor(stop=["bc"], min_tokens=3, max_tokens=9)
    out.push(tokens(list(b"ab")))
    assert out.push(tokens(list(b"c"))).finish_reason == "stop"  # complete at the third token
    assert out.answer.text == "a"


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_stop_token_has_no_text_but_counts(stop: list[str]) -> None:
    out = processor(stop=stop, stop_token_ids=[66])
    delta = out.push(tokens([65, 66], "stop", stop_token=True))
    assert (delta.text, delta.finish_reason, out.answer.token_ids) == ("A", "stop", [65, 66])


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_what_ended_the_answer_is_text_if_asked_for(stop: list[str]) -> None:
    out = processor(stop=stop, stop_token_ids=[66], include_stop_str_in_output=True)
    assert out.push(tokens([65, 66], "stop", stop_token=True)).text == "AB"
    out = processor(stop=["bc", *stop], include_stop_str_in_output=True)
    assert (out.push(tokens(list(b"ab"))).text, out.push(tokens(list(b"cd"))).text) == ("a", "bc")
    assert out.answer.token_ids == list(b"abc")


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_end_gives_out_everything_held_back(stop: list[str]) -> None:
    out = processor(stop=stop)
    first = out.push(tokens([65, ord("z"), 0xE2]))
    last = out.push(tokens([0x82], "length"))
    assert first.text + last.text == "Az�"
    assert last.finish_reason == "length"


def cut_at(
    ids: list[int], stops: list[str], skip: bool, included: bool, rng: random.Random
) -> tuple[str, str | None, int]:
    """The text, the stop string that ended it, and how many tokens count."""
    params = SamplingParams(stop=stops, include_stop_str_in_output=included)
    out = OutputProcessor(params, TOKENIZER.detokenizer([65], skip))
    while out.answer.finish_reason is None:
        size = rng.randint(1, 4)
        cut, ids = ids[:size], ids[size:]
        out.push(tokens(cut, None if ids else "length"))
    return out.answer.text, out.answer.stop, len(out.answer.token_ids)


def test_hiding_special_tokens_does_not_change_where_an_answer_ends() -> None:
    rng, ended = random.Random(5), 0
    parts = ["<sep>", "<", "sep", "p>", "a", "b", "<sep>a", "b<sep>"]
    for _ in range(3000):
        ids = rng.choices([97, 98, 257], k=rng.randint(1, 12))
        stops = rng.sample(parts, k=rng.randint(1, 3))
        shown, stop, count = cut_at(ids, stops, False, False, rng)
        bare = re.sub("<(s(e(p>?)?)?)?", "", shown)  # also of a mark within which a stop string begins
        assert cut_at(ids, stops, True, False, rng) == (bare, stop, count)
        assert cut_at(ids, stops, True, True, rng) == (bare + (stop or ""), stop, count)
        ended += stop is not None
    assert 500 < ended < 2900


@pytest.mark.parametrize("included", [False, True])
def test_half_a_character_before_a_hidden_stop_string(included: bool) -> None:
    out = processor(stop=["<sep>"], include_stop_str_in_output=included)
    delta = out.push(tokens([65, 0xC3, 257, 66]))
    assert (delta.text, delta.finish_reason) == ("A\ufffd" + "<sep>" * included, "stop")


def test_pieces_do_not_change_the_answer() -> None:
    text, rng = "Grüße, wörld. END of text", random.Random(3)
    ids = [*text.encode(), EOS]
    for stop in ([], ["END"], ["ö", "x"], ["\ufffd"]):
        answers = set()
        for _ in range(40):
            out, at = processor(stop=stop, max_tokens=100), 0
            while out.answer.finish_reason is None:
                n = rng.randint(1, 6)
                piece, at = ids[at : at + n], at + n
                ended = at >= len(ids)
                out.push(tokens(piece, "stop" if ended else None, stop_token=ended))
            answers.add((out.answer.text, tuple(out.answer.token_ids), out.answer.finish_reason))
        assert len(answers) == 1


@pytest.mark.parametrize("stop", [[], ["END"], ["ö", "x"], ["\ufffd"]])
def test_every_token_has_its_piece(stop: list[str]) -> None:
    ids, rng = [*"Grüße, wörld. END of text".encode(), EOS], random.Random(4)
    params = SamplingParams(stop=stop, max_tokens=100)
    whole = processor(stop=stop, max_tokens=100)
    whole.push(tokens(ids, "stop", stop_token=True))
    for _ in range(40):
        out, at = OutputProcessor(params, TOKENIZER.detokenizer([65], True), by_token=True), 0
        while out.answer.finish_reason is None:
            runs = [rng.randint(1, 3), rng.randint(1, 3)]
            cut, at = ids[at : at + sum(runs)], at + sum(runs)
            ended = at >= len(ids)
            delta = out.push(
                tokens(cut, "stop" if ended else None, stop_token=ended, runs=_runs(runs, len(cut)))
            )
            assert delta.pieces is not None
            assert "".join(delta.pieces) == delta.text
            assert len(delta.pieces) == len(delta.token_ids) == sum(delta.runs)
            assert all(delta.runs)
        assert out.answer == whole.answer


def _runs(runs: list[int], tokens: int) -> list[int]:
    first = min(runs[0], tokens)
    return [first, tokens - first] if tokens > first else [first]


def test_without_a_tokenizer_there_are_ids() -> None:
    out = OutputProcessor(SamplingParams(), None)
    assert out.push(tokens([1, 2], "length")).text == ""
    assert out.answer.token_ids == [1, 2]


@pytest.mark.parametrize("stride", [1, 2, 5, 40])
@pytest.mark.parametrize("end", [True, False])
def test_reasoning_is_counted_by_token(stride: int, end: bool) -> None:
    """However many tokens a message holds, and whether the last one holds any."""
    for text, expected in (("<think>é</think>\n\nHi", 17), ("<think>hm", None), ("Hi <think>", 0)):
        ids = [*text.encode(), *([EOS] if end else [])]
        parser = AnswerParser(ThinkParser(""))
        detokenizer = TOKENIZER.detokenizer([65], True, THINK.tokens)
        out = OutputProcessor(SamplingParams(), detokenizer, by_token=True, parser=parser)
        for at in range(0, len(ids), stride):
            last = end and at + stride >= len(ids)
            out.push(tokens(ids[at : at + stride], "stop" if last else None, stop_token=last))
        if not end:
            out.push(tokens([], "length", runs=[]))
        assert out.answer.reasoning_tokens == (len(ids) if expected is None else expected)
        found = "".join(event.text for event in out.answer.events if isinstance(event, Content))
        assert found == ("" if expected is None else text.rpartition("</think>")[2].lstrip())
