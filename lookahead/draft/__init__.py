"""Draft: which tree a pass scores, and how large it is.

Acceptance estimates, best-first growth, the planner and the latency curve belong here.
May import: sources. It knows neither transformers nor how a pass is run.
"""
