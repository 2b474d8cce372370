"""Tokenizers built from the texts of a run, for models built at the start. No download."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from millrace.errors import bad_value

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<unk>")
_DIGITS = "0123456789"

# A single message becomes its content alone. A character tokenizer then needs no words for roles.
_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)

ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
"""A message of a conversation begins with its role's token. `<eos>` ends one of the assistant."""

# A call is `?7.`, as the format `line` reads it. Tools are not shown: training teaches them.
_CONVERSATION = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '?' + call['function']['arguments'].values() | join(' ') + '.' }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)

TEMPLATES = (_TEMPLATE, _CONVERSATION)
"""The chat templates that millrace writes itself."""


def make_tokenizer(
    kind: Literal["chars", "bpe"], texts: Iterable[str], vocab_size: int, *, roles: bool = False
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with `<pad>`, `<eos>` and `<unk>` as tokens 0, 1, 2, and a chat template.

    With `roles`, the tokens of ROLES follow as 3 to 6, and the template writes conversations.

    chars: one token for each character of `texts` and each digit. `vocab_size` is not used. Other
    characters become `<unk>`.

    bpe: byte pairs learned from `texts`, at most `vocab_size` tokens. Every digit stays a single
    token. Everything else may merge across words, so a constant preamble becomes few tokens. Any
    text survives encoding and decoding.

    Raise ConfigError if `vocab_size` is too small for the 256 bytes that bpe starts from.
    """
    from transformers import PreTrainedTokenizerFast

    special = (*SPECIAL, *ROLES) if roles else SPECIAL
    made = _chars(texts, special) if kind == "chars" else _bpe(texts, vocab_size, special)
    made.add_special_tokens(list(special))
    pad, eos, unk = SPECIAL
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
        chat_template=_CONVERSATION if roles else _TEMPLATE,
    )


def _chars(texts: Iterable[str], special: Sequence[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    seen = set(_DIGITS).union(*texts)
    vocabulary = {token: n for n, token in enumerate([*special, *sorted(seen)])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[2]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return made


def _bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(special)
    if vocab_size < least:
        rule = (
            f"a bpe tokenizer starts from {least} tokens: 256 bytes and {len(special)} special ones"
        )
        raise bad_value(
            "model.tokenizer_vocab_size", vocab_size, rule, "512 or more, or model.tokenizer=chars"
        )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made
