"""The real executor: the plan's model, KV cache and batch in torch, on a GPU or a CPU."""
