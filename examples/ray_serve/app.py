"""The Ray Serve application: ``serve run examples.ray_serve.app:build replicas=2 gpus=1``. See docs/deployment.md."""

# No `from __future__ import annotations`: Serve reads the type of build's argument.
import shlex

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from examples.ray_serve.ingress import Ingress
from examples.ray_serve.replica import Replica
from examples.ray_serve.routing import PrefixRouter
from specserve.config import Settings


class Options(BaseModel):
    """The application's ``args``."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(2, ge=1)
    gpus: float = Field(1, ge=0, description="GPUs of a replica; 0 serves on the CPU")
    cpus: float = Field(1, ge=0, description="CPU cores of a replica, as Ray counts them")
    ingress: int = Field(1, ge=1, description="processes that take HTTP requests; they hold no model")
    arguments: str = Field("", description="of python -m specserve.launch, without those that are set here")
    max_body_bytes: int = Field(Settings().max_body_bytes, ge=1, description="of a request; more gets 413")
    loading_seconds: float = Field(1800, gt=0, description="that a server has until it is ready")
    drain_seconds: float = Field(70, gt=0, description="that a replica which is to stop has for its requests")


def build(options: Options) -> Application:
    replica = serve.deployment(
        Replica,
        num_replicas=options.replicas,
        ray_actor_options={"num_gpus": options.gpus, "num_cpus": options.cpus},
        max_ongoing_requests=4096,  # the server has a queue of its own, and answers 429
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=5,
    )
    ingress = serve.deployment(
        Ingress,
        num_replicas=options.ingress,
        ray_actor_options={"num_cpus": 0},  # it has little to do, and must find room next to replicas
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=options.drain_seconds,
    )
    arguments = [*shlex.split(options.arguments), "--max-body-bytes", str(options.max_body_bytes)]
    return ingress.bind(replica.bind(arguments, options.loading_seconds), options.max_body_bytes)
