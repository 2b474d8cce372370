"""Normal forms, each rule on a case that is worked out by hand from the definition."""

from __future__ import annotations

import pytest

from millrace.rewards.normalise import hendrycks, minerva


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("x = 12", "12"),
        ("12,345 dollars", "12345"),
        ("1,2", "12"),  # digits and commas alone count as one number
        ("(1,2)", "(1,2)"),
        ("an apple", "apple"),
        ("a banana split", "banansplit"),  # "a " goes at the end of a word too
        ("the value $3$ here", "3"),
        ("\\text{Monday}", "Monday"),
        ("\\textbf{7}", "7"),
        ("\\boxed{8}", "8"),
        ("\\overline{AB}", "AB"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("90^\\circ", "90"),
        ("5\\text{ cm}", "5"),
        ("30\\%", "30\\%"),
        ("$\\$5$.", "5"),
    ],
)
def test_minervas_form(written: str, normal: str) -> None:
    assert minerva(written) == normal


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("0.5", "\\frac{1}{2}"),
        (".5", "\\frac{1}{2}"),
        ("1/2", "\\frac{1}{2}"),
        ("-3/4", "\\frac{-3}{4}"),
        ("03/4", "03/4"),
        ("1/2/3", "1/2/3"),
        ("\\dfrac{1}{2}", "\\frac{1}{2}"),
        ("\\tfrac12", "\\frac{1}{2}"),
        ("\\frac1{72}", "\\frac{1}{72}"),
        ("\\frac{72}1", "\\frac{72}1"),
        ("\\frac123", "\\frac{1}{2}3"),
        ("\\frac1", "\\frac1"),
        ("\\sqrt3 + \\sqrt{5}", "\\sqrt{3}+\\sqrt{5}"),
        ("x = 5", "5"),
        ("abc = 5", "abc=5"),
        ("10\\text{ cm}", "10"),
        ("90^{\\circ}", "90"),
        ("50\\%", "50"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\$5", "5"),
        ("", ""),
    ],
)
def test_the_form_of_math(written: str, normal: str) -> None:
    assert hendrycks(written) == normal


@pytest.mark.parametrize("broken", ["\\sqrt", "\\frac", "\\frac\\frac12", "1\\text{ a}\\text{ b}"])
def test_a_formula_that_breaks_off_has_no_form(broken: str) -> None:
    with pytest.raises(ValueError):
        hendrycks(broken)
