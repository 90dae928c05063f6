"""HTML pages that need no network: `write_trace` writes that of one load. The benchmark's page has the same parts.

| module | what it is for |
|---|---|
| `document` | a page: its style, its scripts and what they may do |
| `load` | the page of one load, from its trace |
| `timeline`, `lanes` | what bounded a load; what happened when, as a plotly figure |
| `figure` | what all plotly figures have in common |
| `theme`, `units`, `markup` | colours; figures as text; HTML that escapes |

Charts are drawn by plotly, which is wanted here and nowhere else: `pip install plotly`.
"""

from .load import write_trace

__all__ = ["write_trace"]
