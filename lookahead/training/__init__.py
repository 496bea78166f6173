"""Training: Medusa heads from data to checkpoint, calibration and evaluation.

Nothing here is needed to decode.
May import: strategies and everything below it.
"""
