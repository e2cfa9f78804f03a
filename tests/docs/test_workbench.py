"""A reader's own schedule or order: planned and checked by the package, in Python and in the page."""

import importlib
import json
import subprocess
import sys
import zipfile

import pytest
from playwright.sync_api import expect

from minimegatron.core.orders.orders import WRITTEN_HERE, schedule_names
from minimegatron.core.orders.placement import V
from minimegatron.planner.plan import Plan, plan
from minimegatron.planner.simulator import Costs, simulate
from tests.docs.conftest import Watched
from tests.planner.known_orders import dualpipe_v, dualpipe_v_words, registered, zb_h1

browser_python = importlib.import_module("player.browser_python")
in_browser = importlib.import_module("player.in_browser")

ALL_FORWARDS = """
def mine(stage):
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
    for i in range(stage.num_microbatches):
        yield stage.recv_backward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)
"""
BOTH_RECEIVE = """
def mine(stage):
    for i in range(stage.num_microbatches):
        yield stage.recv_backward(i)
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
        yield stage.backward(i)
        yield stage.send_backward(i)
"""


ALL_KINDS = f"""
from minimegatron.core.orders.orders import register_order
from minimegatron.core.orders.placement import V
from minimegatron.core.orders.work import pair

WORDS = {[dualpipe_v_words(4, 8, r) for r in range(4)]}


@register_order("dualpipe-v", placement=V)
def dualpipe_v(rank):
    methods = dict(F=rank.forward, A=rank.backward, B=rank.backward_input, W=rank.backward_weight)
    for word in WORDS[rank.pp_rank].split():
        parts = [
            methods[part[0].upper()](int(part[1:]), int(part[0].islower()))
            for part in word.strip("[]").split("&")
        ]
        yield pair(*parts) if len(parts) > 1 else parts[0]
"""
"""DualPipeV: a V, a split backward, and pairs."""

REGISTER = "from minimegatron.core.orders.orders import register_order\n"
BACKWARD_FIRST = """
def mine(rank):
    for i in range(rank.num_microbatches):
        yield rank.backward(i)
        yield rank.forward(i)
"""


@pytest.fixture(scope="module")
def texts(package) -> dict[str, dict[str, str]]:
    return browser_python.starting_texts(package)


def answer(source: str, p: int = 2, M: int = 3, v: int = 1, G: int = 0) -> dict:
    return json.loads(in_browser.answer(source, p, M, v, G))


# -- What Python answers --


SIZES = [(1, 1), (2, 1), (2, 5), (3, 2), (4, 8), (4, 32), (8, 20)]


@pytest.mark.parametrize(
    ("name", "v", "num_chunks"),
    [
        ("gpipe", 1, 1),
        ("1f1b", 1, 1),
        ("1f1b", 2, 1),  # it knows one chunk, whatever the page shows
        ("interleaved", 1, 2),
        ("interleaved", 2, 2),
        ("combined", 2, 2),
        ("breadth-first", 1, 1),
        ("breadth-first", 4, 4),
        ("zb-h1", 1, 1),
        ("folded-1f1b", 1, 2),
        ("1f1b-pairs", 1, 1),
    ],
)
def test_what_a_reader_starts_from_is_right(texts, name, v, num_chunks):
    sizes = SIZES if num_chunks == v == 1 or name == "folded-1f1b" else [(4, 8)]
    for p, M in sizes:
        said = answer(texts[name]["source"], p, M, v, 4 if v > 1 else 0)
        assert said["problems"] == [] and said["v"] == num_chunks
        assert len(said["rows"]) == p and all(said["rows"])


def test_the_split_backward_is_the_published_one(texts):
    with registered(zb_h1) as name:
        for p, M in ((2, 3), (4, 8), (4, 2)):
            rows = [in_browser.row(actions) for actions in plan(name, p, M).ranks]
            assert answer(texts["zb-h1"]["source"], p, M, 1, 0)["rows"] == rows


def test_every_schedule_can_be_started_from(texts):
    assert {*WRITTEN_HERE} - {"no-pipelining"} <= texts.keys()
    assert {text["kind"] for text in texts.values()} == {"schedule", "order"}


