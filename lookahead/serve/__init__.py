"""The OpenAI-compatible server: requests, one inference thread, streams, metrics, and the chat page.

A request names no file and brings no code. :func:`application` makes the ASGI application.
May import: everything but the command line and integrations.
"""

from lookahead.serve.app import application as application
from lookahead.serve.plans import Limits as Limits
