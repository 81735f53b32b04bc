"""Admission, chunked prefill, the loop, preemption."""
