"""Triton kernels of the real executor: one module a kernel, each beside its plain torch reference.

What belongs here are the GPU functions that serve a step plan: writing keys and values into paged
blocks, attention over block tables, norms, rotary embedding and sampling. They take tensors and
numbers, know nothing of requests or schedulers, and never import simserve. Importing this package
itself needs neither torch nor triton; its modules do.
"""
