"""A tokenizer of bytes, for models made of random numbers: no words, no merges, every text and every id goes through.

Ids 0 to 5 are special tokens (2 ends an answer), the next 256 are the bytes; a larger vocabulary's other ids mean
nothing. It writes files and is never loaded itself: text/tokenizer.py reads what it wrote as any other's.
"""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
NUM_TOKENS = len(SPECIALS) + 256
"""The least vocabulary that this tokenizer fits."""


def write(directory: Path) -> None:
    """Put tokenizer.json and tokenizer_config.json, with a chat template, into `directory`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