def test_what_is_registered_counts_and_is_forgotten():
    before = schedule_names()
    order = ALL_KINDS + "\n\ndef later(stage):\n    yield stage.forward(0)\n"
    said = answer(order, 4, 8)
    assert (said["name"], said["problems"], said["w"]) == ("dualpipe-v", [], 1)
    with registered(dualpipe_v, V) as name:
        assert said["rows"] == [in_browser.row(actions) for actions in plan(name, 4, 8).ranks]
    assert schedule_names() == before
    # A text that fails after it has registered something leaves nothing either.
    assert answer(ALL_KINDS + "\n1 / 0\n", 4, 8)["line"] == ALL_KINDS.count("\n") + 2
    assert schedule_names() == before


def test_an_order_needs_no_decorator():
    source = "def mine(rank):\n    for i in range(3):\n        yield rank.forward(i, {c})\n"
    for chunk in (0, 1):  # a line, or the chunks that the page shows
        both = source.format(c=chunk) + source.format(c=chunk)[16:].replace("forward", "backward")
        said = answer(both, v=1 + chunk)
        assert said["name"] == "mine"
        assert ("rows" in said) == (chunk == 0), said
        assert {problem["kind"] for problem in said["problems"]} <= {"absent", "order"}


@pytest.mark.parametrize(
    ("change", "kind", "line"),
    [
        (("        yield stage.send_forward(i)\n", ""), "leak", 4),
        (("        yield stage.recv_forward(i)\n", ""), "dependency", 4),
        (("        yield stage.backward(i)\n", ""), "absent", None),
        (("stage.forward(i)", "stage.forward(9)"), "range", 5),
    ],
)
def test_faults_are_named(change, kind, line):
    said = answer(ALL_FORWARDS.replace(*change))
    lines = {problem["kind"]: problem.get("line") for problem in said["problems"]}
    assert kind in lines and lines[kind] == line, said["problems"]
    assert ("rows" in said) == (kind != "range")


def test_a_deadlock_is_named():
    said = answer(BOTH_RECEIVE)
    (problem,) = [problem for problem in said["problems"] if problem["kind"] == "deadlock"]
    assert "rank 0 waits for rank 1 in recv_backward" in problem["text"]
    assert problem["line"] == 4
    assert "rows" in said  # drawn until it sticks


def test_an_order_that_cannot_be_done():
    said = answer(BACKWARD_FIRST)
    assert said["problems"][0] == {
        "kind": "order",
        "text": "rank 0, microbatch 0: backward comes before its forward",
        "line": 4,
    }
    assert "rows" not in said


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("def mine(stage:\n", 1, "SyntaxError"),
        ("def mine(stage):\n    yield stage.forword(0)\n", 2, "forword"),
        ("def mine(stage):\n    yield 3\n", 2, "yielded 3"),
        ("def mine():\n    yield 3\n", None, "one argument"),
        ("def mine(rank):\n    return 3\n", None, "must yield its work"),
        ("def mine(rank):\n    while True:\n        yield rank.forward(0)\n", 3, "let it end"),
        (REGISTER + "@register_order('gpipe')\ndef mine(rank):\n    pass\n", 2, "is taken"),
        ("x = 1\n", None, "none"),
        ("def m(stage):\n    while True: yield stage.forward(0)\n", 2, "endless"),
    ],
)
def test_errors_have_a_line(source, line, words):
    said = answer(source)
    assert words in said.get("error", said.get("say")) and said.get("line") == line


# -- What the site carries --


