"""The speculative step: draft, select, verify, accept and commit, as functions over device tensors."""
