"""The one thing MkDocs is asked to do for us: put finished HTML where its comment stands.

Called by: MkDocs, for every page it has rendered. Calls: `stash`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stash import fill


def on_post_page(output, page, config):
    return fill(output, Path(config["docs_dir"]).with_name("pieces") / f"{page.file.src_uri}.json")
