"""Tables of the guides match the code: modes, commands, messages, keys of a resume."""

from __future__ import annotations

import ast
import re

import typer

from millrace.cli.main import app
from millrace.config import recipe
from millrace.observe.guard import CAUSES
from millrace.run import resume_checks
from millrace.schedule.modes import MODES
from tests.docs.pages import ROOT, codes, rows

DOCS = ROOT / "docs"


def first_codes(page: str, heading: str) -> list[str]:
    return [code for cells in rows(DOCS / page, heading) for code in codes(cells[0])]


def test_every_mode_is_in_its_table() -> None:
    assert first_codes("modes.md", "`mode=`") == list(MODES)


def test_the_arithmetic_of_the_quickstart() -> None:
    derived = recipe.load(ROOT / "millrace" / "recipes" / "quickstart.yaml").derived()
    numbers = [cells for cells in rows(DOCS / "modes.md", "key") if cells[1].isdigit()]
    said = {cells[0].partition(",")[0].strip("`"): int(cells[1]) for cells in numbers}
    for name in ("window", "capacity", "lookahead", "lag_bound"):
        assert said[name.replace("_", " ")] == getattr(derived, name)


def test_every_command_is_in_its_table() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    said = [tuple(code.split()[1:3]) for code in first_codes("cli.md", "command")]
    names = {words[0] for words in said} - {"--version"}
    context = typer.Context(root)
    assert names == set(root.list_commands(context))
    bench = root.get_command(context, "bench")
    assert isinstance(bench, typer.core.TyperGroup)
    assert {words[1] for words in said if words[0] == "bench"} == set(bench.commands)


def test_every_alarm_is_in_the_troubleshooting() -> None:
    assert first_codes("troubleshooting.md", "alarm") == list(CAUSES)


def texts_of_the_code() -> str:
    """Return every string of the package. A NUL replaces each formatted value."""
    found: list[str] = []
    for path in (ROOT / "millrace").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_symptom_is_a_message_of_the_code() -> None:
    said, code = first_codes("troubleshooting.md", "symptom"), texts_of_the_code()
    assert len(said) > 40
    names = {"AutoTokenizer"}
    missing = [
        symptom
        for symptom in said
        if symptom not in names and not all(part.strip() in code for part in symptom.split("..."))
    ]
    assert not missing


def test_the_table_of_a_resume_is_that_of_the_code() -> None:
    table = {
        code: cells[1]
        for cells in rows(DOCS / "checkpoints.md", "key")
        for code in codes(cells[0])
        if len(cells) == 2
    }
    wide = {key.removesuffix("*"): text for key, text in table.items() if key.endswith(".*")}

    def said(key: str) -> str:
        return table.get(key) or next((t for k, t in wide.items() if key.startswith(k)), "")

    refused = (*resume_checks.RULES, resume_checks.BY_ROWS)
    ruled = {key for rule in refused for key in rule.keys} | set(resume_checks.BY_MODELS)
    past = {key for rule in resume_checks.PAST for key in rule.keys}
    assert not {key for key in ruled if not re.search("refused|except", said(key))}
    assert not {key for key in past if "no effect" not in said(key)}
    assert not {key for key in table if not key.endswith("*")} - ruled - past
