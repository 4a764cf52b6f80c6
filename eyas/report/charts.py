"""How a page is made: its template, and charts that Vega-Altair draws as SVG when the page is written.

A page holds no script, so nothing in it can run, and a chart looks the same on a phone, in the dark, on paper and with scripts
turned off. Colours are the page's CSS variables, so they follow its scheme. A chart is drawn once for each width that a
page may give it, and CSS shows the one that fits. A browser shows the `description` of a mark on hover.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import altair as alt
import jinja2
import vl_convert
from altair.utils.schemapi import debug_mode
from markupsafe import Markup

from eyas.report import words

# Names of colours: CSS variables of shell.html.j2, with values for light, dark and print.
INK, QUIET, LINE, FAINT, CARD = (f"var(--{name})" for name in ("ink", "quiet", "line", "faint", "card"))
ACCEPTED, REJECTED = "var(--accepted)", "var(--rejected)"
REASONING, ANSWER = "var(--reasoning)", "var(--answer)"

# Widths in CSS pixels, and the classes that shell.html.j2 shows when a figure has that much room.
WHOLE = {"narrow": 316, "middle": 620, "wide": 1046}  # alone in its row
HALF = {"narrow": 316, "middle": 500}  # side by side where there is room
FONT = "system-ui, sans-serif"
SIZE = 12  # px of all text in charts
SVG = "{http://www.w3.org/2000/svg}"
_SIZED = re.compile(r"-?\d+\.\d{2,}")
_DROPPED = {
    "pointer-events",
    "aria-hidden",
    "aria-label",
    "aria-roledescription",
    "role",
    "font-family",
    "class",
}
_UNIT = {"opacity": "1", "stroke-width": "1", "fill-opacity": "1"}  # SVG's own defaults


@dataclass(frozen=True)
class Drawing:
    """A chart in a page. title: its heading. about: the same in words, for who cannot see it. svg: one for each width."""

    title: str
    about: str
    svg: Markup


def draw(title: str, about: str, make: Callable[[int], Any], widths: dict[str, int] = WHOLE) -> Drawing:
    """The chart that `make` returns for a width in pixels, drawn for each of `widths`.

    Its size is the whole of it, axes included; legends stand in the page.
    """
    # Altair's own check of each part against its schema takes longer than all the rest.
    with debug_mode(False):
        drawn = [
            _svg(make(width), f"{title}: {about}", f"{name} only-{len(widths)}")
            for name, width in widths.items()
        ]
    return Drawing(title, about, Markup("").join(drawn))


def render(template: str, **values: Any) -> str:
    """A page as text, from a template beside this file that extends shell.html.j2. All text in `values` is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    for name in (
        "number",
        "percent",
        "duration",
        "hours",
        "megabytes",
        "commonest",
        "listed",
        "slug",
        "spoken",
        "moment",
    ):
        environment.filters[name] = getattr(words, name)
    environment.filters["coded"] = _coded
    return environment.get_template(template).render(**values)


def _coded(text: str) -> Markup:
    """A sentence in which what stands between backticks is code."""
    parts = [Markup.escape(words.visible(part)) for part in re.split(r"`([^`]+)`", text)]
    return Markup("").join(
        Markup(f"<code>{part}</code>") if at % 2 else part for at, part in enumerate(parts)
    )


def _harmless(value: Any) -> Any:
    return words.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _svg(chart: Any, about: str, css: str) -> Markup:
    text = vl_convert.vegalite_to_svg(_styled(chart).to_dict(validate=False))
    root = ElementTree.fromstring(text)
    _clean(root)
    view = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib.update({"viewBox": view, "class": css, "role": "img", "aria-label": about})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _styled(chart: Any) -> Any:
    """The chart in the page's looks: no frame, quiet axes, light grid, one size of text."""
    axis = alt.AxisConfig(
        labelColor=QUIET,
        titleColor=QUIET,
        labelFontSize=SIZE,
        titleFontSize=SIZE,
        titleFontWeight="normal",
        labelFont=FONT,
        titleFont=FONT,
        gridColor=FAINT,
        domainColor=LINE,
        tickColor=LINE,
        tickSize=4,
        titlePadding=8,
    )
    return chart.configure(
        background="transparent",
        axis=axis,
        view=alt.ViewConfig(stroke=None),
        text=alt.MarkConfig(font=FONT, fontSize=SIZE, fill=INK),
        padding={"left": 0, "right": 2, "top": 0, "bottom": 5},
    )


