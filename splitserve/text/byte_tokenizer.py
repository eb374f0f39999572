"""A tokenizer of bytes, for models made of random numbers: no words, no merges, every text and every id goes through.

Ids 0 to 5 are special tokens (2 ends an answer), the next 256 are the bytes. Other ids of a larger vocabulary come out
as their number after a space, and no text is ever turned into them: so every token of an answer shows. It writes
files and is never loaded itself: text/tokenizer.py reads what it wrote as any other's.
"""

from __future__ import annotations

import json
from pathlib import Path

from splitserve.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
NUM_TOKENS = len(SPECIALS) + 256
"""The least vocabulary that this tokenizer fits."""


def check(num_tokens: int) -> None:
    """Raise ConfigError for a vocabulary in which not even the bytes have a place."""
    if num_tokens < NUM_TOKENS:
        raise ConfigError(
            f"a vocabulary of {num_tokens} has no room for {NUM_TOKENS} tokens",
            field="vocab_size",
            fix=f"at least {NUM_TOKENS}",
        )


def write(directory: Path, *, num_tokens: int = NUM_TOKENS) -> None:
    """Put tokenizer.json and tokenizer_config.json, with a chat template, into `directory`. Raises as `check`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    check(num_tokens)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = [f"Ġ{i}" for i in range(NUM_TOKENS, num_tokens)]  # Ġ stands for a space
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet, *numbers])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
