"""KV cache: the buffer that keeps chosen slots, and snapshots of recurrent states.

Everything that writes to or reads from keys and values of past tokens belongs here.
May import: models.
"""
