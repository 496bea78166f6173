"""Medusa heads: modules that guess the tokens after the next one, and the trees of their candidates.

Heads, choices, accuracies and checkpoints belong here.
May import: models and runtime.
"""
