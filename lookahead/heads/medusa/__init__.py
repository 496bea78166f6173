"""Medusa heads: modules that guess the tokens after the next one, the trees of their candidates, and checkpoints."""
