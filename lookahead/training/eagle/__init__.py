"""Training EAGLE heads: what they are fresh, the unrolled pass, their losses, from data to checkpoint."""
