"""Pictures: a few shapes, one palette for light and one for dark surroundings.

A picture brings its own ground, because a page may be dark where the system is light.
"""

from __future__ import annotations

from html import escape

_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

# name: (light, dark)
COLOURS = {
    "ground": ("#ffffff", "#14181f"),
    "frame": ("#d5dae1", "#2f3742"),
    "ink": ("#1c2430", "#e4e9f0"),
    "soft": ("#5f6b7a", "#9aa6b5"),
    "grid": ("#e6eaef", "#262d37"),
    "rank0": ("#2f6fb3", "#5b9be0"),
    "rank1": ("#c9741a", "#e59a4c"),
    "rank2": ("#2e8b63", "#52b98c"),
    "rank3": ("#8a5bb0", "#b58ad8"),
    "gather": ("#a9cbee", "#2f5680"),
    "whole": ("#5f9ad6", "#4f8fd0"),
    "forward": ("#2f6fb3", "#7db4ee"),
    "backward": ("#7b52a6", "#b48fe0"),
    "gradients": ("#7b52a6", "#a97fd6"),
    "message": ("#c9ced6", "#566172"),
    "reduce": ("#dd9a4b", "#9a5f1a"),
    "rows": ("#2e8b63", "#4fb58a"),
    "optimizer": ("#2e8b63", "#4fb58a"),
    "wait": ("#c8453b", "#ef7d73"),
    "gone": ("#f1f3f6", "#1d232c"),
}


def _style() -> str:
    def rules(index: int) -> str:
        return "".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items())

    fills = "".join(f".{name}{{fill:var(--{name})}}" for name in COLOURS)
    strokes = "".join(f".s-{name}{{stroke:var(--{name});fill:none}}" for name in COLOURS)
    return (
        f":root{{{rules(0)}}}@media(prefers-color-scheme:dark){{:root{{{rules(1)}}}}}"
        f"text{{font:12px {_SANS};fill:var(--ink)}}text.soft{{fill:var(--soft)}}"
        f"text.mono{{font-family:{_MONO}}}text.small{{font-size:10.5px}}"
        f"text.bold{{font-weight:600}}text.on{{fill:var(--ground)}}{fills}{strokes}"
    )


class Drawing:
    """An SVG under construction; coordinates in pixels, y downwards."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self._title = width, height, title
        self._parts: list[str] = []
        self._hatches: set[str] = set()
        self._heads: set[str] = set()

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, hint: str = "", **more
    ) -> None:
        """A filled rectangle. more: attributes; `edge` is the colour of an outline."""
        classes = colour if colour else ""
        edge = more.pop("edge", None)
        attributes = _attributes(more)
        fill = f' class="{classes}"' if colour else ' fill="none"'
        if edge:
            attributes += f' style="stroke:var(--{edge})"'
        head = f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self._parts.append(f"{head}{fill}{attributes}>{title}</rect>")

    def hatch(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A rectangle of diagonal lines."""
        self._hatches.add(colour)
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f'fill="url(#hatch-{colour})" style="stroke:var(--{colour});stroke-width:.6"/>'
        )

    def text(self, x: float, y: float, said: str, classes: str = "", anchor: str = "start") -> None:
        """classes: of soft, mono, small, bold, on (on a dark colour)."""
        kind = f' class="{classes}"' if classes else ""
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{kind}{where}>{escape(said)}</text>')

    def line(self, points: list[tuple[float, float]], colour: str, **more: object) -> None:
        """A line through points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polyline class="s-{colour}" points="{path}"{_attributes(more)}/>')

    def area(self, points: list[tuple[float, float]], colour: str, hint: str = "") -> None:
        """A filled polygon."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        title = f"<title>{escape(hint)}</title>" if hint else ""
        self._parts.append(f'<polygon class="{colour}" points="{path}">{title}</polygon>')

    def arrow(self, path: str, colour: str = "soft", **more: object) -> None:
        """A path ("M x y C ...") with a head at its end."""
        self._heads.add(colour)
        self._parts.append(
            f'<path class="s-{colour}" d="{path}" marker-end="url(#head-{colour})"'
            f' stroke-width="1.4"{_attributes(more)}/>'
        )

    def legend(self, x: float, y: float, entries: list[tuple[str, str]]) -> None:
        """Coloured squares with words, side by side; "/colour" is hatched."""
        for colour, words in entries:
            if colour.startswith("/"):
                self.hatch(x, y - 9, 11, 11, colour[1:])
            else:
                self.box(x, y - 9, 11, 11, colour, rx=2)
            self.text(x + 16, y, words, "soft")
            x += 16 + 6.3 * len(words) + 18

    def svg(self) -> str:
        """The whole file."""
        definitions = "".join(
            f'<pattern id="hatch-{c}" width="5" height="5" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><path class="s-{c}" d="M0 0V5" stroke-width="2"/>'
            "</pattern>"
            for c in sorted(self._hatches)
        )
        definitions += "".join(
            f'<marker id="head-{c}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path class="{c}" d="M0 .5L8 4L0 7.5z"/>'
            "</marker>"
            for c in sorted(self._heads)
        )
        width, height = _n(self.width), _n(self.height)
        frame = _n(self.width - 1), _n(self.height - 1)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{_style()}</style>",
                f"<defs>{definitions}</defs>",
                f'<rect x=".5" y=".5" width="{frame[0]}" height="{frame[1]}" rx="8" '
                'class="ground" style="stroke:var(--frame)"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def _n(number: float) -> str:
    """A coordinate, to a tenth."""
    return f"{number:.1f}".removesuffix(".0")


def _attributes(more: dict) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
