"""Models: what is known of transformers' models before any pass runs.

Class, config, code and the adapters of single families belong here; nothing here runs a forward pass.
May import: the modules beside the rooms, and jacobi.
"""
