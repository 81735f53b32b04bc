"""Admission, chunked prefill, the loop, preemption."""


def create_scheduler(settings, model_config):
    from specserve.engine.build import create_scheduler as create

    return create(settings, model_config)
