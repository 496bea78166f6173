"""Strategies: frozen settings that say how a draft is grown.

What a user passes as `lookahead_strategy=` or `custom_generate=` belongs here, validated when it is made.
May import: generation and everything below it.
"""
