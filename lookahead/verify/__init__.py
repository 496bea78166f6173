"""Verify: which drafted tokens are accepted, and which text is written.

Processors, sampling, stopping rules and lossy acceptance belong here.
May import: runtime and models. It knows no drafts.
"""
