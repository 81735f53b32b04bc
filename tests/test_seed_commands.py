"""Commands that people run with SGLang, verbatim except for ``specserve.launch``.

Small models of the same architectures are in the hub's cache under the names in the commands.
"""

from __future__ import annotations

import json
import shlex
import socket
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from huggingface_hub import constants

from specserve.config import load_settings
from specserve.config.speculation import SHAPE
from specserve.process.assemble import resolve_engine
from tests.front.fake_engine import VOCAB
from tests.front.fakes import byte_tokenizer
from tests.front.live import live
from tests.front.test_process import Server, wait
from tests.hub_cache import cache_repository
from tests.reference.draft_models import make_eagle, make_eagle3
from tests.reference.models import make_llama, make_mimo

TARGETS = [
    "meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-70b-chat-hf", "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Meta-Llama-3-8B-Instruct",
]  # fmt: skip
EAGLES = [
    "lmsys/sglang-EAGLE-llama2-chat-7B", "lmsys/sglang-EAGLE-llama2-chat-70B",
    "lmsys/sglang-EAGLE-LLaMA3-Instruct-8B", "lmzheng/sglang-EAGLE-LLaMA3-Instruct-8B",
]  # fmt: skip
EAGLE3 = "jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B"
MAP, MIMO = "thunlp/LLaMA3-Instruct-8B-FR-Spec", "XiaomiMiMo/MiMo-7B-RL"
QUESTION = [{"role": "user", "content": "List 3 countries and their capitals."}]

LLAMA70 = (
    "--model-path meta-llama/Llama-2-70b-chat-hf "
    "--speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-70B"
)


@dataclass(frozen=True)
class Command:
    """``model``: the client's name for it; ``shape``: the expected speculation; ``notes``: words of expected notes.
    ``unused``: flags of which a warning says that they have no effect on a CPU with ``--max-total-tokens``."""

    line: str
    model: str
    shape: tuple[int, int, int]
    notes: tuple[str, ...] = ()
    dtype: str = "float32"
    unused: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.line)


