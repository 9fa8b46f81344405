"""Rows of text as a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["format_rows"]


def format_rows(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """One line for each row, columns two spaces apart.

    Args:
        rows: cells; as many in each.
        right: columns whose cells stand at their right.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
