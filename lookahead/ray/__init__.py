"""Replicas on Ray: the server's application on Ray Serve, and batches on Ray Data, on one machine or a cluster.

A front takes requests and gives each to a replica; what has not begun to stream survives the replica's death.
May import: everything but the command line and integrations. Ray itself is imported when it is used.
"""

from lookahead.ray.front import Front as Front
from lookahead.ray.replicas import answered as answered
from lookahead.ray.replicas import bound as bound
from lookahead.ray.replicas import started as started
