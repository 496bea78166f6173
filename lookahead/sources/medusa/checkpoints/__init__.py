"""Checkpoints: Medusa heads in every published format, read and written as plain tensors.

Formats by tensor names, files, shards and downloads belong here; the heads' module does not: it reads and writes
itself with these functions. Nothing here runs a forward pass.
"""
