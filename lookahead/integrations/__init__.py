"""Doors of other projects: evaluation harnesses, inference engines, clusters.

One module a project, importable without it. May import: everything but the command line.
"""
