"""Spans of calls, as a collector receives them over HTTP and gRPC."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from specserve.config import Settings
from tests.front.conftest import Serve
from tests.front.fake_engine import FakeEngine, text_reply
from tests.front.fakes import fake_front

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "xyzzyplugh"


@contextmanager
def over_http(received: list[bytes]) -> Iterator[str]:
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()
        thread.join()


@contextmanager
def over_grpc(received: list[bytes]) -> Iterator[str]:
    import grpc

    def export(request: bytes, context: Any) -> bytes:
        received.append(request)
        return b""

    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    handler = grpc.method_handlers_generic_handler(
        service, {"Export": grpc.unary_unary_rpc_method_handler(export)}
    )
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def spans_of(received: list[bytes]) -> list[tuple[Any, dict[str, Any]]]:
    """The spans, and the attributes of each."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = []
    for body in received:
        (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        assert values(resource.resource)["service.name"] == "specserve"
        found += [(span, values(span)) for scope in resource.scope_spans for span in scope.spans]
    return found


def values(part: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in part.attributes}


@pytest.mark.parametrize("collector", [over_http, over_grpc])
def test_a_span_for_each_call(serve: Serve, collector: Any) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    received: list[bytes] = []
    with collector(received) as endpoint:
        client, _ = serve("abcdefg", otlp_traces_endpoint=endpoint)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "temperature": 0.5}
        assert (
            client.post(
                "/v1/chat/completions", json=chat, headers={"traceparent": PARENT, "x-request-id": "mine"}
            ).status_code
            == 200
        )
        text = {
            "model": "tiny",
            "prompt": [SECRET, "b"],
            "n": 2,
            "max_tokens": 3,
            "stream": True,
            "request_id": "r",
        }
        assert client.post("/v1/completions", json=text).status_code == 200
        assert client.post("/v1/completions", json={}).status_code == 400
        assert client.post("/v1/completions", json={**text, "seed": 14, "stream": False}).status_code == 500
        assert client.get("/v1/models").status_code == 200
        client.app.state.front.close()  # type: ignore[attr-defined]
    assert SECRET.encode() not in b"".join(received)
    (chat_span, first), (text_span, second), (failed, third) = spans_of(received)
    trace, parent = (bytes.fromhex(part) for part in PARENT.split("-")[1:3])
    assert (chat_span.name, chat_span.trace_id, chat_span.parent_span_id) == ("llm_request", trace, parent)
    assert chat_span.kind == chat_span.SPAN_KIND_SERVER
    assert (text_span.parent_span_id, text_span.status.code) == (b"", text_span.status.STATUS_CODE_UNSET)
    assert failed.status.code == failed.status.STATUS_CODE_ERROR
    assert first["gen_ai.request.temperature"] == 0.5
    assert [each["http.response.status_code"] for each in (first, second, third)] == [200, 200, 500]
    assert first["http.request.header.x-request-id"].values[0].string_value == "mine"
    assert second["gen_ai.request.id"].startswith("cmpl-r")
    expected = {"request.model": "tiny", "request.n": 2, "request.max_tokens": 3, "request.top_p": 1.0,
                "usage.prompt_tokens": len(SECRET) + 1, "usage.completion_tokens": 12,
                "usage.input_tokens": len(SECRET) + 1, "usage.output_tokens": 12}  # fmt: skip
    assert {name: second[f"gen_ai.{name}"] for name in expected} == expected
    latency = {
        name.removeprefix("gen_ai.latency."): value for name, value in first.items() if "latency" in name
    }
    assert 0 < latency["time_to_first_token"] <= latency["e2e"]
    assert latency["e2e"] <= (chat_span.end_time_unix_nano - chat_span.start_time_unix_nano) / 1e9
    parts = (latency[f"time_in_{name}"] for name in ("queue", "model_prefill", "model_decode"))
    assert sum(parts) == pytest.approx(latency["e2e"])
    assert not any("latency" in name for name in third)


def test_the_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "specserve.metrics.traces", raising=False)
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint needs .*specserve\[otlp\]"):
        fake_front(FakeEngine(text_reply("a", True), 1), otlp_traces_endpoint="grpc://127.0.0.1:4317")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "grpc://", "grpc://a:1/b", "http:///v1/traces", "ftp://a:1"]
)
def test_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="--otlp-traces-endpoint: must be like grpc://HOST:4317"):
        Settings(otlp_traces_endpoint=address)
