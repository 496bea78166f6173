"""The OpenAI-compatible server: requests, one inference thread, streams, metrics, and the chat page.

What is drawn from a request never names a file or code. May import: everything but the command line and integrations.
"""
