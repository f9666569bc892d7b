"""`tokenize`: a text, a prompt with its completion, or a conversation as tokens and labels.

    messages    user "2+2?"   assistant "4"            labels of completions only
    text        <|user|>\\n2+2?\\n<|assistant|>\\n4<eos>\\n
                - - - - - - - - - - - - - - - - -  4<eos> -

Conversations are written out by the tokenizer's chat template.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...mesh.text import shortened
from .packing import IGNORED

# For tokenizers without a chat template of their own.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_FORMS = (
    '{"text": "..."}, {"prompt": "...", "completion": "..."} or '
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
)


def read_records(path: str | os.PathLike[str]) -> list[Any]:
    """read_records(path) -> the records of a file, for `tokenize`.

    Args:
        path: a file of JSON lines, *.jsonl, with a record in each line; or any other text, whose
            paragraphs, with empty lines between, are records.

    Raises:
        ValueError: a line that is not JSON, or no records; the text names file and line.
        OSError: the file cannot be read.

    Communication: none.

    Example:
        >>> records = sm.training.read_records("chat.jsonl")
        >>> documents = [sm.training.tokenize(record, tokenizer) for record in records]
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    records: list[Any] = []
    if path.suffix != ".jsonl":
        records = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    records.append(json.loads(line))
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{path}, line {number} is not JSON: {shortened(error)}"
                    ) from None
    if not records:
        raise ValueError(f"{path} has no records: it is empty")
    return records


def tokenize(
    record: Mapping[str, Any] | str, tokenizer: Any, *, completions_only: bool = True
) -> dict[str, list[int]]:
    """tokenize(record, tokenizer) -> {"input_ids", "labels"}, for `pack` and for causal models.

    Args:
        record: a text, or one of the forms that files of JSON lines have:
            {"text": text}: every token is learned, and the end of the text.
            {"prompt": text, "completion": text}: the completion and its end are learned.
            {"messages": [{"role", "content"}, ...]}: written out by the tokenizer's chat template,
            or `DEFAULT_CHAT_TEMPLATE` if it has none; what "assistant" says is learned.
        tokenizer: a tokenizer of transformers with offsets (a fast one). If it has an `eos_token`,
            that is the end of a text and of a completion; a chat template has its own.
        completions_only: whether prompts, and what others say, have labels of -100.

    Raises:
        ValueError: a record of another form, a tokenizer without offsets, or a chat template that
            writes the beginning of a conversation in another way when more follows, so that it is
            unknown which text is the assistant's.

    Communication: none.

    Example:
        >>> record = {"messages": [{"role": "user", "content": "2+2?"},
        ...                        {"role": "assistant", "content": "4"}]}
        >>> document = sm.training.tokenize(record, tokenizer)
        >>> rows = sm.training.pack([document], 1024)
    """
    if isinstance(record, str):
        record = {"text": record}
    if not isinstance(record, Mapping):
        raise ValueError(f"tokenize: a record is {_FORMS}, not a {type(record).__name__}")
    end = getattr(tokenizer, "eos_token", None) or ""
    if isinstance(record.get("messages"), Sequence):
        text, learned = _conversation(record["messages"], tokenizer)
        has_specials = True
    elif isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        text = record["prompt"] + record["completion"] + end
        learned, has_specials = [(len(record["prompt"]), len(text))], False
    elif isinstance(record.get("text"), str):
        text = record["text"] + end
        learned, has_specials = [(0, len(text))], False
    else:
        raise ValueError(f"tokenize: a record is {_FORMS}, not {shortened(record)}")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenize: {type(tokenizer).__name__} does not say which characters its tokens are; "
            "load a fast tokenizer"
        )
    encoded = tokenizer(
        text, add_special_tokens=not has_specials, return_offsets_mapping=True, verbose=False
    )
    ids = list(encoded["input_ids"])
    if not completions_only:
        return {"input_ids": ids, "labels": list(ids)}
    labels = [
        token if start < stop and any(a <= start < b for a, b in learned) else IGNORED
        for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return {"input_ids": ids, "labels": labels}


def _conversation(messages: Sequence[Any], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the intervals of it that the assistant says."""
    if not messages:
        raise ValueError("tokenize: a conversation without messages")
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise ValueError(
                'tokenize: a message is {"role": "...", "content": "..."}, both texts, not '
                f"{shortened(message)}"
            )
    template = None if tokenizer.chat_template else DEFAULT_CHAT_TEMPLATE

    def text_of(count: int, has_prompt: bool) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages[:count]),
                chat_template=template,
                tokenize=False,
                add_generation_prompt=has_prompt,
            )
        except Exception as error:  # of jinja2, such as those that templates raise themselves
            if type(error).__module__.partition(".")[0] != "jinja2":
                raise
            raise ValueError(
                f"tokenize: the chat template refuses {shortened(messages)}: {error}"
            ) from error

    text = text_of(len(messages), False)
    learned = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        after = text_of(number + 1, False)
        if number:
            before = text_of(number, True)
        else:  # a template may need a message: what it adds after one asks for the answer
            asks = text_of(1, True).removeprefix(after)
            before = after[: after.find(asks)] + asks
        if not text.startswith(after) or not after.startswith(before):
            raise ValueError(
                f"tokenize: the chat template of {type(tokenizer).__name__} writes the first "
                f"{number + 1} of {len(messages)} messages in another way than in the whole "
                "conversation, so it is unknown which text is the assistant's; end conversations "
                "after their first answer, or set tokenizer.chat_template"
            )
        content = after.rstrip("\n") if template else after
        learned.append((len(before), len(content)))
    return text, learned
