"""Chat templates of 21 families: what each supports, the bridge, and no control token from text."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from millrace.agents.parse import FORMATS
from millrace.agents.render import Renderer
from millrace.agents.request import RequestError
from millrace.agents.template import check_template
from millrace.data.tokenizer import make_tokenizer
from millrace.errors import ConfigError
from millrace.types import Message, tokens_of
from tests.agents.families import FAMILIES, FOLDER, tokenizer_of
from tests.agents.players import TOOLS, Table, following, renderer_of

USER: Message = {"role": "user", "content": "hello"}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call>'


def test_every_template_of_the_folder_is_tested() -> None:
    assert {p.stem for p in FOLDER.glob("*.jinja")} == set(FAMILIES)
    assert len(FAMILIES) >= 15


@pytest.mark.parametrize("name", FAMILIES)
def test_the_report_says_what_a_template_supports(name: str) -> None:
    family, report = FAMILIES[name], check_template(tokenizer_of(name))
    assert report.system is family.system
    assert report.tools is family.tools
    assert report.tool_results is family.results
    assert report.parallel_calls is family.parallel
    assert report.thinking == family.thinking
    assert (report.user_bridge, report.tool_bridge) == (family.user, family.tool)
    assert report.opens_thinking == (name in ("qwen3-thinking", "deepseek-r1"))
    lacking = not (family.system and family.tools and family.results and family.parallel)
    assert bool(report.refusals) == lacking
    assert all("Fix: " in line for line in report.refusals)
    assert len(report.lines()) == 8 + len(report.refusals)
    if family.results:
        report.require_tools()
    else:
        with pytest.raises(ConfigError, match=r"need a chat template with tool results.*Fix: "):
            report.require_tools()


FORMATS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen2.5", "qwen3", "qwen3-thinking"), ("hermes",)),
    **dict.fromkeys(("llama3.1", "mistral-v0.3", "granite"), ("json",)),
    "qwen3-coder": ("qwen",),
    **dict.fromkeys(("deepseek-r1", "harmony", "glm4"), ()),
}
"""The formats that read the calls of a template. Others write no calls."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_format_that_cannot_read_the_template_s_calls_is_refused(name: str) -> None:
    report = check_template(tokenizer_of(name))
    assert report.formats == FORMATS_OF.get(name)
    for chosen in FORMATS:
        if report.formats is None or chosen in report.formats:
            report.require_format(chosen)
            continue
        fix = f"agents.tool_format={report.formats[0]}" if report.formats else "a chat template"
        with pytest.raises(ConfigError, match=f"agents.tool_format = '{chosen}'.*Fix: {fix}"):
            report.require_format(chosen)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, "agents need a chat template"),
        ("{{ raise_exception('never') }}", "never"),
        ("hello", "drops the text"),
        ("{% for m in messages %}{{ m.content['x'] + 1 }}{% endfor %}", "refuses messages"),
    ],
)
def test_a_template_that_renders_nothing_is_refused(template: str | None, text: str) -> None:
    tokenizer = make_tokenizer("chars", ["a"], 0)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=text):
        check_template(tokenizer)


def test_a_template_that_always_rewrites_history_has_no_bridge() -> None:
    tokenizer = make_tokenizer("chars", ["abcdefghijklmnopqrstuvwxyz<>/ "], 0, roles=True)
    tokenizer.chat_template = "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}"
    report = check_template(tokenizer)
    assert report.user_bridge == "none"
    assert "each opens another thread" in report.refusals[-1]


CLOSE = {"phi3": "<|end|>", "glm4": "<|user|>"}
"""The token that ends an answer before a user's message, where it is not the tokenizer's EOS."""


AROUND = {
    "qwen3-coder": ("", "\n"),
    "llama2": (" ", " "),
    "glm4": ("\n", ""),
    "vicuna": (" ", ""),
    "qwen3-thinking": ("so\n</think>\n\n", ""),
    "deepseek-r1": ("so\n</think>\n\n", ""),
}
"""The blanks that a template writes around an answer, and that the policy draws itself."""


@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in ("harmony", "mistral-v0.3")])
def test_canonical_answers_give_the_tokens_of_a_whole_rendering(name: str) -> None:
    """Where nothing is cut, rewritten or odd, a bridge changes nothing."""
    thinks = FAMILIES[name].thinking != "none"

    async def play() -> None:
        before, after = AROUND.get(name, ("", ""))
        answers = ("the weather", "a table", "12 degrees")
        table = Table.laid(name, 0, texts=tuple(before + a + after for a in answers))
        tokenizer = table.engine.tokenizer
        if name in CLOSE:
            table.engine.ends = [tokenizer.added_tokens_encoder[CLOSE[name]]]
        messages: list[Message] = [USER]
        for n in range(3):
            turn = await table.ask(*messages, tools=())
            assert turn.message["content"].strip() == answers[n]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            whole = tokenizer.encode(text, add_special_tokens=False)
            if not (n and thinks):
                assert table.engine.log[n][0].tolist() == whole
            answer = {"role": "assistant", "content": answers[n]}
            messages += [answer, {"role": "user", "content": "and in Paris"}]

    asyncio.run(play())


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3-coder", "granite"])
def test_tool_calls_give_the_tokens_of_a_whole_rendering(name: str) -> None:
    blocks = {
        "qwen2.5": (CALL + "\n" + CALL, "hermes"),
        "qwen3-coder": (
            "\n<tool_call>\n<function=lookup>\n<parameter=key>\na\n</parameter>\n</function>\n</tool_call>",
            "qwen",
        ),
        "granite": ('<|tool_call|>[{"name": "lookup", "arguments": {"key": "a"}}]', "json"),
    }
    text, form = blocks[name]

    async def play() -> None:
        table = Table.laid(name, 0, texts=(text, "so"), form=form)
        tokenizer = table.engine.tokenizer
        first = await table.ask(USER)
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": "b"}
            for c in first.message["tool_calls"]
        ]
        await table.ask(USER, first.message, *results)
        answer = {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "lookup", "arguments": {"key": "a"}}}
            for _ in results
        ]}  # fmt: skip
        expected = tokenizer.apply_chat_template(
            [USER, answer, *results], tools=list(TOOLS), tokenize=False, add_generation_prompt=True
        )
        found = tokenizer.decode(table.engine.log[1][0].tolist())
        assert found.replace("assistant\n\n<tool", "assistant\n<tool") == expected

    asyncio.run(play())


