"""Several processes that decode one text: tensor parallelism, and trees split over replicas.

It wraps the solver's model, drafters and verifier, and knows torch.distributed. May import: verify and below.
"""
