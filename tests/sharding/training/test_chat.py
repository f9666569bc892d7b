"""Texts, completions and conversations as tokens, of which completions are learned."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from shardmesh.sharding.training.chat import read_records, tokenize

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The last answer alone is written out, as templates do that drop earlier thoughts.
FORGETFUL = (
    "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}"
    "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4, né"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6\n"},
]


def byte_level(template: str | None = None) -> Any:
    """Return a fast tokenizer with a token for each byte, and an end of text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def learned_text(document: dict[str, list[int]], tokenizer: Any) -> str:
    """Return what is learned, with | where something that is not learned is left out."""
    runs: list[list[int]] = [[]]
    for token, label in zip(document["input_ids"], document["labels"], strict=True):
        assert label in (token, -100)
        if label == -100 and runs[-1]:
            runs.append([])
        elif label != -100:
            runs[-1].append(token)
    return "|".join(tokenizer.decode(run) for run in runs if run)


def test_text_and_its_end_are_learned():
    tokenizer = byte_level()
    for record in ("a text", {"text": "a text"}):
        document = tokenize(record, tokenizer)
        assert document["labels"] == document["input_ids"]
        assert learned_text(document, tokenizer) == "a text<eos>"


def test_completion_and_its_end_are_learned():
    tokenizer = byte_level()
    record = {"prompt": "2+2=", "completion": "4"}
    document = tokenize(record, tokenizer)
    assert tokenizer.decode(document["input_ids"]) == "2+2=4<eos>"
    assert learned_text(document, tokenizer) == "4<eos>"
    whole = tokenize(record, tokenizer, completions_only=False)
    assert whole["labels"] == whole["input_ids"] == document["input_ids"]


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (None, "4, né<eos>|6\n<eos>"),
        (CHATML, "4, né<|im_end|>\n|6\n<|im_end|>\n"),
    ],
)
def test_answers_of_a_conversation_are_learned(template, learned):
    tokenizer = byte_level(template)
    document = tokenize({"messages": CONVERSATION}, tokenizer)
    assert learned_text(document, tokenizer) == learned
    text = tokenizer.decode(document["input_ids"])
    assert all(message["content"] in text for message in CONVERSATION)


def test_random_conversations_with_merged_tokens():
    """What is learned is what the assistant says, whatever tokens the text is cut into."""
    draw = random.Random(0)
    texts = ["".join(draw.choice("ab é\n") for _ in range(draw.randrange(12))) for _ in range(60)]
    tokenizer = byte_level(CHATML).train_new_from_iterator(texts, 300)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    for _ in range(50):
        roles = [draw.choice(["system", "user", "assistant"]) for _ in range(draw.randrange(1, 6))]
        messages = [{"role": role, "content": draw.choice(texts)} for role in roles]
        document = tokenize({"messages": messages}, tokenizer)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        spoken = learned_text(document, tokenizer).split("<|im_end|>")
        assert len(spoken) == len(answers) + 1
        for answer, before in zip(answers, spoken, strict=False):
            text = before.rpartition("|")[2]
            # space before an answer and at its beginning may be one token, which is not learned
            assert text == answer or (answer[0].isspace() and answer.lstrip() == text.lstrip())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"words": "x"}, "a record is"),
        ({"text": 5}, "a record is"),
        (["x"], "not a list"),
        ({"messages": [{"role": "user"}]}, "a message is"),
        ({"messages": ["hello"]}, "a message is"),
        ({"prompt": "x"}, "a record is"),
    ],
)
def test_wrong_records(record, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tokenize(record, byte_level())


def test_a_template_that_rewrites_the_beginning_is_refused():
    with pytest.raises(ValueError, match="writes the first 3 of 5 messages in another way"):
        tokenize({"messages": CONVERSATION}, byte_level(FORGETFUL))
    document = tokenize({"messages": CONVERSATION[:3]}, byte_level(FORGETFUL))
    assert learned_text(document, byte_level()) == "4, né"


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match="ByT5Tokenizer does not say which characters"):
        tokenize("text", transformers.ByT5Tokenizer())


# -- files -----------------------------------------------------------------------------------------


def test_records_of_files(tmp_path):
    lines, text = tmp_path / "chat.jsonl", tmp_path / "text.txt"
    lines.write_text('{"text": "a\\u2028b"}\n\n"c"\n', encoding="utf-8")
    text.write_text("one\ntwo\n\n \n  three\n\n", encoding="utf-8")
    assert read_records(lines) == [{"text": "a\u2028b"}, "c"]
    assert read_records(str(text)) == ["one\ntwo", "  three"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", "\n\n", "has no records"),
        ("a.txt", "", "has no records"),
    ],
)
def test_files_without_records(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_records(tmp_path / name)
