"""Verify: which drafted tokens are accepted, and which text is written. Here are processors, sampling, stopping rules
and lossy acceptance. May import: runtime, models. It knows no drafts."""
