"""A tokenizer without files, and a front whose engine has no process."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from specserve.config import Settings
from specserve.frontend.tokenizer import Tokenizer, byte_alphabet
from specserve.messages import Abort, Flush, Flushed, Ready, ToEngine
from specserve.process.client import EngineClient
from specserve.server.front import Front
from tests.front.fake_engine import CONTEXT, FakeEngine

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' and m.content == 'boom' %}"
    "{{ raise_exception('no boom') }}{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Token b is byte b; 256 ends, 257 is special, 258 is the word ' hello', 259 has no text of its own."""
    vocabulary = {char: byte[0] for char, byte in byte_alphabet().items()}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<sep>", special=True)])
    backend.add_tokens([AddedToken(" hello")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=template)


def ready(engine: FakeEngine, settings: Settings) -> Ready:
    values = {name: getattr(settings, name) for name in settings.public()}
    if settings.requests_all_greedy and not engine.info.request_defaults:
        engine.info = msgspec.structs.replace(engine.info, request_defaults={"temperature": 0})
    return Ready(
        engine.info,
        {**values, "context_length": CONTEXT, "served_model_name": ["tiny"]},
        ["page_size = 16: because"],
    )


READY = ready(FakeEngine(lambda _: []), Settings(served_model_name=("tiny",)))


def fake_front(engine: FakeEngine, template: str | None = TEMPLATE, **settings: Any) -> Front:
    """A front whose engine runs on the same event loop."""
    given = Settings(served_model_name=("tiny",), **settings)

    def send(message: ToEngine) -> None:
        if isinstance(message, Abort):
            engine.abort(message.rid)
        elif isinstance(message, Flush):
            client.receive(Flushed(engine.flush_cache()))
        else:
            engine.submit(message)
            asyncio.get_running_loop().call_soon(tick)

    def tick() -> None:
        for message in engine.run_once():
            client.receive(message)
        if engine.has_work:
            asyncio.get_running_loop().call_later(0.001, tick)

    client = EngineClient(send)
    front = Front(given, client)
    client.receive(ready(engine, given))
    front.finish_loading(None if given.skip_tokenizer_init else Tokenizer(byte_tokenizer(template)))
    return front
