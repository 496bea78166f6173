"""Training ReDrafter's heads: what they are fresh, their losses, from data to checkpoint."""
