"""Documents, masks, packing and sampling."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specserve.tools.train.chat import Encoder
from specserve.tools.train.data import load_sources, load_tokens
from specserve.tools.train.heads import draft_vocabulary, membership, offsets
from specserve.tools.train.packing import Documents, RowSampler, identity, pack
from tests.train_models import tiny_documents, tiny_rows

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Rewrites earlier turns: only the last assistant message keeps its text.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role == 'user' else 'gone' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]


def make_encoder(template: str = CHATML) -> Encoder:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = template
    return Encoder(fast)


def learned(encoder: Encoder, tokens: object, mask: object) -> str:
    return str(encoder.tokenizer.decode(np.asarray(tokens)[np.asarray(mask, bool)]))


def test_assistant_tokens_are_learned_with_their_end_of_turn() -> None:
    encoder = make_encoder()
    found = encoder.conversation([{"role": r, "content": c} for r, c in TALK])
    assert len(found) == 1
    assert learned(encoder, *found[0]) == "two<|im_end|>four<|im_end|>"


def test_an_end_of_turn_that_is_merely_an_added_token_is_one_too() -> None:
    encoder = make_encoder()
    encoder.tokenizer.add_tokens([AddedToken("<|eot|>", special=True)])
    encoder.tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|eot|>")
    found = Encoder(encoder.tokenizer).conversation([{"role": r, "content": c} for r, c in TALK])
    assert learned(encoder, *found[0]) == "two<|eot|>four<|eot|>"


def test_a_template_that_rewrites_turns_gives_a_document_a_turn() -> None:
    encoder = make_encoder(FORGETFUL)
    found = encoder.conversation([{"role": r, "content": c} for r, c in TALK])
    assert [learned(encoder, *document) for document in found] == ["two<|im_end|>", "four<|im_end|>"]


def test_the_three_forms_of_json_lines(tmp_path: Path) -> None:
    encoder = make_encoder()
    speakers = {"user": "human", "assistant": "gpt"}
    lines = [
        {"messages": [{"role": r, "content": c} for r, c in TALK]},
        {"conversations": [{"from": speakers[r], "value": c} for r, c in TALK]},
        {"text": "plain"},
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    documents = load_sources(path, encoder)["talk"]
    texts = [
        learned(encoder, documents.tokens[a:b], documents.mask[a:b])
        for a, b in zip(documents.starts, documents.starts[1:], strict=False)
    ]
    assert texts == ["two<|im_end|>four<|im_end|>"] * 2 + ["plain"]


CALL = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
CALLED = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


def test_calls_are_learned_or_refused(tmp_path: Path) -> None:
    """A template without calls ends the answer where they should be."""
    path = tmp_path / "calls.jsonl"
    path.write_text(json.dumps({"messages": CALLED}))
    calls = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    encoder = make_encoder(CHATML.replace("{{ m.content }}", calls))
    documents = load_sources(path, encoder)["calls"]
    found = learned(encoder, documents.tokens, documents.mask)
    assert found == '{"name": "sum", "arguments": {"a": 1}}<|im_end|>'
    with pytest.raises(ValueError, match=r"line 1: messages\.1\.tool_calls\.0\.function\.name: .*no place"):
        load_sources(path, make_encoder())


def test_parts_of_text_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "parts.jsonl"
    parts = [{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}]
    path.write_text(json.dumps({"messages": [*CALLED[:1], {"role": "assistant", "content": parts}]}))
    documents = load_sources(path, make_encoder())["parts"]
    assert learned(make_encoder(), documents.tokens, documents.mask) == "two<|im_end|>"


BAD_LINES = [
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "assistant", "content": None}]},
    {"messages": [{"role": "assistant", "content": "x", "weight": 0}]},
    {"conversations": [{"from": "gpt", "value": None}]},
]


@pytest.mark.parametrize(
    "line",
    [*map(json.dumps, BAD_LINES), "[]", "{", '{"a": 1}', '{"conversations": [{"from": "x", "value": "y"}]}'],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        load_sources(path, make_encoder())


def test_npz_with_and_without_the_last_start(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    tokens, mask = np.arange(6, dtype=np.uint16), np.array([0, 1, 1, 0, 1, 1], np.uint8)
    np.savez(
        path, x_tokens=tokens, x_mask=mask, x_starts=[0, 3], y_tokens=tokens, y_mask=0 * mask, y_starts=[0, 6]
    )
    sources = load_tokens(path)
    assert sources["x"].starts.tolist() == [0, 3, 6]
    assert sources["y"].mask.all()


def test_packing_keeps_every_token_and_document() -> None:
    documents = tiny_documents()
    rows = pack(documents, 16, seed=1)
    assert sum(int((rows.tokens[r] >= 0).sum()) for r in range(len(rows))) == 16 * len(rows)
    assert int(rows.mask.sum()) == int(documents.mask.sum())
    pieces = []
    for r in range(len(rows)):
        ends = [*rows.starts[r].tolist()[1:], 16]
        pieces += [rows.tokens[r, a:b].tolist() for a, b in zip(rows.starts[r], ends, strict=True)]
    for begin, end in zip(documents.starts, documents.starts[1:], strict=False):
        for start in range(begin, end, 16):
            assert documents.tokens[start : min(start + 16, end)].tolist() in pieces


def test_sampler_honours_shares_and_covers_an_epoch() -> None:
    first, second = tiny_rows(16), tiny_rows(8)
    sampler = RowSampler([tiny_rows(16), first], [0.25, 0.75], 4, 0, torch.device("cpu"), False)
    assert [sum(sampler.drawn(k)) for k in range(4)] == [0, 4, 8, 12]
    assert sampler.drawn(8) == [8, 24]
    alone = RowSampler([second], None, len(second), 0, torch.device("cpu"), False)
    seen = alone(3).tokens_T.view(-1, 8)
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, second.tokens.tolist()))


def test_draft_vocabulary_is_the_most_learned_tokens() -> None:
    documents = tiny_documents()
    ids = draft_vocabulary([documents], 40, 12)
    counts = np.bincount(documents.tokens[documents.mask], minlength=40)
    assert ids.tolist() == sorted(ids.tolist())
    assert counts[ids.numpy()].min() >= np.delete(counts, ids.numpy()).max()
    assert (torch.arange(12) + offsets(ids)).tolist() == ids.tolist()
    assert membership(ids, 40).nonzero().flatten().tolist() == ids.tolist()


def test_the_identity_of_data_is_that_of_its_tokens() -> None:
    def of(tokens: list[int], dtype: str) -> str:
        return identity([Documents(np.array(tokens, dtype), np.ones(3, bool), np.array([0, 3]))])

    assert (
        of([1, 2, 3], "int32") == of([1, 2, 3], "int64") == of([1, 2, 3], "uint16") != of([1, 2, 4], "int32")
    )