def test_the_planner_runs_from_its_archive_alone(package, tmp_path):
    """Without torch, and without anything else of the package."""
    archive = tmp_path / "planner.zip"
    browser_python.planner_zip(package, archive)
    assert all(
        not name.startswith("minimegatron/training") for name in zipfile.ZipFile(archive).namelist()
    )
    program = (
        "import sys; sys.modules['torch'] = None\n"
        f"import in_browser; print(in_browser.answer({ALL_FORWARDS!r}, 2, 3, 1, 0))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = [{str(archive)!r}]\n{program}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["problems"] == [], done.stderr


def test_without_npm_the_page_says_so(package, tmp_path, monkeypatch, capsys):
    def fail():
        raise FileNotFoundError("npm is not installed")

    monkeypatch.setattr(browser_python, "fetch_pyodide", fail)
    browser_python.write_browser_python(package, tmp_path)
    assert "npm is not installed" in capsys.readouterr().out
    assert not (tmp_path / "python").exists()
    assert (tmp_path / "javascripts" / "workbench_data.js").exists()


# -- In the page --

WATCH = """() => {
    const figure = document.querySelector(".mmp-progress .mmp-remark");
    window.seen = [];
    const note = () => window.seen.push(figure.textContent);
    new MutationObserver(note).observe(figure, { childList: true });
}"""


PAGE = "tour/train-step.html"


class Bench(Watched):
    """The first player of the page with its "Edit the Python" open."""

    def __init__(self, browser, address):
        super().__init__(browser, (address,), viewport={"width": 1200, "height": 1100})
        self.address = address
        self.open()

    def open(self):
        self.page.goto(self.address + PAGE)
        self.page.locator(".mm-player[data-ready]").first.wait_for()
        self.page.locator(".mmp-rest > summary").first.click()
        self.page.get_by_role("button", name="Edit the Python").first.click()
        self.bench = self.page.get_by_role("region", name="A schedule of your own")
        self.verdict, self.text = (
            self.bench.get_by_role("status"),
            self.bench.get_by_role("textbox"),
        )

    def player(self, expression: str):
        return self.page.evaluate(f"document.querySelector('.mm-player').mmPlayer.{expression}")

    def button(self, name: str):
        return self.bench.get_by_role("button", name=name)

    def start_from(self, name: str):
        self.bench.get_by_role("combobox").select_option(name)

    def run(self, source: str, words: str):
        self.text.fill(source)
        self.text.press("Control+Enter")
        expect(self.verdict).to_contain_text(words)

    def shows(self, step: Plan):
        """As many bars as the plan has work, and a step as long as Python says."""
        bars = self.player("timeline.view.tracks.map((track) => track.lanes[0].bars.length)")
        assert bars == [len(list(step.work(rank))) for rank in range(step.config.pp_size)]
        costs = Costs.of_stages(1, 2, num_model_chunks=step.config.num_model_chunks)
        assert self.player("scene.step.makespan") == simulate(step, costs).makespan


def needs_python(site):
    if not (site / "python").exists():
        pytest.skip("the site was built without Python for the browser: npm could not fetch it")


def test_editing_the_python(browser, address, site):
    needs_python(site)
    with Bench(browser, address) as bench:
        ours = bench.player("scene.plan.ranks")
        expect(bench.bench).to_contain_text("MB) from this site")
        assert not any("/python/" in url for url in bench.requests)
        bench.page.evaluate(WATCH)

        bench.button("Run").click()
        # Under four busy loops, Python was once not loaded within 30 s.
        expect(bench.verdict).to_contain_text("one_f_one_b is right", timeout=240_000)
        check_progress(
            bench.page.evaluate("window.seen"), bench.page.evaluate("MM.workbench.python")
        )
        expect(bench.verdict).to_contain_text("It takes 33; 1F1B takes 33")
        assert bench.player("scene.plan.name") == "one_f_one_b"
        assert bench.player("scene.plan.ranks") == ours

        check_faults(bench)
        check_orders(bench)
        check_stop(bench)
        check_edits_are_kept(bench)


def check_progress(seen: list[str], python: dict):
    total = f"{sum(python['sizes'].values()) / 1e6:.1f}"
    loaded = [float(words.split()[0]) for words in seen if words.endswith(f" of {total} MB")]
    assert loaded and loaded == sorted(loaded) and loaded[0] < float(total)
    rest = [words for words in seen if " MB" not in words]
    assert rest[0] == "Starting Python … 0 s" and "Planning … 0 s" in rest


def check_faults(bench: Bench):
    bench.run(BOTH_RECEIVE, "deadlock: rank 2 waits for rank 3 in recv_backward")
    bench.sees(".mmp-figures", "until it stands still")
    bench.button("Line 4:").first.click()
    selected = "text => text.value.slice(text.selectionStart, text.selectionEnd)"
    assert bench.text.evaluate(selected) == "        yield stage.recv_backward(i)"
    bench.run("def mine(stage)\n    yield stage.forword(0)\n", "Line 1: SyntaxError")
    bench.run("def mine(stage):\n    yield stage.forword(0)\n", "Line 2: AttributeError")
    bench.sees(".mmp-figures", "= (M + p − 1)(f + b)")
    bench.run("x = 1\n", "There is no function.")
    bench.run(ALL_FORWARDS, "mine is right")
    bench.sees(".mmp-figures", "8 8 8 8")
    bench.page.get_by_role("slider", name="Microbatches").press("ArrowLeft")
    bench.sees(".mmp-figures", "7 7 7 7")
    bench.page.get_by_role("slider", name="Microbatches").press("ArrowRight")
    bench.sees(".mmp-figures", "8 8 8 8")


def check_orders(bench: Bench):
    times = [bench.page.get_by_label(name) for name in ("Input gradient", "A pair takes")]
    for field in times:
        expect(field).to_be_hidden()
    bench.start_from("zb-h1")
    bench.button("Run").click()
    expect(bench.verdict).to_contain_text("zb-h1 is right. ")
    expect(bench.verdict).to_contain_text("It takes 27; 1F1B takes 33")
    expect(times[0]).to_be_visible()
    expect(times[1]).to_be_hidden()

    bench.run(ALL_KINDS, "dualpipe-v is right")
    with registered(dualpipe_v, V) as name:
        bench.shows(plan(name, 4, 8))
    for field in times:
        expect(field).to_be_visible()
    bench.player("timeline.choose('1:F6.0&B2.1')")
    bench.sees(".mmp-inspector", "Stage 1: forward of microbatch 6")
    bench.player("timeline.choose(null)")


def check_stop(bench: Bench):
    bench.text.fill("def mine(stage):\n    while True:\n        pass\n")
    bench.text.press("Control+Enter")
    expect(bench.bench.get_by_text("Planning …")).to_be_visible()
    (worker,) = bench.page.workers
    with worker.expect_event("close"):
        bench.button("Stop").click()
    expect(bench.verdict).to_contain_text("Stopped.")
    expect(bench.button("Stop")).to_be_hidden()
    expect(bench.button("Run")).to_be_focused()


def check_edits_are_kept(bench: Bench):
    """`zb-h1` and `1f1b` have been edited above."""
    endless = "def mine(stage):\n    while True:\n        pass\n"
    expect(bench.text).to_have_value(endless)
    bench.start_from("1f1b")
    expect(bench.text).to_have_value(ALL_FORWARDS)
    bench.page.get_by_role("button", name="Edit the Python").click()
    expect(bench.bench).to_be_hidden()
    bench.page.get_by_role("button", name="Edit the Python").click()
    expect(bench.text).to_have_value(ALL_FORWARDS)
    bench.start_from("zb-h1")
    bench.text.fill(endless + "# more")
    bench.open()
    expect(bench.text).to_have_value(endless + "# more")  # what was worked at last
    expect(bench.bench).to_contain_text("kept in this browser")

    bench.button("Start again").click()
    original = bench.page.evaluate("MM.workbench.texts['zb-h1'].source")
    expect(bench.text).to_have_value(original)
    expect(bench.button("Start again")).to_be_disabled()
    bench.button("Bring my text back").click()
    expect(bench.text).to_have_value(endless + "# more")
    expect(bench.button("Bring my text back")).to_be_hidden()


def test_pages_opened_as_files_say_why(browser, site):
    with Watched(browser, ("file:",)) as watched:
        watched.page.goto((site / PAGE).as_uri())
        watched.page.locator(".mm-player[data-ready]").first.wait_for()
        watched.page.locator(".mmp-rest > summary").first.click()
        watched.page.get_by_role("button", name="Edit the Python").first.click()
        bench = watched.page.get_by_role("region", name="A schedule of your own")
        expect(bench).to_contain_text("A page opened as a file may not run Python")
        expect(bench.get_by_role("button", name="Run")).to_be_disabled()
        watched.page.set_viewport_size({"width": 360, "height": 740})
        right = "all => Math.max(...all.map((one) => one.getBoundingClientRect().right))"
        edge = bench.evaluate("bench => bench.getBoundingClientRect().right")
        assert bench.locator("select, button, textarea, span").evaluate_all(right) < edge <= 360
        # Where the browser stores nothing, a text lasts as long as the page.
        throws = "void (Storage.prototype.{} = () => {{ throw new Error('no storage'); }})"
        for method in ("getItem", "setItem", "removeItem"):
            watched.page.evaluate(throws.format(method))
        text, texts = bench.get_by_role("textbox"), bench.get_by_role("combobox")
        text.fill("# mine")
        expect(bench).to_contain_text("This browser stores nothing")
        texts.select_option("gpipe")
        texts.select_option("1f1b")
        expect(text).to_have_value("# mine")
