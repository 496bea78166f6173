"""Training Medusa's heads: their losses, from data to checkpoint, calibration and evaluation."""
