"""Heads: what was trained to draft for a model, a folder a kind.

A folder holds a kind's network, files, source, strategy and training; `base`, `pairs` and `storage` are what kinds
share. None knows another.
May import: training, strategies and everything below them.
"""
