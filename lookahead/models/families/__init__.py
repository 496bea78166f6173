"""Families: models that count positions by themselves, and how each is told the positions of a tree.

One module for each kind of model; `registry` finds what a model needs.
Nothing here runs a forward pass.
"""
