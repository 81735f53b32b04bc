"""A tokenizer loaded without PyTorch equals the one that Transformers loads with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from specserve.frontend.tokenizer import Tokenizer, byte_alphabet
from tests.front.processes import ROOT, running

TEXTS = [
    "Hello world",
    " two  spaces\n\n x",
    "naïve 日本語 🎉",
    "<s>a</s> [INST]b<|end|>",
    "x = 1234567\n",
    "don't I'll",
]
CHAT: list[Any] = [
    {"role": "system", "content": "be kind "},
    {"role": "user", "content": "1 < 2? ü"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
]
TEMPLATE = (
    "{{ bos_token }}{%- for m in messages %}\n"
    "  {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "{{ m.role }} {{ m | tojson }}{{ m | tojson(indent=1) }} {{ strftime_now('%Y') }}\n"
    "{%- if loop.last %}{% continue %}{% endif %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
BOTH = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", **BOTH}
LLAMA_3 = {"tokenizer_class": "PreTrainedTokenizerFast", **BOTH}
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "chat_template": TEMPLATE}


def pieces(first: bool = True) -> Backend:
    """Llama 2's kind."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"Helowrdax12=",
        "▁H",
        "el",
    ]
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [("▁", "H"), ("e", "l")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [AddedToken(word, special=True, normalized=False) for word in ("<unk>", "<s>", "</s>")]
    return added(backend, special, first)


def letters(first: bool = True) -> Backend:
    """Llama 3's and Qwen's kind."""
    vocabulary = {char: byte[0] for char, byte in byte_alphabet().items()}
    vocabulary["el"] = 256
    backend = Backend(models.BPE(vocabulary, [("e", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(word, special=True) for word in ("<s>", "</s>", "<|end|>")]
    return added(backend, [*special, AddedToken("[INST]", lstrip=True)], first)


def added(backend: Backend, tokens: list[AddedToken], first: bool) -> Backend:
    """With tokens, and ``first`` the first of them put in front of each text."""
    backend.add_tokens(tokens)
    if first:
        begin = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return backend


CASES: dict[str, tuple[Backend, dict[str, Any], dict[str, Any]]] = {
    "llama": (pieces(), LLAMA, {"model_type": "llama"}),
    "llama, no bos": (pieces(False), {**LLAMA, "add_bos_token": False}, {"model_type": "llama"}),
    "llama, bos and eos": (
        pieces(False),
        {**LLAMA, "add_bos_token": True, "add_eos_token": True},
        {"model_type": "llama"},
    ),
    "llama of old": (pieces(), {**LLAMA, "legacy": True}, {"model_type": "llama"}),
    "mistral": (pieces(), {**LLAMA, "add_bos_token": True}, {"model_type": "mistral"}),
    "llama 3": (letters(), LLAMA_3, {"model_type": "llama", "torch_dtype": "bfloat16"}),
    "llama 3, any dtype": (letters(), LLAMA_3, {"model_type": "llama", "torch_dtype": "auto"}),
    "mimo, any dtype": (letters(), QWEN, {"model_type": "mimo", "dtype": "auto"}),
    "llama 3, eos": (letters(False), {**LLAMA_3, "add_eos_token": True}, {"model_type": "llama"}),
    "qwen 2": (letters(), QWEN, {"model_type": "qwen2"}),
    "qwen 3": (letters(False), {**QWEN, "add_bos_token": False, "bos_token": None}, {"model_type": "qwen3"}),
    "mimo": (letters(), QWEN, {"model_type": "mimo"}),
    "no model": (letters(), LLAMA_3, {}),
}


UNKNOWN_TYPE = "to instantiate a model of type"


def answers(path: Path) -> dict[str, Any]:
    tokenizer = Tokenizer.load(str(path))
    ids = [tokenizer.encode(text) for text in TEXTS]
    return {
        "prompts": ids,
        "answers": [tokenizer.encode_answer(text) for text in TEXTS],
        "texts": [tokenizer.decode(found, skip) for found in ids for skip in (False, True)],
        "bytes": [tokenizer.token_bytes(token).hex() for token in range(270)],
        "special": [token for token in range(270) if tokenizer.is_special(token)],
        "chat": tokenizer.encode_chat(CHAT),
    }


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    found = {"bundled": ROOT / "specserve" / "bundled" / "chat"}
    for name, (backend, tokenizer, model) in CASES.items():
        found[name] = path = tmp_path_factory.mktemp("tokenizer")
        backend.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        if model:
            (path / "config.json").write_text(json.dumps(model))
    return found


@pytest.fixture(scope="module")
def alone(paths: Mapping[str, Path]) -> Mapping[str, Any]:
    """What a process without PyTorch makes of each."""
    code = (
        "import json, sys; from pathlib import Path; from specserve.frontend.tokenizer import hide_torch; hide_torch();"
        "from tests.front.test_tokenizer_load import answers;"
        "print(json.dumps([answers(Path(path)) for path in sys.argv[1:]]));"
        "assert 'transformers.models.llama.configuration_llama' not in sys.modules, 'it imports PyTorch where it can'"
    )
    command = [sys.executable, "-c", code, *map(str, paths.values())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "PyTorch was not found" not in done.stderr
    assert UNKNOWN_TYPE not in done.stderr
    return dict(zip(paths, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", ["bundled", *CASES])
def test_a_tokenizer_needs_no_torch(name: str, paths: Mapping[str, Path], alone: Mapping[str, Any]) -> None:
    from transformers.utils import is_torch_available

    assert is_torch_available(), "this process has it"
    assert alone[name] == answers(paths[name])


def test_what_is_compared_differs(alone: Mapping[str, Any]) -> None:
    """By first tokens, and by the class that reads the same file."""
    assert alone["llama"]["prompts"][0] == [1, *alone["llama, no bos"]["prompts"][0]]
    assert alone["llama"]["chat"] != alone["llama of old"]["chat"]


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "CohereTokenizerFast"])
def test_a_class_does_not_replace_what_the_file_says(name: str, tmp_path: Path) -> None:
    """As SmolLM2's, EXAONE 4's and StarCoder 2's, which splits numbers into digits."""
    backend = letters(False)
    backend.model = models.BPE({**backend.get_vocab(with_added_tokens=False), "12": 257}, [("1", "2")])
    backend.normalizer = normalizers.NFKC()
    digits = pre_tokenizers.Digits(individual_digits=True)
    for split in ([digits], []):
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [*split, pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        config = {"model_type": "llama", "max_position_embeddings": 64, "rope_scaling": rope}
        (tmp_path / "config.json").write_text(json.dumps(config))
        text = "a 1212 \u2160"
        found = Tokenizer.load(str(tmp_path)).encode_answer(text)
        assert found == backend.encode(text, add_special_tokens=False).ids


def test_other_warnings_of_transformers_stay(paths: Mapping[str, Path], tmp_path: Path) -> None:
    """A type that it does not know, with a class that does not fit the ``tokenizer.json``."""
    model = tmp_path / "model"
    shutil.copytree(paths["mimo"], model)
    (model / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    names = "load_tokenizer, hide_torch; hide_torch()"  # as in a server
    code = f"import sys; from specserve.frontend.tokenizer import {names}; load_tokenizer(sys.argv[1])"
    command = [sys.executable, "-c", code, str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert UNKNOWN_TYPE not in done.stderr
    assert "`tokenizer.json` is ByteLevel" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_code_that_comes_with_a_model_may_use_torch(paths: Mapping[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(paths["no model"], model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": "Own"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(
        "import torch\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast):\n    what = torch.ones(1)\n"
    )
    with running("build_echo", model, "--trust-remote-code") as server:
        server.wait_ready()
        assert "libtorch" in server.mapped()


def test_a_broken_config_is_not_called_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=rf"^It looks like the config file at '{tmp_path}/config.json'"):
        Tokenizer.load(str(tmp_path))
