"""Each section of the four texts has a row, in both languages, and each row leads to what is there."""

import importlib
import re
from pathlib import Path

macros_module = importlib.import_module("pages.macros")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/walkthroughs.md"
TRANSLATED = ROOT / "docs/zh/walkthroughs.md"
FROM_A_LAUNCH_SCRIPT = [
    *("0", "1.1", "1.2", "1.2.1", "1.2.2", "1.2.3", "1.2.3.1", "2", "2", "3.1", "3.2", "3.3"),
    *("4.1", "4.2.1", "4.2.2", "4.2.3", "4.2.3.1", "4.2.3.2", "4.3"),
    *("5.1", "5.2", "5.2.1", "5.2.2", "5.2.3", "5.2.4", "5.2.5", "6.1", "6.2", "6.3"),
]
THROUGH_A_SCHEDULE = [
    *(
        "The question at the beginning",
        "Overview",
        "1",
        "2",
        "3.1",
        "3.2",
        "3.3",
        "4.1",
        "4.2",
        "4.3",
    ),
    *("5.1", "5.2", "6.1", "6.2", "Picture", "Notes"),
    *("Second answer", "From `train_step`", "Where", "What", "Other programs: `pretrain_mamba`"),
    *("Other programs: `train_rl`", "Other programs: tests", "Why 1", "Why 2", "Why 3", "Why 4"),
    *("Examples", "Call chain"),
]
PIPELINE_PARALLEL = [
    *("The package", "Layout", "`P2PCommunicator`", "`is_single_shape`", "`backward_step`"),
    *("`custom_backward`", "`check_first_val_step`", "`clear_embedding_activation_buffer`"),
    *("The three schedules", "`get_forward_backward_func`", "`get_pp_rank_microbatches`"),
    *("`convert_schedule_table_to_order`", "`get_tensor_shapes`"),
]
COMBINED = [
    *("Functions", "`Shape`", "`combined_1f1b_schedule_for_no_pipelining`"),
    *("`combined_1f1b_schedule_for_interleaved_pipelining`", "`combined_forward_backward_step`"),
]
ERRS = re.compile(r"\*\*The (text|quoted code) errs")
WHERE_TEXTS_ERR = (
    ("1.1", "1.2.3", "3.3", "4.3", "5.2.4"),
    (
        *("The question at the beginning", "4.2", "4.3", "Notes: 1F1B, MTP"),
        *("Other programs: `train_rl`", "Why 3"),
    ),
    ("The three schedules",),
    (
        "`combined_1f1b_schedule_for_interleaved_pipelining`",
        "`combined_forward_backward_step`",
    ),
)


def rows(part: str) -> list[list[str]]:
    lines = re.findall(r"^\| (?!section|章节|---)(.*) \|$", part, re.M)
    return [re.split(r" \| (?![^{]*\}\})", line) for line in lines]


def parts_of(page: Path) -> list[str]:
    _, *parts = page.read_text().split("\n## ")
    return parts


def begins_with(section: str, name: str) -> bool:
    return re.match(rf"{re.escape(name)}(?![\w.])", section) is not None


def test_every_section_has_a_row():
    wanted = (FROM_A_LAUNCH_SCRIPT, THROUGH_A_SCHEDULE, PIPELINE_PARALLEL, COMBINED)
    for part, sections in zip(parts_of(PAGE), wanted, strict=True):
        for (section, *_), name in zip(rows(part), sections, strict=True):
            assert begins_with(section, name), (section, name)


def test_every_row_leads_somewhere_and_says_what_has_changed(package):
    macros = macros_module.Macros(package, "walkthroughs.md", set())
    for section, here, changed in (row for part in parts_of(PAGE) for row in rows(part)):
        links = re.findall(r"\{\{ link ([\w.]+)", here)
        files = re.findall(r"\]\(([\w./-]+)\)", here)
        tests = re.findall(r"`(tests/[\w/.]+)`", here)
        assert links or files or tests, section
        assert all(package.find(name).symbol for name in links), section
        assert all((ROOT / name).exists() for name in tests), section
        for name in files:
            is_notebook = name.startswith("notebooks/")
            source = name.replace(".md", ".py") if is_notebook else f"docs/{name}"
            assert (ROOT / source).is_file(), name
        assert changed.endswith("."), section
    assert "source/minimegatron.pretrain_bert" in macros.expand(PAGE.read_text())
    assert macros.faults == []


def test_the_page_says_where_the_texts_err():
    for part, names in zip(parts_of(PAGE), WHERE_TEXTS_ERR, strict=True):
        said = [section for section, _, changed in rows(part) if ERRS.search(changed)]
        for section, name in zip(said, names, strict=True):
            assert begins_with(section, name), (section, name)


def test_the_translation_has_the_same_rows():
    """The same links and the same names in the same cells, and the same rows where the text errs."""
    for ours, theirs in zip(parts_of(PAGE), parts_of(TRANSLATED), strict=True):
        for english, translated in zip(rows(ours), rows(theirs), strict=True):
            assert _links(english[1]) == _links(translated[1]), english[0]
            assert sorted(_links(english[2])) == sorted(_links(translated[2])), english[0]
            assert _names(english[2]) == _names(translated[2]), english[0]
            assert ("errs" in english[2]) == ("有误" in translated[2]), english[0]
        assert not re.search("[\u4e00-\u9fff]", ours) and re.search("[\u4e00-\u9fff]", theirs)


def _links(cell: str) -> list[str]:
    pages = re.findall(r"\]\((?:\.\./)?([\w./-]+)\)", cell)
    return re.findall(r"\{\{ link ([\w.]+)", cell) + pages


def _names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_the_six_parameters_of_the_launch_scripts_text():
    """Two buffers in each case, where its code would make one of fp32 sums."""
    from cases import buffers

    assert [buffers.count(wide) for wide in (False, True)] == [2, 2]
    assert [buffers.count_by_gradient(wide) for wide in (False, True)] == [2, 1]
    picture = buffers.figure()
    assert "gradients: f 0 to 100, c 100 to 400, a 400 to 800, e 800 to 1050" in picture
    assert "summed in fp32: fp32 0 to 800, fp32 800 to 1600" in picture
