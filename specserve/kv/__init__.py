"""The paged KV cache: storage, page ownership, and the radix tree that shares prefixes."""
