"""CUDA graphs: passes of fixed shape, captured once and replayed.

The executor, its static buffers and its captured graphs belong here.
May import: the rest of runtime, and models.
"""
