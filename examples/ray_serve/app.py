"""The Ray Serve application: ``serve run examples.ray_serve.app:build replicas=2 gpus=1``. See docs/deployment.md."""

# No `from __future__ import annotations`: Serve reads the type of build's argument.
import shlex
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from examples.ray_serve.ingress import Ingress
from examples.ray_serve.replica import Replica
from examples.ray_serve.routing import PrefixRouter
from examples.ray_serve.scaling import Scaling
from specserve.config import Settings


class Options(BaseModel):
    """The application's ``args``."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(2, ge=1)
    most_replicas: int | None = Field(
        None, ge=1, description="that load may raise the number to; None: it is fixed"
    )
    requests: float = Field(32, gt=0, description="of a replica, from which on there should be more replicas")
    first_token_seconds: float = Field(
        2, gt=0, description="mean time to it, from which on there should be more"
    )
    gpus: float = Field(1, ge=0, description="GPUs of a replica, a rank on each; 0 serves on the CPU")
    cpus: float = Field(1, gt=0, description="CPU cores of a replica, as Ray counts them")
    ingress: int = Field(1, ge=1, description="processes that take HTTP requests; they hold no model")
    arguments: str = Field("", description="of python -m specserve.launch, without those that are set here")
    max_body_bytes: int = Field(Settings().max_body_bytes, ge=1, description="of a request; more gets 413")
    loading_seconds: float = Field(1800, gt=0, description="that a server has until it is ready")
    drain_seconds: float = Field(70, gt=0, description="that a replica which is to stop has for its requests")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus above 1 must be a whole number, found {self.gpus:g}")
        if self.most_replicas is not None and self.most_replicas < self.replicas:
            raise ValueError(f"most_replicas must be at least {self.replicas}, found {self.most_replicas}")
        return self


def build(options: Options) -> Application:
    needs = {"CPU": options.cpus, "GPU": options.gpus}  # a bundle, so all on one machine
    replica = serve.deployment(
        Replica,
        **_number(options),
        ray_actor_options={"num_gpus": options.gpus, "num_cpus": options.cpus},
        placement_group_bundles=[{name: count for name, count in needs.items() if count}],
        placement_group_strategy="STRICT_PACK",
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
    if options.gpus > 1:
        arguments = ["--tensor-parallel-size", str(int(options.gpus)), *arguments]  # the last counts
    return ingress.bind(replica.bind(arguments, options.loading_seconds), options.max_body_bytes)


def _number(options: Options) -> dict[str, Any]:
    """The fixed number of replicas, or what decides about it."""
    if options.most_replicas is None:
        return {"num_replicas": options.replicas}
    limits = {"requests": options.requests, "first_token_seconds": options.first_token_seconds}
    policy = AutoscalingPolicy(policy_function=Scaling, policy_kwargs=limits)
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=options.replicas, max_replicas=options.most_replicas, policy=policy
        )
    }
