from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from starlette.testclient import TestClient

from specserve.server.app import create_app
from tests.front.fake_engine import FakeEngine, text_reply
from tests.front.fakes import byte_tokenizer, fake_front

if TYPE_CHECKING:
    from tests.front.live import Live
    from tests.front.walker import Walker

Serve = Callable[..., tuple[TestClient, FakeEngine]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves a fake engine that answers with a text: ``client, engine = serve("text", **settings)``."""
    opened = []

    def start(
        text: str = "Hi there!",
        stride: int = 3,
        end: bool = True,
        request_defaults: dict[str, float] | None = None,
        **settings: Any,
    ) -> Any:
        engine = FakeEngine(text_reply(text, end), stride)
        if request_defaults is not None:
            engine.info = msgspec.structs.replace(engine.info, request_defaults=request_defaults)
        front = fake_front(engine, **settings)
        client = TestClient(create_app(front), raise_server_exceptions=False)
        client.__enter__()
        opened.append((client, front))
        return client, engine

    yield start
    for client, front in opened:
        client.__exit__(None, None, None)
        front.close()


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """Anthropic's client. Its import takes two seconds, which collecting tests must not."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """The bundled model."""
    from tests.front.live import live

    with live(["--device", "cpu", "--dtype", "float32", "--speculative-algorithm", "EAGLE3"], {}) as found:
        yield found


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["tokens", "texts"])
def walker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Walker:
    """Marks are tokens of their own, or none is."""
    from tests.front.walker import TOKENS, Walker

    return Walker(tmp_path_factory.mktemp("tokenizer"), TOKENS if request.param == "tokens" else ())