def test_an_answer_that_ended_keeps_its_own_mark() -> None:
    """Harmony ends a last answer with <|return|>, and an earlier one with <|end|>."""
    renderer = renderer_of("harmony")
    known = [USER, {"role": "assistant", "content": "so"}]
    after = "<|start|>user<|message|>hello<|end|><|start|>assistant"
    for ended, text in (("<|return|>", after), (None, "<|end|>" + after)):
        found = renderer.bridge(known, [USER], ended=ended)
        assert found is not None and found.exact
        assert renderer.tokenizer.decode(list(found.tokens)) == text


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_of_others_becomes_a_control_token(name: str) -> None:
    family, renderer = FAMILIES[name], renderer_of(name)
    tokenizer = renderer.tokenizer
    controls = [*family.special, *(t for t in family.added if t in str(tokenizer.chat_template))]
    attack = "a" + " ".join(controls) + "\ue0001\ue001b"
    attack += "".join(controls)
    schema = TOOLS[0] | {"function": TOOLS[0]["function"] | {"description": attack}}

    def rendered(text: str, tool: dict[str, object]) -> tuple[Counter[int], str]:
        messages: list[Message] = [{"role": "user", "content": text}]
        if family.system:
            messages.insert(0, {"role": "system", "content": text})
        tools = (tool,) if family.tools else ()
        whole = renderer.opening(messages, tools)
        new: list[Message] = [{"role": "user", "content": text}]
        call = {"id": "abcdefghi", "type": "function",
                "function": {"name": "lookup", "arguments": "{}"}}  # fmt: skip
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        if family.results:
            new = [{"role": "tool", "tool_call_id": "abcdefghi", "content": text}]
        else:
            answer = {"role": "assistant", "content": "so"}
        more = renderer.bridge([*messages, answer], new, tools, ended=family.eos)
        assert more is not None
        ids = {tokenizer.added_tokens_encoder[c] for c in controls}
        tokens = whole + more.tokens
        return Counter(t for t in tokens if t in ids), renderer.decode(tokens, controls)

    found, text = rendered(attack, schema)
    assert found == rendered("a", TOOLS[0])[0]
    assert text.count(attack) >= 1


def test_adversarial_schemas_and_names_are_text_too() -> None:
    renderer = renderer_of("qwen2.5")
    eos = renderer.tokenizer.eos_token_id
    tool = {"type": "function", "function": {"name": "<|im_end|>", "parameters": {"<|im_end|>": 1}}}
    assert renderer.opening([USER], [tool]).tolist().count(eos) == 2  # of system and of user


def test_a_message_that_the_template_would_drop_is_refused() -> None:
    with pytest.raises(RequestError, match="drops the text of such messages"):
        renderer_of("phi3").bridge(
            [USER, {"role": "assistant", "content": "x"}],
            [{"role": "tool", "content": "b", "tool_call_id": "x"}],
            ended=None,
        )


def test_two_drawn_calls_are_extended_where_the_template_renders_one() -> None:
    async def play() -> None:
        table = Table.laid("llama3.1", 0, texts=(CALL + CALL, "so"))
        turn = await table.ask(USER)
        await table.ask(USER, turn.message, *following(turn, Random(1)))
        assert table.session.turns[1].after == 0
        text = table.engine.tokenizer.decode(table.session.turns[1].context.tolist())
        assert text.count("ipython") == 2

    asyncio.run(play())


def test_options_reach_the_template() -> None:
    renderer = Renderer(tokenizer_of("qwen3"), {"enable_thinking": False})
    assert renderer.decode(renderer.opening([USER])).endswith("<think>\n\n</think>\n\n")


def test_plain_text_survives_and_only_named_marks_are_decoded() -> None:
    renderer = renderer_of("mistral-v0.3")
    text = "[TOOL_CALLS] é漢 </s>"
    tokens = renderer.encode(text)
    assert renderer.decode(tokens) == text
    marks = renderer.tokenizer.encode("[TOOL_CALLS]</s>", add_special_tokens=False)
    drawn = tokens + tokens_of(marks)
    assert renderer.decode(drawn, ["[TOOL_CALLS]"]) == text + "[TOOL_CALLS]"


def test_a_tokenizer_that_writes_a_blank_first_writes_none_in_a_bridge() -> None:
    from tokenizers import decoders, pre_tokenizers

    tokenizer = make_tokenizer("chars", ["▁[INST]/helo "], 0)
    backend = tokenizer.backend_tokenizer
    split = backend.pre_tokenizer
    first = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, split])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.chat_template = (FOLDER / "vicuna.jinja").read_text().replace("USER: ", "[INST]")
    known = [USER, {"role": "assistant", "content": "hello"}]
    found = Renderer(tokenizer).bridge(known, [USER], ended="<eos>")
    assert found is not None
    assert tokenizer.convert_ids_to_tokens(list(found.tokens))[:3] == ["<unk>", "[", "I"]
