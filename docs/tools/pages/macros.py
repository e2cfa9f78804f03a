"""What stands between double braces in the pages of docs/, and what it becomes.

    {{ code minimegatron.core.pipeline_parallel.steps.backward_step }}    the code itself
    {{ code x.y.z from="for i in" to="return" }}    from one statement to the end of another
    {{ code x.y.z shows="a, b(" }}    the excerpt must have these words, and folds what is not about
                                    them; the tour says some of each. fold=no shows all of it
    {{ file tests/toy_model.py }}    a whole file, with its docstrings
    {{ run minimegatron plan --pp 4 --microbatches 8 }}    a command and what it prints
    {{ figure timeline("1f1b", 4, 8) | Caption }}    a picture, from `cases`
    {{ table bubble_table() }}    a table, from `cases`
    {{ value percent(bubble(4, 8)) }}    a number or words, in a line of text
    {{ player schedule="1f1b" pp=4 microbatches=8 }}    where the schedule player mounts
    {{ link x.y.z }}  {{ term bubble }}  {{ thread MLM#675 }}  {{ megatron core/x.py }}
    {{ clone }}  {{ repository_link }}    where the repository is; see `repository`
    {{ map }}  {{ paths }}  {{ path_time One hour }}  {{ reading_speeds }}    of docs/tour.toml
    {{ here }}  {{ why_next }}    around a page of the tour; the build puts them there
    {{ practice 05 ex06 | what to do }}    notebooks and exercises, by the beginning of their names
    {{ exam }}  {{ problems }}    from docs/exam.toml and docs/problems
    {{ unrolled_runs }}    the pages of unrolled steps

A macro that cannot be filled in ends the build. Called by: `site_pages`. Calls: `package`, `cases`.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Callable
from html import escape
from pathlib import Path

from latex2mathml.converter import convert

from cases import cases, chain_table, choices, kept, layers, problem_cases
from cases.calculator import calculator_form
from cases.run_drawing import run_drawing
from cases.step_drawing import step_drawing
from minimegatron.__main__ import main as command_line
from pages.repository import clone_lines, repository_link, repository_url
from pages.unrolled_pages import runs_table
from source.excerpts import ExcerptError
from source.package import Package, Place
from source.page_words import (
    bare,
    is_there,
    language_of,
    own_anchor,
    say,
    speaking,
    terms,
    translated,
)
from source.places import ROOT
from source.prose import is_line
from source.quotes import quote_html, read_quote
from source.stash import Stash
from tour import tour_frame
from tour.chain_map import map_html
from tour.exam_page import exam_html
from tour.problems import problems_of
from tour.tour import Page, minutes_of_route, page_of, read_routes, time_words

ARGUMENT = r"(?: ((?:(?! \}\}).)+))?"
MACRO = re.compile(rf"\{{\{{ (\w+){ARGUMENT} \}}\}}")
BLOCK = re.compile(rf"^( *)\{{\{{ (\w+){ARGUMENT} \}}\}}[ \t]*$", re.MULTILINE)
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)

THREADS = {
    "MLM": "NVIDIA/Megatron-LM",
    "MB": "NVIDIA-NeMo/Megatron-Bridge",
    "NRL": "NVIDIA-NeMo/RL",
    "Speech": "NVIDIA-NeMo/Speech",
    "PT": "pytorch/pytorch",
    "TT": "pytorch/torchtitan",
    "TE": "NVIDIA/TransformerEngine",
    "SkyRL": "NovaSky-AI/SkyRL",
    "AReaL": "areal-project/AReaL",
    "verl": "volcengine/verl",
    "nccl": "NVIDIA/nccl",
}
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/"


class MacroError(ValueError):
    """A macro that cannot be filled in; the message says in which page."""


class Macros:
    """Fills in one page. `depth` is how many folders below the site's root it lies."""

    def __init__(
        self,
        package: Package,
        page: str,
        glossary: set[str],
        practice: dict[str, str] | None = None,
    ):
        self.extra: dict[str, str] = {}
        self.package, self.page, self.glossary = package, page, glossary
        self.practice = practice or {}
        self.up = "../" * page.count("/")
        self.language = language_of(page)
        self.num_figures = 0
        self.stash = Stash()
        self.faults: list[str] = []

    def expand(self, markdown: str) -> str:
        """The page without macros, what they say in its language."""
        with speaking(self.language):
            return self._expand(markdown)

    def _expand(self, markdown: str) -> str:
        # Code that stands in a fence is left alone.
        kept: list[str] = []

        def keep(text: str) -> str:
            kept.append(text)
            return f"\x02{len(kept) - 1}\x03"

        text = FENCE.sub(lambda m: keep(m[0]), markdown)
        text = BLOCK.sub(lambda m: keep(self._block(m[1], m[2], m[3] or "")), text)
        text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", lambda m: keep(m[0]), text)
        text = MACRO.sub(self._in_line, text)
        text = _math(text, keep, self.stash.put)
        while "\x02" in text:
            text = re.sub(r"\x02(\d+)\x03", lambda m: kept[int(m[1])], text)
        return text

    def _in_line(self, macro: re.Match) -> str:
        text = self._inline(macro[1], macro[2] or "")
        begins_line = not macro.string[: macro.start()].rpartition("\n")[2].strip()
        # "{{ value 2 }}. Because" would be the second item of a list.
        if begins_line and text.isdigit() and re.match(r"[.)]\s", macro.string[macro.end() :]):
            self.faults.append(f"docs/{self.page}: {macro[0]} would become a list's number")
        return text

    def _call(self, kind: str, name: str, argument: str) -> str:
        # All faults of a page are told together.
        try:
            return self._call_now(kind, name, argument)
        except MacroError as error:
            self.faults.append(str(error))
            return ""

    def _call_now(self, kind: str, name: str, argument: str) -> str:
        function = getattr(self, f"{kind}_{name}", None)
        if function is None:
            raise MacroError(f"docs/{self.page}: no {kind} macro {name!r}")
        try:
            return function(argument)
        except MacroError:
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise MacroError(f"docs/{self.page}: {{{{ {name} {argument} }}}}: {words}") from error

    def _block(self, indent: str, name: str, argument: str) -> str:
        kind = "block" if hasattr(self, f"block_{name}") else "inline"
        text = self._call(kind, name, argument)
        return "\n".join(indent + line if line else "" for line in text.split("\n"))

    def _inline(self, name: str, argument: str) -> str:
        return self._call("inline", name, argument)

    # -- Code --

    def _find(self, dotted: str) -> Place:
        place = self.package.find(dotted)
        if place is None or (not place.symbol and dotted != place.page.module):
            raise MacroError(f"docs/{self.page}: the package has no {dotted}")
        return place

    def block_code(self, argument: str) -> str:
        """The code of a symbol, without its docstring, which the page says in its own words."""
        # The words that the prose around an excerpt is about must be in it.
        if bare(self.page).startswith("tour/") and " shows=" not in argument:
            words = 'say which words it shows: shows="a, b"'
            raise MacroError(f"docs/{self.page}: {argument}: {words}")
        try:
            quote = read_quote(self.package, argument)
        except ExcerptError as error:
            raise MacroError(f"docs/{self.page}: {error}") from error
        return self.stash.put(quote_html(quote, self.package, f"{self.up}source/"))

    def block_file(self, path: str) -> str:
        return f"```python\n{(ROOT / path).read_text()}```\n"

    # -- What runs --

    def block_run(self, command: str) -> str:
        """The command, and what it prints."""
        words = shlex.split(command)
        if words[:1] != ["minimegatron"]:
            raise MacroError(f"docs/{self.page}: only minimegatron commands run here: {command}")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = command_line([*words[1:]])
        if code:
            raise MacroError(f"docs/{self.page}: {command} ended with {code}")
        return f"```console\n$ {command}\n{printed.getvalue().rstrip()}\n```\n"

    def _evaluate(self, expression: str) -> object:
        return eval(expression, names_of_cases())  # pages are part of the repository

    def inline_value(self, expression: str) -> str:
        return str(self._evaluate(expression))

    def block_table(self, expression: str) -> str:
        return str(self._evaluate(expression)) + "\n"

    def block_figure(self, argument: str) -> str:
        expression, _, caption = argument.partition(" | ")
        svg = str(self._evaluate(expression)).replace("\n", " ")
        self.num_figures += 1
        svg = unique_ids(svg, f"f{self.num_figures}-")
        picture = self.stash.put(f'<div class="mm-scroll" tabindex="0">{svg}</div>')
        words = (
            f'\n<p class="mm-caption" markdown="1">{self.expand(caption)}</p>' if caption else ""
        )
        return f"{picture}\n{words}"

    def block_player(self, argument: str) -> str:
        """An element for docs/javascripts/player.js; its picture stays where no script runs."""
        options = dict(part.split("=", 1) for part in shlex.split(argument))
        data = "".join(
            f' data-{name.replace("_", "-")}="{escape(value)}"' for name, value in options.items()
        )
        v = int(options.get("vpp", 1))
        svg = cases.timeline(
            options.get("schedule", "1f1b"),
            int(options["pp"]),
            int(options["microbatches"]),
            vpp=v if v > 1 else None,
        )
        self.num_figures += 1
        svg = unique_ids(svg.replace("\n", " "), f"f{self.num_figures}-")
        return self.stash.put(
            f'<div class="mm-player"{data}><div class="mm-scroll" tabindex="0">{svg}</div></div>'
        )

    def block_replay(self, name: str) -> str:
        """An element for a recorded run, if that recording is there."""
        if not list((ROOT / "docs").rglob(f"{name}*")):
            return ""
        return self.stash.put(f'<div class="mm-replay" data-recording="{escape(name)}"></div>')

    def block_unrolled_runs(self, _: str) -> str:
        return runs_table()

    def block_architecture(self, _: str) -> str:
        svg = self.extra["architecture"]
        return self.stash.put(f'<div class="mm-scroll" tabindex="0">{svg}</div>')

    def block_calculator(self, _: str) -> str:
        return self.stash.put(calculator_form(self.up))

    # -- The repository --

    def block_clone(self, _: str) -> str:
        url = repository_url()
        return f"```console\n{clone_lines(url)}\n```\n" if url else ""

    def inline_repository_link(self, _: str) -> str:
        return repository_link(repository_url(), self.up)

    # -- The tour --

    def block_map(self, _: str) -> str:
        return self.stash.put(map_html(self.package, self.up))

    def block_paths(self, _: str) -> str:
        return tour_frame.paths(self.package)

    def block_here(self, _: str) -> str:
        return tour_frame.here(self.package, self._tour_page(), self.stash)

    def block_why_next(self, _: str) -> str:
        return tour_frame.why_next(self.package, self._tour_page())

    def _tour_page(self) -> Page:
        page = page_of(self.page)
        if page is None:
            raise MacroError(f"docs/{self.page}: docs/tour.toml does not list this page")
        return page

    def inline_reading_speeds(self, _: str) -> str:
        return tour_frame.speeds()

    def inline_path_time(self, name: str) -> str:
        """How long a path of the tour takes."""
        (route,) = [route for route in read_routes() if route.name == name]
        return time_words(minutes_of_route(route, self.package))

    def block_problems(self, _: str) -> str:
        """The worked problems of this page of the tour; the build puts them at its end."""
        return self.expand(problems_of(Path(self.page).stem))

    def block_exam(self, _: str) -> str:
        return self.stash.put(exam_html(self.expand, self._evaluate))

    # -- Links --

    def inline_link(self, argument: str) -> str:
        dotted, _, words = argument.partition(" | ")
        place = self._find(dotted)
        shown = words or f"`{place.symbol or place.page.module}`"
        anchor = f"#{place.anchor}" if place.anchor else ""
        if is_line(place.anchor):
            return f'<a href="{self.up}source/{place.page.module}.html{anchor}">{shown}</a>'
        return f"[{shown}]({self.up}source/{place.page.module}.md{anchor})"

    def inline_term(self, argument: str) -> str:
        name, _, words = argument.partition(" | ")
        anchor = name.lower().replace(" ", "-")
        if anchor not in self.glossary:
            raise MacroError(f"docs/{self.page}: the glossary has no {name!r}")
        shown = words or terms(self.language).get(anchor, name)
        own = translated("glossary.md", self.language)
        glossary = own if is_there(own) else "glossary.md"
        return f"[{shown}]({self.up}{glossary}#{anchor}){{ .mm-term }}"

    def inline_thread(self, argument: str) -> str:
        name, number = argument.split("#")
        repository = THREADS.get(name, name)
        shown = f"{repository.partition('/')[2]}#{number}"
        return f"[{shown}](https://github.com/{repository}/issues/{number})"

    def inline_megatron(self, argument: str) -> str:
        return f"[`megatron/{argument}`]({MEGATRON}{argument})"

    def block_practice(self, argument: str) -> str:
        """Links to the notebooks and exercises that this build has, "" if it has none of these."""
        names, _, about = argument.partition(" | ")
        items = []
        for path, title in self.practice.items():
            if any(Path(path).stem.startswith(name) for name in names.split()):
                link = f"[{title}]({self.up}{path})"
                is_notebook = path.startswith("notebooks/")
                name = "page.notebook" if is_notebook else "page.exercise"
                items.append(f"- {say(name, link=link)}")
        if not items:
            return ""
        anchor = f" {{ {own_anchor('do-it-yourself')}}}" if own_anchor("") else ""
        head = say("page.do-it-yourself")
        return f"## {head}{anchor}\n\n{about}\n\n" + "\n".join(items) + "\n"


