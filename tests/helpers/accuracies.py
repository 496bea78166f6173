"""Tables of accuracies made by hand."""

from lookahead.heads.medusa.accuracies import HeadAccuracies


def table(*rows: tuple[float, ...]) -> HeadAccuracies:
    return HeadAccuracies(rows, (100,) * len(rows))
