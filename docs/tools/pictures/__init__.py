"""Numbers and names come in as arguments; SVG in the page's colours goes out."""