def names_of_cases() -> dict[str, object]:
    """What an expression on a page may name."""
    own = {
        "step_drawing": step_drawing,
        "chain_table": chain_table,
        "choices": choices,
        "kept": kept,
        "run_drawing": run_drawing,
    }
    return {**vars(layers), **vars(cases), **vars(problem_cases), **own}


def unique_ids(svg: str, prefix: str) -> str:
    """The picture with its own ids, so that several fit on a page."""
    svg = re.sub(r' id="([^"]+)"', rf' id="{prefix}\1"', svg)
    svg = re.sub(
        r'aria-labelledby="([^"]+)"',
        lambda m: 'aria-labelledby="' + " ".join(prefix + w for w in m[1].split()) + '"',
        svg,
    )
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", svg)


# -- Formulas --


def _math(text: str, keep: Callable[[str], str], put: Callable[[str], str]) -> str:
    """`$$...$$` and `$...$` as MathML, which browsers draw themselves: no script, no font."""
    text = re.sub(
        r"^\$\$(.+?)\$\$$",
        lambda m: put(f'<div class="mm-math" tabindex="0">{_mathml(m[1], "block")}</div>'),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(
        r"(?<![\\\w$])\$([^\s$](?:[^$\n]*[^\s$])?)\$(?![\w$])",
        lambda m: keep(_mathml(m[1], "inline")),
        text,
    )


def _mathml(latex: str, display: str) -> str:
    html = convert(latex.strip(), display=display)
    # Markdown reads what stands between inline tags.
    return re.sub(
        r">([^<]+)<",
        lambda m: ">" + re.sub(r"[*_`\[\]\\]", lambda c: f"&#{ord(c[0])};", m[1]) + "<",
        html.replace("\n", " "),
    )


def read_glossary(path: Path) -> set[str]:
    """The anchors of the glossary's terms."""
    return set(re.findall(r"^### .*\{ #([\w-]+) \}", path.read_text(), re.MULTILINE))


def read_practice(out: Path) -> dict[str, str]:
    """The pages of notebooks and exercises that were written: their place and title, in order."""
    found = {}
    for folder in ("notebooks", "exercises"):
        for path in sorted((out / folder).glob("*.md")):
            title = re.search(r"^# +(.+)$", path.read_text(), re.MULTILINE)
            if path.stem != "index" and title:
                found[f"{folder}/{path.name}"] = title[1].strip()
    return found
