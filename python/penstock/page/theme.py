"""Colours and type of the benchmark page: one place for the style sheet and the charts.

Every colour has a light and a dark form. The charts are written with the light one; the page's script puts the dark one
in its place where the reader's system is dark, so each light colour stands for one role only. Penstock's accent, the
routes and the stages keep apart for the common forms of colour blindness (after Okabe and Ito's palette), and none of
them is told by colour alone: lanes and bars are named, what missed carries a sign.
"""

from __future__ import annotations

#: role: (light, dark)
COLOURS = {
    "page": ("#ffffff", "#0e1216"),
    "surface": ("#f4f6f8", "#171d23"),
    "rule": ("#dbe1e7", "#2c353e"),
    "text": ("#14181c", "#e7ebef"),
    "muted": ("#57626e", "#9eaab6"),
    "accent": ("#0068b3", "#4fadf0"),
    "accent-soft": ("#e6f1fa", "#12293d"),
    "neutral": ("#8c98a6", "#5f6d7c"),
    "good": ("#00694d", "#46c79b"),
    "good-soft": ("#e4f4ee", "#10291f"),
    "bad": ("#ab3606", "#ff9a6b"),
    "bad-soft": ("#fdeee6", "#36190c"),
    # what the lanes of a timeline hold
    "direct": ("#00558f", "#2f8fd8"),
    "buffered": ("#3a92cf", "#74bdf0"),
    "mapped": ("#7fb9e2", "#b3daf7"),
    "network": ("#5a4fb0", "#a49bf0"),
    "rank": ("#b04f7a", "#f09bc0"),
    "neighbour": ("#8a3a9a", "#d19be0"),
    "copy": ("#d57500", "#f0a040"),
    "device": ("#00906a", "#37c99b"),
    "wait": ("#c2c9d1", "#4b5763"),
    "plan": ("#8e4a7c", "#d38fc0"),
    "allocate": ("#9a8100", "#e0cc3c"),
    "hand-out": ("#3c4854", "#ccd5de"),
    "consumer": ("#7d8996", "#8795a3"),
}

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'Noto Sans Mono', 'Liberation Mono', monospace"


def light(role: str) -> str:
    """The colour that a chart is written with."""
    return COLOURS[role][0]


def dark_forms() -> dict[str, str]:
    """The dark colour of every light one."""
    return dict(COLOURS.values())


def variables() -> str:
    """The colours as CSS custom properties, light and dark."""

    def of(which: int) -> str:
        return " ".join(f"--{role}: {forms[which]};" for role, forms in COLOURS.items())

    return (
        f":root {{ color-scheme: light dark; --font: {FONT}; --mono: {MONO}; {of(0)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {of(1)} }} }}\n"
    )
