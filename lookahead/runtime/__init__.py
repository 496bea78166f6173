"""Runtime: how a forward pass is run and what it leaves behind.

Masks, attention, the KV cache, executors (eager, traced, CUDA graphs) and scores belong here.
May import: models. It knows no drafts.
"""
