"""Write a tiny Hugging Face model of random weights, with a token for each byte, to a folder.

python examples/tiny_model.py FOLDER        for examples/finetune_hf.py, in place of a download
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_tiny_model(folder: Path) -> None:
    """Write a Llama with 100,000 parameters and its tokenizer, for `from_pretrained`."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=len(characters),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("tiny_model.py: name the folder to write, as in tiny_model.py llama")
    save_tiny_model(Path(sys.argv[1]))
