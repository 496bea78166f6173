"""Runtime: how a forward pass is run and what it leaves behind.

Masks, attention, the KV cache, executors (eager, traced, CUDA graphs) and scores. May import: models; knows no drafts.
"""
