"""A kind of heads in a folder of its own, as CONTRIBUTING tells it."""
