"""Checkpoints: Medusa heads in every published format, read and written.

Formats by tensor names, files and shards belong here.
Nothing here runs a forward pass.
"""