COMMANDS = {
    "000 token map": Command(
        """--model-path "meta-llama/Llama-3.1-8B-Instruct" --speculative-algorithm "EAGLE" \
        --speculative-draft-model-path "lmzheng/sglang-EAGLE-LLaMA3-Instruct-8B" --speculative-num-steps 3 \
        --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8 --dtype "bfloat16" \
        --speculative-token-map {hot_token_ids.pt}""",
        "meta-llama/Llama-3.1-8B-Instruct",
        (3, 4, 16),
        dtype="bfloat16",
        unused=("--cuda-graph-max-bs",),
    ),
    "001 eagle 2 4 4": Command(
        f"{LLAMA70} --speculative-algorithm EAGLE --speculative-num-steps 2 --speculative-eagle-topk 4 "
        "--speculative-num-draft-tokens 4",
        "meta-llama/Llama-2-70b-chat-hf",
        (2, 4, 4),
    ),
    "001 eagle 1 2 2": Command(
        f"{LLAMA70} --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 2 "
        "--speculative-num-draft-tokens 2",
        "meta-llama/Llama-2-70b-chat-hf",
        (1, 2, 2),
    ),
    "001 eagle 1 1 2": Command(
        f"{LLAMA70} --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 2 --tp 1",
        "meta-llama/Llama-2-70b-chat-hf",
        (1, 1, 2),
    ),
    "001 naive": Command(
        f"{LLAMA70} --speculative-algorithm NAIVE_EAGLE --disable-cuda-graph",
        "meta-llama/Llama-2-70b-chat-hf",
        (1, 1, 2),
    ),
    "001 naive all greedy": Command(
        f"{LLAMA70} --speculative-algorithm NAIVE_EAGLE --requests-all-greedy",
        "meta-llama/Llama-2-70b-chat-hf",
        (1, 1, 2),
    ),
    "003 eagle-2": Command(
        """--model meta-llama/Llama-2-7b-chat-hf  --speculative-algorithm EAGLE \
    --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 3 \
    --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --cuda-graph-max-bs 8 --log-level warning""",
        "meta-llama/Llama-2-7b-chat-hf",
        (3, 4, 16),
        unused=("--cuda-graph-max-bs",),
    ),
    "003 torch.compile": Command(
        """--model meta-llama/Llama-2-7b-chat-hf  --speculative-algorithm EAGLE \
    --speculative-draft-model-path lmsys/sglang-EAGLE-llama2-chat-7B --speculative-num-steps 5 \
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.6 \
            --enable-torch-compile --torch-compile-max-bs 2 --log-level warning""",
        "meta-llama/Llama-2-7b-chat-hf",
        (5, 8, 64),
        unused=("--mem-fraction-static", "--enable-torch-compile, --torch-compile-max-bs"),
    ),
    "003 token map": Command(
        """--model meta-llama/Meta-Llama-3-8B-Instruct --speculative-algorithm EAGLE \
    --speculative-draft-model-path lmsys/sglang-EAGLE-LLaMA3-Instruct-8B --speculative-num-steps 5 \
    --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 \
    --speculative-token-map thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt \
    --mem-fraction 0.7 --cuda-graph-max-bs 2 --dtype float16  --log-level warning""",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        (5, 8, 64),
        ("the hub's thunlp/LLaMA3-Instruct-8B-FR-Spec",),
        "float16",
        ("--mem-fraction-static", "--cuda-graph-max-bs"),
    ),
    "003 eagle-3": Command(
        """--model meta-llama/Llama-3.1-8B-Instruct  --speculative-algorithm EAGLE3 \
    --speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B --speculative-num-steps 5 \
        --speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction 0.6 \
        --cuda-graph-max-bs 2 --dtype float16 --log-level warning""",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        (5, 8, 32),
        dtype="float16",
        unused=("--mem-fraction-static", "--cuda-graph-max-bs"),
    ),
    "003 mtp": Command(
        """--model-path XiaomiMiMo/MiMo-7B-RL --host 0.0.0.0 --trust-remote-code \
    --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 \
    --speculative-num-draft-tokens 2 --mem-fraction 0.5 --log-level warning""",
        "XiaomiMiMo/MiMo-7B-RL",
        (1, 1, 2),
        ("the model's checkpoint has a draft head",),
        unused=("--mem-fraction-static",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with a small stand-in under every name; all Llamas are one, and so are all heads of a kind."""
    path = tmp_path_factory.mktemp("seeds")
    llama = make_llama(path / "llama", vocab=VOCAB, eos=256, branch_scale=0.04)
    mimo = make_mimo(path / "mimo", vocab=VOCAB, eos=256, branch_scale=0.04)
    for target in (llama, mimo):
        byte_tokenizer().save_pretrained(target)
    eagle, eagle3 = (
        make_eagle(path / "eagle", llama, agree=True),
        make_eagle3(path / "eagle3", llama, agree=True),
    )
    (path / "map").mkdir()
    torch.save(list(range(0, VOCAB, 2)), path / "map" / "freq_32768.pt")
    sources = {**dict.fromkeys(TARGETS, llama), **dict.fromkeys(EAGLES, eagle), EAGLE3: eagle3, MIMO: mimo}
    for name, source in {**sources, MAP: path / "map"}.items():
        cache_repository(path / "cache", name, source)
    return path / "cache"


@pytest.fixture
def environ(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return {"SPECSERVE_DOWNLOAD_DIR": str(cache)}


@pytest.fixture(scope="module")
def hot_token_ids(cache: Path) -> Path:
    return next(cache.rglob("freq_32768.pt"))


def ask(url: str, model: str, **fields: object) -> openai.types.chat.ChatCompletion:
    """The client of the page, word for word but for ``fields`` and the number of tokens."""
    with openai.Client(base_url=f"{url}/v1", api_key="None", max_retries=0) as client:
        given = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
        found = client.chat.completions.create(**given)  # type: ignore[call-overload]
    assert isinstance(found, openai.types.chat.ChatCompletion)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_command(name: str, environ: Mapping[str, str], hot_token_ids: Path) -> None:
    command = COMMANDS[name]
    argv = [str(hot_token_ids) if word == "{hot_token_ids.pt}" else word for word in command.argv]
    with live(argv, environ) as server:
        settings = server.built.settings
        assert tuple(getattr(settings, name) for name in SHAPE) == command.shape
        assert settings.dtype == command.dtype
        for words in command.notes:
            assert server.noted(words), (words, server.built.notes)
        assert unused(server.warnings) == list(command.unused)
        found = ask(server.url, command.model, extra_body={"return_speculation": True})
        plain = ask(server.url, command.model, extra_body={"speculation": {"enabled": False}})
    assert found.usage is not None
    usage = found.usage.speculation  # type: ignore[attr-defined]
    assert found.usage.completion_tokens == 24
    assert usage["drafted"] > 0
    if command.dtype == "float32":
        assert found.choices[0].message.content == plain.choices[0].message.content


def test_sampled_requests_are_refused_when_all_are_greedy(environ: Mapping[str, str]) -> None:
    with live(COMMANDS["001 naive all greedy"].argv, environ) as server:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            ask(server.url, TARGETS[1], temperature=0.7)
        assert ask(server.url, TARGETS[1], temperature=openai.omit, max_tokens=4).choices


def test_ranks_that_do_not_divide_the_heads_are_refused(cache: Path) -> None:
    given = load_settings([*COMMANDS["001 naive"].argv, "--tp", "3", "--download-dir", str(cache)], {})
    with pytest.raises(
        ValueError, match="--tensor-parallel-size: num_attention_heads must be a multiple of it"
    ):
        resolve_engine(given)


@pytest.fixture
def process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    port = free_port()
    more = ["--port", str(port), "--download-dir", str(cache)]
    server = Server(["-m", "specserve.launch", *COMMANDS["003 eagle-3"].argv, *more])
    server.url = f"http://127.0.0.1:{port}"
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def test_command_as_a_process(process: Server) -> None:
    """A command of the page with the page's waiting and its clients: openai's, and a plain POST."""
    command, server = COMMANDS["003 eagle-3"], process
    wait(lambda: server.process.poll() is not None or is_healthy(server), 60)
    assert server.process.poll() is None, server.lines
    assert ask(server.url, command.model).choices[0].message.content
    choices = json.loads(server.get("/server_info")[1])["choices"]
    assert f"the hub's {command.argv[1]}" in choices[0], "notes made before the processes part are kept"
    question = {"role": "user", "content": "What is the capital of France?"}
    data = json.dumps({"model": command.model, "messages": [question], "max_tokens": 20}).encode()
    request = urllib.request.Request(
        f"{server.url.replace('127.0.0.1', 'localhost')}/v1/chat/completions",
        data,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert json.load(response)["choices"][0]["finish_reason"] in ("length", "stop")
    without_effect = [flag for flag in command.unused if flag != "--mem-fraction-static"]  # it sizes the pool
    assert unused(server.lines) == without_effect
    assert len(server.lines) == len(without_effect), "--log-level warning"


def unused(lines: Sequence[str]) -> list[str]:
    """Return the flags of which the lines say that they have no effect."""
    said = (line.partition(" has no effect") for line in lines)
    return [before[before.index("--") :] for before, words, _ in said if words]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def is_healthy(server: Server) -> bool:
    try:
        return server.get("/health")[0] == 200
    except OSError:
        return False
