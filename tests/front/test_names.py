"""The names under which a model is served."""

from __future__ import annotations

import pytest

from specserve.server.front import is_served
from tests.front.conftest import Serve

CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("names", "asked", "served"),
    [
        (("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"), "meta-llama/Meta-Llama-3.1-8B-Instruct", True),
        (("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"), "Meta-Llama-3.1-8B-Instruct", True),
        (("Meta-Llama-3-8B-Instruct",), "meta-llama/Llama-3-8B-Instruct", True),
        (("Meta-Llama-3-8B-Instruct",), "meta-llama-3-8b-instruct", True),
        (("Llama-3.1-8B-Instruct",), "meta-llama/Llama-3.1-8B", False),
        (("Llama-3.1-8B-Instruct",), "Llama-3.1-70B-Instruct", False),
        (("a", "b"), "b", True),
        (("a", "b"), "org/B", True),
        (("a", "b"), "c", False),
        (("a",), "", False),
        (("meta-a",), "org/", False),
    ],
)  # fmt: skip
def test_rule(names: tuple[str, ...], asked: str, served: bool) -> None:
    assert is_served(asked, names) == served


def test_requests(serve: Serve) -> None:
    client, _ = serve()
    for name in ("tiny", "org/tiny", "Meta-Tiny"):
        answer = client.post("/v1/chat/completions", json={"model": name, "messages": CHAT})
        assert answer.status_code == 200
        assert answer.json()["model"] == name
    error = client.post("/v1/completions", json={"model": "org/large", "prompt": "a"})
    assert error.status_code == 404
    assert error.json()["error"] == {
        "message": "this server has no model 'org/large'; it serves tiny",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert client.get("/v1/models/org/large").json() == error.json()
