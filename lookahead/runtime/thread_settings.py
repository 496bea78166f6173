"""Settings of one thread's passes, which hold while a block runs."""

import threading
from typing import Any


class During:
    """Gives this thread's ``settings`` other values while the block runs; afterwards they are what they were. Those
    that no block has set are the defaults of their class. A class, because several are entered in every pass."""

    __slots__ = ("_before", "_settings", "_values")

    def __init__(self, settings: threading.local, **values: Any) -> None:
        self._settings, self._values = settings, values

    def __enter__(self) -> None:
        own = vars(self._settings)
        self._before = {name: own[name] for name in self._values if name in own}
        own.update(self._values)

    def __exit__(self, *_: object) -> None:
        own = vars(self._settings)
        for name in self._values:
            del own[name]
        own.update(self._before)
