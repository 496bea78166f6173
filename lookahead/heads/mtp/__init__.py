"""Multi-token prediction: the layers that some models are trained with, read from their checkpoints run as heads."""
