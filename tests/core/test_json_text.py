"""JSON from outside, and JSON for a page."""

import json

import pytest

from minimegatron.core.json_text import (
    MOST_DEPTH,
    check_depth,
    json_for_html,
    parse_json,
    read_json,
)


def nested(depth: int) -> str:
    return (
        "[" * (depth // 2)
        + '{"a":' * (depth - depth // 2)
        + "1"
        + "}" * (depth - depth // 2)
        + "]" * (depth // 2)
    )


def test_as_deep_as_allowed_is_read_and_deeper_refused(tmp_path):
    assert parse_json(nested(MOST_DEPTH), "x") == json.loads(nested(MOST_DEPTH))
    for depth in (MOST_DEPTH + 1, 900, 200_000):
        with pytest.raises(ValueError, match="plan.json: lists or objects are nested deeper than"):
            parse_json(nested(depth), "plan.json")
    path = tmp_path / "deep.json"
    path.write_text(nested(5000))
    with pytest.raises(ValueError, match="deep.json: lists or objects are nested deeper"):
        read_json(path)


def test_brackets_in_strings_do_not_count():
    value = {"a": "[{" * 500, "b": ['"]]]}', "\\", '\\"[['], "c": [[]] * 300}
    assert parse_json(json.dumps(value), "x") == value
    hidden = [json.loads(nested(MOST_DEPTH)), '"]]]]]]' * 100]
    with pytest.raises(ValueError, match="deeper"):
        parse_json(json.dumps(hidden), "x")


@pytest.mark.parametrize("text", [b"{", b"", b'"\xff"', "[1, 2"])
def test_what_is_no_json_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"^some/file: not JSON \("):
        parse_json(text, "some/file")


def test_a_byte_order_mark_is_no_fault():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "x") == {"a": 1}


def test_the_depth_of_values_is_checked_without_recursion():
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match="the plan: lists or objects are nested deeper"):
        check_depth(value, "the plan")
    check_depth(json.loads(nested(MOST_DEPTH)), "the plan")
    with pytest.raises(ValueError, match="nested deeper"):
        check_depth(json.loads(nested(MOST_DEPTH + 1)), "the plan")
    while value:  # Python would free it by recursion
        value = value[0]


def test_json_for_html_holds_nothing_that_html_reads():
    value = {"a<b": ["</script>", "<!--", "<script", "]]>", "\u2028"]}
    text = json_for_html(value)
    assert "<" not in text and "\u2028" not in text
    assert json.loads(text) == value


def test_lists_and_objects_in_turn_count_alike():
    """Was: accepted up to twice the depth."""
    for depth in (MOST_DEPTH + 2, 2 * MOST_DEPTH):
        text = '[{"a":' * (depth // 2) + "0" + "}]" * (depth // 2)
        with pytest.raises(ValueError, match="nested deeper"):
            parse_json(text, "plan.json")


def test_a_page_gets_no_number_that_a_browser_cannot_read():
    with pytest.raises(ValueError):
        json_for_html({"start": float("nan")})
