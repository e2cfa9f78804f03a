"""Records what objects in the package's code are, in links.txt: python docs/tools/record.py links

Run by: `record`, after changes of the package; a build does without (see `links`). Calls: `links`.

Without arguments, jedi is asked of the files that links.txt does not know as they are now, which takes
seconds for each. `all` asks of every file, in four minutes. With --check, nothing is written: the
command says which files' entries would change, and fails if there are any.
"""

import argparse

from source.links import asked, record, recorded
from source.package import Package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("which", nargs="?", choices=("changed", "all"), default="changed")
    parser.add_argument(
        "--check", action="store_true", help="say what is out of date, write nothing"
    )
    options = parser.parse_args()
    package = Package.read()
    known = recorded(package)
    old = [module for module in package.pages if module not in known]
    if options.check and options.which == "changed":
        found, changed = {}, old
    else:
        found = asked(package, package.pages if options.which == "all" else old)
        changed = [module for module in found if found[module] != known.get(module)]
    for module in changed:
        print(f"links.txt is out of date: {module}")
    if not options.check:
        record(package, known | found)
    elif changed:
        raise SystemExit(f"{len(changed)} files: run python docs/tools/record.py links")


if __name__ == "__main__":
    main()
