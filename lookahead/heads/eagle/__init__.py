"""EAGLE's heads (arXiv 2401.15077, 2406.16858, 2503.01840): a decoder layer that drafts from the model's features."""
