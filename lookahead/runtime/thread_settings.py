"""Settings of one thread's passes, which hold while a block runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def during(settings: threading.local, **values: Any) -> Iterator[None]:
    """Give this thread's ``settings`` other values while the block runs; afterwards they are what they were. Those
    that no block has set are the defaults of their class."""
    own = vars(settings)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)
