"""Strategies by name, as a dict of settings names them."""

from typing import Any

from jacobi import LookaheadError
from lookahead.heads.eagle.strategy import Eagle
from lookahead.heads.medusa.strategy import Medusa
from lookahead.heads.mtp.strategy import Mtp
from lookahead.heads.redrafter.strategy import ReDrafter
from lookahead.strategies.base import Strategy
from lookahead.strategies.jacobi import Jacobi
from lookahead.strategies.lookahead import Lookahead

_BY_NAME: dict[str, type[Strategy]] = {
    strategy.name: strategy for strategy in (Lookahead, Jacobi, Medusa, Eagle, Mtp, ReDrafter)
}


def strategy_from(value: Any) -> Strategy:
    """The strategy that a user's ``lookahead_strategy`` means: a strategy, its dict, or None for the default."""
    if value is None:
        return Lookahead()
    if isinstance(value, Strategy):
        return value
    if not isinstance(value, dict):
        raise LookaheadError(
            "lookahead_strategy must be Lookahead(...), Jacobi(...), Medusa(...) or a dict of their settings: "
            f"got {value!r} of type {type(value).__name__}."
        )
    name = value.get("strategy", "lookahead")
    if not isinstance(name, str) or name not in _BY_NAME:
        raise LookaheadError(f"Unknown strategy {name!r} in lookahead_strategy: expected {', '.join(_BY_NAME)}.")
    return _BY_NAME[name].from_dict(value)
