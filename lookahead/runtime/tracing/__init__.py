"""Tracing: passes on a CPU as TorchScript traces, recorded, replayed and compared. May import: runtime, models."""
