"""The benchmark as one HTML page that needs no network: `write_page` for results, `write_trace` for one load.

| module | what it is for |
|---|---|
| `document` | the page: what it says, in which order |
| `masthead`, `verdict` | whose figures these are; what they come to |
| `findings` | which loader is first, which bounds are missed, which rows cannot be true |
| `tables` | rows as tables |
| `charts` | loads beside each other, as plotly figures |
| `timeline`, `lanes` | one load from its trace: what bounded it; what happened when, as a plotly figure |
| `theme`, `units`, `markup` | colours; figures as text; HTML that escapes |

Charts are drawn by plotly, which is wanted here and nowhere else: `pip install plotly`.
"""

from .document import write_page, write_trace

__all__ = ["write_page", "write_trace"]
