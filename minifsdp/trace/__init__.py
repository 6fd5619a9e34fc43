"""See what a step does: each unit's events with their times and bytes, and what is held.

    from minifsdp.trace import record

    with record() as trace:  # on all ranks
        for _ in range(3):
            train_step()
    print(trace)  # a timeline in text, and what was waited for
    trace.save("trace.html")  # one page: units as rows, memory below, all ranks
    trace.save("trace.json")  # for https://ui.perfetto.dev; `load` reads it again

`python -m minifsdp.trace trace.json` shows a saved trace, and makes its page.
"""

from .record import record
from .spans import KINDS, Held, RankTrace, TraceEvent
from .trace import Trace, load

__all__ = ["KINDS", "Held", "RankTrace", "Trace", "TraceEvent", "load", "record"]
