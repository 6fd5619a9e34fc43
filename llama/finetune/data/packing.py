"""Documents into rows, so that little of a row is padding."""

import bisect
from typing import NamedTuple

import numpy as np

OPEN_ROWS = 64  # looked at for each document: more pack little better


class Rows(NamedTuple):
    """Rows of documents: row r has `documents[starts[r] : starts[r + 1]]`."""

    documents: np.ndarray
    starts: np.ndarray  # int64, (rows + 1,)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.documents[self.starts[row] : self.starts[row + 1]]


def alone(documents: np.ndarray) -> Rows:
    """A row for each document."""
    return Rows(documents, np.arange(len(documents) + 1))


def pack(documents: np.ndarray, positions: np.ndarray, room: int) -> Rows:
    """Rows of at most `room` positions that hold every document once.

    `positions` has the number of each of `documents`, none above `room`. A document goes to the
    open row that it leaves the least room in, the oldest of several; where it fits in none, a new
    row is opened, and beyond 64 the oldest is closed. Rows are in the order they were opened in,
    and documents within one as they came.
    """
    row_of_document: list[int] = []
    room_of_row: dict[int, int] = {}  # of the open ones, oldest first
    by_room: list[tuple[int, int]] = []  # (room, row), sorted
    rows = 0
    for needed in positions.tolist():
        at = bisect.bisect_left(by_room, (needed, 0))
        if at < len(by_room):
            left, row = by_room.pop(at)
        else:
            if len(by_room) == OPEN_ROWS:
                oldest = next(iter(room_of_row))
                del by_room[bisect.bisect_left(by_room, (room_of_row.pop(oldest), oldest))]
            left, row = room, rows
            rows += 1
        row_of_document.append(row)
        left -= needed
        if left:
            room_of_row[row] = left
            bisect.insort(by_room, (left, row))
        else:
            room_of_row.pop(row, None)
    row_of = np.array(row_of_document, np.int64)
    counts = np.bincount(row_of, minlength=rows)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return Rows(documents[np.argsort(row_of, kind="stable")], starts)
