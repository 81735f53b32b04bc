"""The scheduler: admission, chunked prefill, the main loop, preemption."""
