"""One self-contained HTML page of a `drawing.Page`: timeline, memory, splits, heat maps and tables, without an address.

`html` makes the document: all that can be read without a program. `data` says what the charts show, as names (JSON) and
numbers, which `columns` packs as typed arrays. `page.css` is how it looks, light and dark, `script/` draws the charts.
"""

from fourfold.report.page.html import page_html, write_page

__all__ = ["page_html", "write_page"]
