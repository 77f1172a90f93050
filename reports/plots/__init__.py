"""The pictures of a report, as inline SVG: what decided, drawn from the record alone.

No scripts, nothing fetched, every text escaped; colours are CSS classes of the page, so that one
drawing serves light, dark and paper.
"""
