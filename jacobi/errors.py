"""The one error family of the project."""


class LookaheadError(ValueError):
    """Input that cannot be decoded as asked.

    The message says what is wrong, what was expected against what was given, and what to do. It is raised before any
    forward pass where the mistake can be seen that early, and leaves the model unchanged.
    """
