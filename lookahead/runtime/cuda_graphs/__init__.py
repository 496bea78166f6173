"""CUDA graphs: passes of fixed shape, captured once and replayed. May import: runtime, models."""
