"""Normal forms of mathematical answers, in which two equal answers are the same text.

verl's scorers compare these forms. millrace follows their definitions to the letter, also where
they are crude: a score must not depend on the system that computes it.
"""

from __future__ import annotations

import re

_MINERVA_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", "")),
    *(("mbox", "text"), (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_MINERVA_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots"),
    *("sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds"),
    *("meters", "meals", "edges", "students", "childrentickets", "multiples", "\\text{s}"),
    *("\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_MINERVA_REWRITTEN = tuple(
    (re.compile(pattern), form)
    for pattern, form in (
        (r".*?\$(.*?)\$.*", r"$\1$"),  # a formula inside a sentence stands for the sentence
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


def minerva(answer: str) -> str:
    """Return Minerva's normal form of a final answer (arXiv 2206.14858, appendix D.1).

    It keeps the text after the last `=`, and drops articles, units, spaces and dollar signs. It
    writes `\\frac12` as `\\frac{1}{2}`, and whole numbers without commas.
    """
    text = answer.split("=")[-1]
    for before, after in _MINERVA_REPLACED:
        text = text.replace(before, after)
    for word in _MINERVA_REMOVED:
        text = text.replace(word, "")
    for pattern, form in _MINERVA_REWRITTEN:
        text = pattern.sub(form, text)
    text = text.replace("$", "")
    plain = text.replace(",", "")
    return (plain if plain.isdigit() else text).strip()


_MATH_REPLACED = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")),
    *(("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
_MATH_THEN_REPLACED = (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0."))
_SLASH = re.compile(r"(-?[1-9][0-9]*|0)/(-?[1-9][0-9]*|0)")


def hendrycks(answer: str) -> str:
    """Return the normal form of an answer in MATH (Hendrycks et al. 2021, arXiv 2103.03874).

    It drops spaces, degrees, percent signs and a unit in `\\text{ }`. It writes `1/2`, `0.5` and
    `\\frac12` as `\\frac{1}{2}`. Raise ValueError if the LaTeX breaks off.
    """
    text = answer
    for before, after in _MATH_REPLACED:
        text = text.replace(before, after)
    value, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError(f"two units in {answer!r}")
    for before, after in _MATH_THEN_REPLACED:
        value = value.replace(before, after)
    if not value:
        return value
    value = f"0{value}" if value[0] == "." else value
    name, *right = value.split("=")
    if len(right) == 1 and len(name) <= 2:  # "x = 5"
        value = right[0]
    value = _fractions(_roots(value).replace(" ", ""))
    value = "\\frac{1}{2}" if value == "0.5" else value
    return _SLASH.sub(r"\\frac{\1}{\2}", value) if _SLASH.fullmatch(value) else value


def _roots(text: str) -> str:
    """Return the text with braces around the first character after each `\\sqrt`."""
    head, *radicands = text.split("\\sqrt")
    if "" in radicands:
        raise ValueError(f"a root of nothing in {text!r}")
    braced = (r if r[0] == "{" else f"{{{r[0]}}}{r[1:]}" for r in radicands)
    return "\\sqrt".join((head, *braced))


def _fractions(text: str) -> str:
    """Return the text with braces around both parts of each `\\frac`.

    If a part is missing, the text stays as it is.
    """
    head, *parts = text.split("\\frac")
    braced = [head]
    for part in parts:
        if not part:
            raise ValueError(f"a fraction of nothing in {text!r}")
        if part[0] == "{":
            braced.append(part)
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            braced.append(f"{{{part[0]}}}{part[1:]}")
        else:
            braced.append(f"{{{part[0]}}}{{{part[1]}}}{part[2:]}")
    return "\\frac".join(braced)
