"""KV cache: buffers that keep chosen slots, and snapshots of recurrent states. May import: models."""
