"""A tiny checkpoint that a server can load: random weights, a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import write_checkpoint

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def write_chat_checkpoint(path: Path, *, family: str = "llama", **changes: Any) -> Path:
    """Ids 0..5 are specials (2 ends an answer), then the 256 bytes; the rest of the vocabulary means nothing."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    sizes = {"vocab_size": 262, "max_position_embeddings": 2048, **changes}
    write_checkpoint(path, family, **sizes)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
