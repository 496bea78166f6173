"""Calls in several threads."""

import threading
from collections.abc import Callable
from typing import Any


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls in threads that start at the same time; what each returns or raises."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def work(index: int) -> None:
        barrier.wait(60)
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results
