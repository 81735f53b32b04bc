"""OpenTelemetry spans of the calls that generate, for ``--otlp-traces-endpoint``. Needs the extra ``otlp``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specserve.version import __version__


class Traces:
    """Send spans to the collector at ``endpoint``, from a thread of its own. OpenTelemetry's variables apply."""

    def __init__(self, endpoint: str) -> None:
        ours = Resource({"service.name": "specserve", "service.version": __version__})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("specserve", __version__)

    def record(
        self,
        headers: Iterable[tuple[bytes, bytes]],
        seconds: float,
        failed: bool,
        attributes: Mapping[str, Any],
    ) -> None:
        """Record a call that ended now after ``seconds``, as a child of the span that its headers name."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            attributes,
            start_time=end - int(seconds * 1e9),
        )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _exporter(endpoint: str) -> SpanExporter:
    """An address of HTTP has a path; one of gRPC has none, and maybe no scheme."""
    address = urlsplit(endpoint if "://" in endpoint else f"grpc://{endpoint}")
    if address.path.strip("/"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

    return Grpc(address.netloc, insecure=address.scheme != "https")
