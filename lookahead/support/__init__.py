"""Support: may we decode this model, and by which route?

Refusals, routes and the self-test belong here; each error names the culprit and the way out.
May import: runtime and models.
"""
