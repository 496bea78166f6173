"""Verify: which drafted tokens are accepted, and which text is written.

Processors, sampling, stopping rules and lossy acceptance belong here.
May import: models. It knows no drafts.
"""
