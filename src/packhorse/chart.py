"""Charts: a few lines over a few points, as SVG, without a library.

In: points by line. Out: text of an SVG file.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
COLOURS = ("#1f6f8b", "#d1495b", "#66a182", "#edae49", "#5d4e8c", "#333333")


def draw(title: str, x_name: str, y_name: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Both axes are logarithmic: what is swept doubles, and what is compared differs by factors."""
    points = [p for line in lines.values() for p in line if p[0] > 0 and p[1] > 0]
    if not points:
        return _svg([_text(WIDTH / 2, HEIGHT / 2, "nothing to draw", "middle")])
    (x0, x1), (y0, y1) = (_range([p[i] for p in points]) for i in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x0) / math.log(x1 / x0)
        up = math.log(y / y0) / math.log(y1 / y0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 22, title, "start", 14), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_name, "middle")]
    parts.append(_text(LEFT, TOP - 6, y_name, "start"))
    for x in sorted({p[0] for p in points}):
        at, _ = place(x, y0)
        parts.append(_text(at, HEIGHT - BOTTOM + 16, f"{x:g}", "middle"))
    for y in _ticks(y0, y1):
        _, at = place(x0, y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, at + 4, f"{y:g}", "end"))
    for i, (name, line) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        drawn = [place(x, y) for x, y in line if x > 0 and y > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in drawn]
        parts.append(_text(WIDTH - RIGHT + 10, TOP + 18 * i + 10, name, "start", colour=colour))
    return _svg(parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    least, most = min(values), max(values)
    return (least, most) if most > least else (least / 2, least * 2)


def _ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times powers of ten; only the powers, if those are many."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    ticks = [m * 10.0**p for p in powers for m in (1, 2, 5) if least <= m * 10.0**p <= most]
    return ticks if len(ticks) <= 9 else [10.0**p for p in powers if least <= 10.0**p <= most]


def _text(x: float, y: float, text: str, anchor: str, size: int = 12, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )


def _svg(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
