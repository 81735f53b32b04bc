"""The product: draft, select, verify, accept, commit, as functions over device tensors."""
