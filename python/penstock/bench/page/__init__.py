"""The results of the benchmark as one HTML page: `write_page`. What it shares with the page of one load is in `..page`.

| module | what it is for |
|---|---|
| `document` | the page: what it says, in which order |
| `masthead`, `verdict` | whose figures these are; what they come to |
| `findings` | which loader is first, which bounds are missed, which rows cannot be true |
| `tables` | rows as tables |
| `charts` | loads beside each other, as plotly figures |
"""

from .document import write_page

__all__ = ["write_page"]
