"""Models: what is known of transformers' models before any pass runs.

Class, config, code and the adapters of single families belong here; nothing here runs a forward pass.
May import: stats, loading, the helpers with an underscore, and jacobi.
"""
