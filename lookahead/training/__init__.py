"""Training: what learns to draft, from data to checkpoint and evaluation.

Here is what all drafters share; each has a folder of its own losses and recipes. Nothing here is needed to decode.
May import: strategies and everything below it.
"""