def _clean(element: ElementTree.Element) -> None:
    """Leaves what is seen: marks with their descriptions as tooltips, colours as styles, coordinates to a tenth."""
    element.tag = element.tag.removeprefix(SVG)
    described = element.get("role") == "graphics-symbol" and element.get("aria-roledescription") != "axis"
    about = element.get("aria-label") if described else None
    for name, value in list(element.attrib.items()):
        if name in _DROPPED or _UNIT.get(name) == value:
            del element.attrib[name]
        elif name in ("fill", "stroke") and value.startswith("var("):
            # As a style: not every browser takes a variable in an attribute.
            del element.attrib[name]
            element.set("style", f"{element.get('style', '')}{name}:{value};")
        elif name in ("d", "transform", "x", "y", "x2", "y2"):
            element.set(name, _SIZED.sub(lambda number: f"{float(number[0]):.1f}", value))
    for child in list(element):
        if child.tag == f"{SVG}path" and (
            not child.get("d") or child.get("class") in ("background", "foreground")
        ):
            element.remove(child)
        else:
            _clean(child)
    if about:
        title = ElementTree.Element("title")
        title.text = about
        element.insert(0, title)


def bars(rows: Sequence[dict[str, Any]], colours: dict[str, str], width: int, *, axis: str) -> Any:
    """Horizontal bars, each under its name, so that long names need no room beside them.

    rows: dicts of `name`, `told` (what stands behind the name), and for each key of `colours`, which stack in that
    order, a number. axis: what the numbers are.
    """
    step, thick = 40, 12
    values = []
    for place, row in enumerate(rows):
        start = 0.0
        for part in colours:
            end = start + (row[part] or 0)
            said = f"{row['name']}, {part}: {words.rounded(row[part])}"
            values.append(
                {
                    "y": place * step + 20,
                    "y2": place * step + 20 + thick,
                    "x": start,
                    "x2": end,
                    "part": part,
                    "said": said,
                }
            )
            start = end
    names = [
        {"y": place * step + 10, "name": row["name"], "told": row["told"]} for place, row in enumerate(rows)
    ]
    height = max(len(rows) * step, 1)
    scale = alt.Scale(domainMin=0, nice=True)
    x = alt.X(
        "x:Q",
        scale=scale,
        title=axis,
        axis=alt.Axis(tickCount=4 if width < 400 else 8, domain=False, ticks=False),
    )
    base = alt.Chart(alt.InlineData(values=values))
    drawn = base.mark_rect(cornerRadius=2).encode(
        x=x,
        x2="x2:Q",
        y=alt.Y("y:Q", scale=None, axis=None),
        y2="y2:Q",
        color=alt.Color(
            "part:N", scale=alt.Scale(domain=list(colours), range=list(colours.values())), legend=None
        ),
        description="said:N",
    )
    labels = alt.Chart(alt.InlineData(values=names))
    y = alt.Y("y:Q", scale=None, axis=None)
    left = labels.mark_text(align="left", baseline="middle", fontWeight=600, aria=False).encode(
        x=alt.value(0), y=y, text="name:N"
    )
    right = labels.mark_text(align="right", baseline="middle", fill=QUIET, aria=False).encode(
        x=alt.value("width"), y=y, text="told:N"
    )
    return sized(alt.layer(drawn, left, right), width, height)


def sized(chart: Any, width: int, height: int) -> Any:
    """The chart so wide as a whole, axes included; the height is that of its plot."""
    return chart.properties(
        width=width, height=height, autosize=alt.AutoSizeParams(type="fit-x", contains="padding")
    )
