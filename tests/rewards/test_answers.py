"""Where a response has its answer: each form on texts whose answer is plain to the eye."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.rewards.answers import Form, extract


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("tag", "<answer>1</answer> no, <answer>\n2 </answer>.", "2"),
        ("tag", "<answer>1</answer></answer> <answer>3", "1"),
        ("tag", "1", None),
        ("hashes", "#### 1 and then #### -1,234.5", "-1234.5"),
        ("hashes", "####5", None),
        ("hashes", "#### 7" + " " * 295, None),  # its first character is the 301st from the end
        ("hashes", "#### 7" + " " * 294, "7"),
        ("number", "5 of them, then 6.", "6."),  # the full stop is part of it, as in verl
        ("number", "so 5 is it .", "5"),
        ("number", "none", None),
        ("boxed", "\\boxed{1} and \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("boxed", "$\\boxed 5$ or \\boxed{6}", "5"),
        ("boxed", "\\boxed{1} and \\boxed{2", None),
        ("boxed", "\\fbox{3}", None),
        ("boxed_end", "\\boxed{7}" + "x" * 91, "7"),
        ("boxed_end", "\\boxed{7}" + "x" * 92, None),
        ("answer_line", "Answer: 1\nANSWER :  $x=\\frac12$ cm", "\\frac{1}{2}"),
        ("answer_line", "The answer is 5", None),
        ("formula", "so \\boxed{1/2}", "\\frac{1}{2}"),
        ("formula", "no idea", None),
        ("any", "<answer>1</answer> \\boxed{2} #### 3\nAnswer: 4", "1"),
        ("any", "\\boxed{2} #### 3\nAnswer: 4", "2"),
        ("any", "#### 3\nAnswer: 4", "3"),
        ("any", "Answer: 4", "4"),
        ("any", "4", None),
    ],
)
def test_the_answer_is_where_the_form_says(form: Form, text: str, answer: Any) -> None:
    assert extract(text, form) == answer


_PIECES = st.sampled_from(["<answer>", "</answer>", "a", "\n", " b ", "\\boxed{", "{", "}"])


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_the_last_tag_is_the_last_that_a_search_from_the_left_finds(text: str) -> None:
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    assert extract(text, "tag") == (found[-1].strip() if found else None)


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_the_braces_of_a_box_match(text: str) -> None:
    answer = extract(text, "boxed")
    if answer is not None:
        assert answer.count("{") == answer.count("}")
        assert f"\\boxed{{{answer}}}" in text


def test_a_response_of_tags_alone_is_read_in_time() -> None:
    """A policy that repeats itself writes such responses. Here a regular expression needs minutes."""
    assert extract("<answer>" * 100_000, "any") is None
