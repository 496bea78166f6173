"""Tracing: passes on a CPU as TorchScript traces.

Recording a trace, replaying it and comparing it with the model belong here.
May import: the rest of runtime, and models.
"""
