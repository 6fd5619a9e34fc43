"""One rank's step as a drawing that stands alone, for pages that run no script.

It brings its own ground, light or dark as its reader's system is, so that it can be read on any
page. Everything of one colour is one path: some thousand events make some ten kilobytes.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ..figures import duration, size
from ..spans import RankTrace
from .look import HELD, PARTS, PHASES, colours, row_height
from .moments import cells, flights, fullest, innermost
from .pack import labels, rows

_PAD, _LETTER, _STRIP, _MEMORY, _LINE = 14, 6.9, 18, 110, 20
_STANDING_STILL = ("wait", "reduce_wait")
_NAME = 22  # letters of a unit's name, the last ones
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif"

Box = tuple[float, float, float, float]  # left, top, width, height


def picture(trace: RankTrace, width: int = 1000, seconds: tuple[float, float] | None = None) -> str:
    """Units as rows, time across, memory below: SVG, the same for the same trace.

    width: in pixels; the height follows from the number of units.
    seconds: the stretch of time to show, by default all.

    Raises ValueError for a stretch that ends before it begins.
    """
    begin, end = seconds or (0.0, max(trace.seconds, 1e-9))
    if not begin < end:
        raise ValueError(f"seconds={seconds}: a picture needs a stretch that begins before it ends")
    return _Picture(trace, width, begin, end).text()


class _Picture:
    """Where things lie, and what has been drawn so far."""

    def __init__(self, trace: RankTrace, width: int, begin: float, end: float) -> None:
        self.trace, self.begin, self.end, self.width = trace, begin, end, width
        self.shown = [e for e in trace.events if e.end > begin and e.start < end]
        self.rows = rows(trace)
        self.high = row_height(len(self.rows))
        self.labels = [_short(label) for label in labels(self.rows)]
        self.left = round(_PAD + max([11, *map(len, self.labels)]) * _LETTER + 8)
        self.wide = width - _PAD - self.left
        self.strip = _PAD + 38
        self.top = self.strip + _STRIP + 6
        self.memory = self.top + self.high * len(self.rows) + 12
        self.drawn: list[str] = []

    def x(self, seconds: float) -> float:
        share = (seconds - self.begin) / (self.end - self.begin)
        return self.left + self.wide * min(1.0, max(0.0, share))

    def text(self) -> str:
        self._axis()
        self._strip_of_the_thread()
        self._rows()
        self._iterations()
        self._held()
        height = self._legend(self.memory + _MEMORY + 26)
        light, dark = (_rules(dark) for dark in (False, True))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" '
            f'width="{self.width}" height="{height}" role="img" class="step">'
            f"<title>Rank {self.trace.rank}, {duration(self.end - self.begin)}: units as rows, "
            "time across, memory below</title>"
            f"<style>.step{{font:12px {_FONT}}}{light}"
            f"@media(prefers-color-scheme:dark){{{dark}}}</style>"
            f'<rect class="s-card" width="{self.width}" height="{height}" rx="8"/>'
            f"{''.join(self.drawn)}</svg>"
        )

    def _axis(self) -> None:
        factor, unit = (1.0, "s") if self.end - self.begin > 10 else (1e3, "ms")
        first = self.begin * factor
        for tick in _ticks(first, self.end * factor, self.wide / 90):
            x = self.x(tick / factor)
            anchor = "start" if x < self.left + 20 else "middle" if x < self.width - 40 else "end"
            self._write(x, self.strip - 8, f"{tick:,.10g} {unit}", "s-soft", anchor)
            self._fill("s-soft", [(x, self.strip - 5, 1, 3)])
        self._write(_PAD, self.strip + 13, "this thread", "s-soft")

    def _strip_of_the_thread(self) -> None:
        self._fill("s-at-outside", [(self.left, self.strip, self.wide, _STRIP)])
        count = max(1, self.wide)
        boxes: dict[str, list[Box]] = defaultdict(list)
        for index, shares in enumerate(cells(self.trace, self.begin, self.end, count)):
            below = self.strip + _STRIP
            for part in ("computing", "optimizer", "engine", "exposed"):
                tall = _STRIP * min(1.0, shares.get(part, 0.0))
                below -= tall
                if tall > 0.05:
                    left = self.left + index * self.wide / count
                    boxes[part].append((left, below, self.wide / count, tall))
        for part, found in boxes.items():
            self._fill(f"s-at-{part} s-sharp", _beside(found), PARTS[part].label)

    def _rows(self) -> None:
        high, gap = self.high, 4 if self.high >= 22 else 3 if self.high >= 17 else 2
        row = {name: self.top + index * high for index, name in enumerate(self.rows)}
        font = "" if high >= 17 else ' style="font-size:10.5px"'
        for label, y in zip(self.labels, row.values(), strict=True):
            self._fill("s-grid", [(self.left, y + high / 2, self.wide, 1)])
            self._write(_PAD, y + high / 2 + 4, label, "s-text", style=font)
        shown = self.shown
        pale: dict[str, list[Box]] = defaultdict(list)
        solid: dict[str, list[Box]] = defaultdict(list)
        for event in shown:
            if event.own < event.seconds:
                pale[event.kind].append(self._bar(event.start, event.end, row[event.unit], gap))
        for thread in sorted({event.thread for event in shown}):
            for start, end, event in innermost(shown, thread):
                left, y, wide, tall = self._bar(start, end, row[event.unit], gap)
                if thread:  # beside what the training thread does there
                    y, tall = y + tall / 2, tall / 2
                if wide:
                    solid[event.kind].append((left, y, wide, tall))
        still = [each for each in innermost(shown, 0) if each.event.kind in _STANDING_STILL]
        for kind in _STANDING_STILL:  # behind all units
            boxes = [
                (self.x(start), self.top, self.x(end) - self.x(start), high * len(self.rows))
                for start, end, event in still
                if event.kind == kind
            ]
            self._fill(f"s-{kind} s-still", _beside(boxes))
        for kind, boxes in pale.items():
            self._fill(f"s-{kind} s-open", _beside(boxes))
        lines: dict[str, list[Box]] = defaultdict(list)
        for start, end, event in flights(self.trace.events):
            look = "reduce" if event.kind == "reduce" else "unshard"
            left, y, wide, _ = self._bar(start, end, row[event.unit], high // 2 - 1)
            if wide and event.deferred:
                dots = range(int(wide / 5))
                lines[look] += [(left + 5 * dot, y, 2, 2) for dot in dots]
            elif wide:
                lines[look].append((left, y, wide, 3 if high >= 17 else 2))
        for look, boxes in lines.items():
            self._fill(f"s-{look}", boxes)
        last = [kind for kind in PHASES if "wait" in kind]  # in front of the others
        for kind in [*(kind for kind in PHASES if kind not in last), *last]:
            self._fill(f"s-{kind}", _beside(solid[kind]), PHASES[kind].label)

    def _bar(self, start: float, end: float, y: float, gap: float) -> Box:
        left = self.x(start)
        return left, y + gap, self.x(end) - left, self.high - 2 * gap

    def _held(self) -> None:
        count = max(1, self.wide)
        points = fullest(self.trace, self.begin, self.end, count)
        most = max((point.total for point in points if point), default=0)
        full, bottom = 1.22 * max(1, most), self.memory + _MEMORY
        unit, name = next(
            (pair for pair in ((2**30, "GiB"), (2**20, "MiB")) if most >= pair[0]), (2**10, "KiB")
        )
        for level in _ticks(0, most / unit, 3):
            y = bottom - _MEMORY * level * unit / full
            self._fill("s-rule", [(self.left, y, self.wide, 1)])
            self._write(self.left - 8, y + 4, f"{level:,.6g} {name}", "s-soft", "end")
        below = [bottom] * count
        for part in HELD:
            boxes = []
            for index, point in enumerate(points):
                tall = _MEMORY * getattr(point, part) / full if point else 0
                below[index] -= tall
                if tall:
                    left = self.left + index * self.wide / count
                    boxes.append((left, below[index], self.wide / count, tall))
            self._fill(f"s-held-{part} s-sharp", _beside(boxes), HELD[part].label)
        highest = next((i for i, point in enumerate(points) if point and point.total == most), 0)
        if most:
            x = self.left + (highest + 0.5) * self.wide / count
            y = bottom - _MEMORY * most / full
            self.drawn.append(f'<circle class="s-text" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
            anchor, side = ("end", -8) if x > self.width - 120 else ("start", 8)
            text = f"peak {size(most)}"
            long = _LETTER * len(text)
            self._fill("s-card", [(x + side - (long if side < 0 else 0), y - 14, long, 13)])
            self._write(x + side, y - 3, text, "s-text", anchor)

    def _iterations(self) -> None:
        for number, at in enumerate(self.trace.iterations, 1):
            if not self.begin <= at < self.end:
                continue
            x = self.x(at)
            # Not through the figures of the axis.
            path = (
                f"M{_n(x)} {_PAD - 2}V{_PAD + 14}M{_n(x)} {self.strip - 5}V{self.memory + _MEMORY}"
            )
            self.drawn.append(f'<path class="s-line" d="{path}"/>')
            if x < self.width - 90:
                self._write(x + 5, _PAD + 8, f"iteration {number}", "s-text")

    def _legend(self, y: float) -> int:
        """Draws it, in as many lines as it takes; returns how high the whole is."""
        kinds = {event.kind for event in self.shown}
        under_way = list(flights(self.shown))
        items = [(f"s-{kind}", look.label) for kind, look in PHASES.items() if kind in kinds]
        for deferred, label in ((False, "message under way"), (True, "asked for, not begun")):
            if any(flight.event.deferred is deferred for flight in under_way):
                items.append(("dots" if deferred else "line", label))
        items += [(f"s-held-{part}", look.label) for part, look in HELD.items()]
        if self.trace.mailbox_bytes:
            items.append(("", f"mailboxes: {size(self.trace.mailbox_bytes)} all the time"))
        x = _PAD
        for look, label in items:
            sample = {"line": 23, "dots": 23, "": 0}.get(look, 15)
            if x + sample + _LETTER * len(label) > self.width - _PAD and x > _PAD:
                x, y = _PAD, y + _LINE
            if look == "line":
                self._fill("s-unshard", [(round(x), y - 6, 17, 3)])
            elif look == "dots":
                self._fill("s-unshard", [(round(x) + 5 * dot, y - 6, 2, 3) for dot in range(4)])
            elif look:
                self._fill(look, [(round(x), y - 9, 9, 9)])
            self._write(x + sample, y, label, "s-soft")
            x += sample + _LETTER * len(label) + 14
        return round(y + _PAD)

    def _fill(self, look: str, boxes: Iterable[Box], title: str = "") -> None:
        path = "".join(
            f"M{_n(left)} {_n(y)}h{_n(wide)}v{_n(tall)}h-{_n(wide)}z"
            for left, y, wide, tall in boxes
        )
        if path:
            inside = f"><title>{title}</title></path>" if title else "/>"
            self.drawn.append(f'<path class="{look}" d="{path}"{inside}')

    def _write(
        self, x: float, y: float, text: str, look: str, anchor: str = "start", style: str = ""
    ) -> None:
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        escaped = html.escape(text.encode("utf-8", "replace").decode("utf-8"))
        self.drawn.append(
            f'<text class="{look}" x="{_n(x)}" y="{_n(y)}"{at}{style}>{escaped}</text>'
        )


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"\N{HORIZONTAL ELLIPSIS}{name[1 - _NAME :]}"


def _rules(dark: bool) -> str:
    rules = "".join(f".s-{name}{{fill:{colour}}}" for name, colour in colours(dark).items())
    line = colours(dark)["soft"]
    pale = ".s-open{opacity:.26}.s-still{opacity:.09}"
    pale += ".s-sharp{shape-rendering:crispEdges}"  # no seams between columns
    return f"{rules}{pale}.s-line{{stroke:{line};stroke-dasharray:3 3}}"


def _ticks(low: float, high: float, count: float) -> Iterator[float]:
    """Round numbers from `low` to `high`, some `count` of them."""
    raw = max(high - low, 1e-9) / max(1.0, count)
    ten = 10.0 ** math.floor(math.log10(raw))
    step = next(ten * m for m in (1, 2, 5, 10) if ten * m >= raw * 0.999)
    for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1):
        yield number * step


def _beside(boxes: Iterable[Box]) -> Iterator[Box]:
    """The same area in fewer boxes: those that touch and are equally high become one."""
    last: Box | None = None
    for box in sorted(boxes, key=lambda box: (round(box[1], 2), round(box[3], 2), box[0])):
        if last is not None:
            left, y, wide, tall = last
            level = abs(y - box[1]) < 0.01 and abs(tall - box[3]) < 0.01
            if level and box[0] - left - wide < 0.15:
                last = left, y, max(wide, box[0] + box[2] - left), tall
                continue
            yield last
        last = box
    if last is not None:
        yield last
