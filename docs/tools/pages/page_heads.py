"""What a page says of itself to search engines and to those who get its link: a description of its own.

Called by: `mkdocs_hook`, for every page, `site_pages`; docs/overrides/main.html writes the tags.
Calls: `page_words`.

A page's description is in its front matter, or else the sentences that it begins with.
"""

import re
from html import escape, unescape

from source.page_words import HAN

MAX = 160
"""Characters that search engines show."""
FEW = 40
"""Less says too little: the next paragraph is taken too."""
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
BOX = re.compile(r'<div class="admonition.*?</div>', re.DOTALL)
OPENING = re.compile(r'<div class="mm-question">\s*(?:<p>)?(.*?)(?:</p>)?\s*</div>', re.DOTALL)
UNSPOKEN = re.compile(r"<math.*?</math>|<annotation.*?</annotation>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z0-9`\"“])|(?<=[。？！])")
OWN_LINE = ("notebooks/", "exercises/")
"""Their pages begin with a line on the file itself; what they are about comes after it."""


def description(html: str, url: str = "") -> str:
    """The page's first sentences, as many as fit; "" for a page without text.

    >>> description("<p>What a <em>stage</em> does. It waits.</p><p>More.</p>")
    'What a stage does. It waits. More.'
    """
    opening = OPENING.search(html)
    texts = [plain(opening[1])] if opening else []
    texts += [text for found in PARAGRAPH.findall(BOX.sub("", html)) if (text := plain(found))]
    if url.startswith(OWN_LINE) and len(texts) > 1 and not url.endswith("/index.html"):
        texts = texts[1:]
    if texts and len(texts[0]) < FEW:
        texts[0] = " ".join(texts[:2])
    return shortened(texts[0]) if texts else ""


def plain(html: str) -> str:
    """Words alone, in one line."""
    return " ".join(unescape(TAG.sub("", UNSPOKEN.sub("", html))).split())


def shortened(text: str, most: int = MAX) -> str:
    """Whole sentences, or the first one up to a word.

    >>> shortened("One two. Three four.", 12), shortened("One two three four.", 12)
    ('One two.', 'One two …')
    >>> shortened("一二三。四五六？七八九。", 9), shortened("一二三，四五六", 5)
    ('一二三。四五六？', '一二三 …')
    """
    first, *others = filter(None, SENTENCE.split(text))
    if len(first) > most:
        # Chinese is written without spaces.
        cut = first[: most - 2] if HAN.search(first) else first[: most - 1].rpartition(" ")[0]
        return cut.rstrip(",;:–-，；：、") + " …"
    for sentence in others:
        if len(first) + 1 + len(sentence) > most:
            break
        first += sentence if first.endswith(("。", "？", "！")) else f" {sentence}"
    return first


def set_description(meta: dict, html: str, url: str, default: str = "") -> None:
    """Puts it into the page's front matter, ready to stand in an attribute."""
    text = str(meta.get("description") or default or description(html, url))
    if text:
        meta["description"] = escape(shortened(" ".join(text.split())))
