"""Training: what learns to draft, from data to checkpoint and evaluation; and memories, for which models write.

Here is what all drafters share; losses and recipes of a head are in its folder. Nothing here is needed to decode.
May import: strategies and everything below it.
"""
