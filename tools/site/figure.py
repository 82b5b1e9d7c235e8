"""`Figure`: boxes, text and arrows as SVG."""

from __future__ import annotations

from html import escape

INK, GREY = "#263238", "#607d8b"
BLUE, GREEN, ORANGE, PURPLE, PALE = "#e3f2fd", "#e8f5e9", "#fff3e0", "#f3e5f5", "#eceff1"
STRONG = {BLUE: "#1565c0", GREEN: "#2e7d32", ORANGE: "#e65100", PURPLE: "#6a1b9a", PALE: "#546e7a"}


class Figure:
    """An SVG of a fixed size; coordinates are pixels from the top left."""

    def __init__(self, width: int, height: int):
        self.size = width, height
        self.parts: list[str] = []

    def box(self, at: tuple[int, int, int, int], title: str, *lines: str, color: str = BLUE) -> None:
        """A box at (x, y, width, height) with a title and lines of text below it."""
        x, y, width, height = at
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{color}" stroke="{STRONG[color]}"/>'
        )
        top = y + (height - 17 * len(lines)) / 2 + 5
        self.text(x + width / 2, top, title, weight="600", fill=STRONG[color])
        for index, line in enumerate(lines):
            self.text(x + width / 2, top + 17 * (index + 1), line, size=12)

    def text(self, x: float, y: float, text: str, size: int = 13, weight: str = "400", fill: str = INK) -> None:
        style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="middle"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int], label: str = "", dashed: bool = False) -> None:
        """A line through the points with a head at the last, and a label above the middle of its first segment."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{GREY}" stroke-width="1.6"{dash} marker-end="url(#head)"/>'
        )
        if label:
            (x0, y0), (x1, y1) = points[:2]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - 6, label, size=11, fill=GREY)

    def svg(self) -> str:
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif">{head}'
            f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )
