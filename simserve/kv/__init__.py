"""The KV cache: blocks, their identities, tables and eviction, and how many of them a GPU holds."""
