"""Checkpoints: Medusa heads in every published format, read and written as plain tensors, without their module."""
