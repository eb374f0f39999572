"""Text to token ids and back, for one model: a thin border around the `tokenizers` library.

Loads tokenizer.json with its companions from a checkpoint directory, or the vocabulary inside a GGUF file. All
foreign behaviour stops here: callers see ids, text and bytes.

Special tokens written out in a prompt ("<|im_end|>") become that token, as in transformers: chat templates rely on
it, and so a client can also write them. Whoever must not trust prompt text has to filter it before this server.

Decoding is by bytes: each token stands for some bytes, their concatenation is read as UTF-8, what is not UTF-8
becomes U+FFFD. Two departures from transformers, both where it garbles: the text of an added token is never taken
for byte-level code, and an invalid byte does not spoil the valid ones beside it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.errors import WeightsError

from .desk import TEXTS

if TYPE_CHECKING:
    import tokenizers

LONG_TEXT = 4096
"""Characters from which a text is encoded on a thread, about 2 ms of work: the event loop must not wait longer."""


@dataclass(frozen=True)
class Templates:
    """Chat templates as the checkpoint gives them, not yet compiled."""

    default: str | None = None
    tool_use: str | None = None
    variables: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token ...


@dataclass(frozen=True)
class Affixes:
    """Ids that `encode(add_special=True)` puts around a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class Tokenizer:
    """Encodes and decodes. Safe to use from several threads; `encode_async` from the event loop."""

    def __init__(
        self, fast: tokenizers.Tokenizer, *, affixes: Affixes, eos_ids: Sequence[int], templates: Templates
    ) -> None:
        self._fast = fast
        self._affixes = affixes
        self._bytes: dict[int, bytes] = {}
        added = fast.get_added_tokens_decoder()
        self._added = {i: t.content.encode() for i, t in added.items()}
        self._special = frozenset(i for i, t in added.items() if t.special)
        self._coding = _coding(fast)
        self._byte_of = _byte_level_alphabet() if self._coding.byte_level else {}
        self.eos_ids = tuple(eos_ids)
        self.templates = templates
        self.num_tokens = fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`; `add_special` adds what the model expects around a plain text, such as a first token."""
        if len(text) < LONG_TEXT:
            ids = self._fast.encode(text, add_special_tokens=False).ids
        else:
            # encode() holds the interpreter lock all the way; the batch form, also of one, lets go of it.
            ids = self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not add_special:
            return list(ids)
        return [*self._affixes.before, *ids, *self._affixes.after]

    async def encode_async(self, text: str, *, add_special: bool = True) -> list[int]:
        """Like `encode`; a long text is encoded on a thread, so that others are served meanwhile."""
        if len(text) < LONG_TEXT:
            return self.encode(text, add_special=add_special)
        return await TEXTS.do(len(text), partial(self.encode, text, add_special=add_special))

    def most_chars(self, tokens: int) -> int:
        """Characters that so many tokens can stand for at most: no text beyond that has to be read."""
        return tokens * self._longest

    @cached_property
    def _longest(self) -> int:
        """Characters of the text that one token stands for at most; a normalizer may have shortened it before."""
        pieces = (len(piece) for piece in self._fast.get_vocab(with_added_tokens=True))
        return max(pieces, default=1) * (1 if self._fast.normalizer is None else 4)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids` taken as the beginning of a text."""
        raw = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self._special))
        text = codecs.decode(raw, "utf-8", "replace")
        return text[1:] if self._coding.strip_first_blank and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text. Ids without a token (padding of the vocabulary) add nothing."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._look_up(token)
        return found

    def token_text(self, token: int) -> str:
        """One token on its own, for logprobs; half a character shows as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        return token in self._special

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if self._coding.byte_level:
            if all(c in self._byte_of for c in piece):
                return bytes(self._byte_of[c] for c in piece)
            return piece.encode()
        if self._coding.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()


def load(path: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory or a GGUF file. Raises WeightsError, with the path and the fix."""
    if path.is_dir():
        return _from_directory(path)
    return _from_gguf(path)


# ------------------------------------------------------------------ sources


def _from_gguf(path: Path) -> Tokenizer:
    from splitserve.gguf_header import read_header

    from . import gguf_tokenizer

    metadata = read_header(path).metadata
    fast = gguf_tokenizer.build(metadata, path)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    key = "tokenizer.ggml."
    ids = {
        name: metadata.get(f"{key}{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    for name, token in ids.items():
        if token is not None and not 0 <= token < len(tokens):
            raise WeightsError(f"{path}: {name}_token_id is {token}, the vocabulary has {len(tokens)} tokens")
    # The key is absent from old files; then only these two families begin with a token of their own.
    begins = metadata["tokenizer.ggml.model"] == "llama" or metadata.get(f"{key}pre") in (
        "llama-bpe",
        "llama3",
        "llama-v3",
    )
    before = (ids["bos"],) if metadata.get(f"{key}add_bos_token", begins) and ids["bos"] is not None else ()
    after = (ids["eos"],) if metadata.get(f"{key}add_eos_token", False) and ids["eos"] is not None else ()
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Tokenizer(
        fast,
        affixes=Affixes(before, after),
        eos_ids=tuple(dict.fromkeys(i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None)),
        templates=Templates(
            default=metadata.get("tokenizer.chat_template"),
            tool_use=metadata.get("tokenizer.chat_template.tool_use"),
            variables={names[n]: tokens[i] for n, i in ids.items() if n in names and i is not None},
        ),
    )


def _from_directory(path: Path) -> Tokenizer:
    import tokenizers

    file = path / "tokenizer.json"
    if not file.is_file():
        raise WeightsError(
            f"{path}: holds no tokenizer.json",
            fix="save it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    try:
        fast = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises plain Exception
        raise WeightsError(f"{file}: {e}") from e
    fast.no_truncation()
    fast.no_padding()
    config = _json(path / "tokenizer_config.json")
    variables = {
        k: t for k in ("bos_token", "eos_token", "unk_token", "pad_token") if (t := _content(config.get(k)))
    }
    return Tokenizer(
        fast,
        affixes=_affixes(fast, config, variables),
        eos_ids=_eos_ids(fast, path, variables.get("eos_token")),
        templates=_templates(path, config, variables),
    )


def _affixes(fast: tokenizers.Tokenizer, config: dict[str, Any], variables: dict[str, str]) -> Affixes:
    """What the post-processor puts around a text, unless tokenizer_config.json says it outright."""
    bare = fast.encode("a", add_special_tokens=False).ids
    full = fast.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    before, after = tuple(full[:at]), tuple(full[at + len(bare) :])
    for flag, token in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        wanted, token_id = config.get(flag), fast.token_to_id(variables.get(token, ""))
        if wanted is None:
            continue
        chosen = (token_id,) if wanted and token_id is not None else ()
        before, after = (chosen, after) if flag == "add_bos_token" else (before, chosen)
    return Affixes(before, after)


def _eos_ids(fast: tokenizers.Tokenizer, path: Path, eos_token: str | None) -> tuple[int, ...]:
    """End tokens: generation_config.json (one or several), else config.json; and always the tokenizer's own."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        given = _json(path / name).get("eos_token_id")
        found += given if isinstance(given, list) else [given] if isinstance(given, int) else []
        if found:
            break
    own = fast.token_to_id(eos_token) if eos_token else None
    return tuple(dict.fromkeys([*found, *([own] if own is not None else [])]))


def _templates(path: Path, config: dict[str, Any], variables: dict[str, str]) -> Templates:
    """chat_template.jinja beats tokenizer_config.json, where the template is one text or a list of named ones."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return Templates(default=file.read_text(encoding="utf-8"), variables=variables)
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
        return Templates(default=named.get("default"), tool_use=named.get("tool_use"), variables=variables)
    return Templates(default=given, variables=variables)


def _json(path: Path) -> dict[str, Any]:
    """An optional JSON object of a checkpoint; {} when the file is not there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as e:
        raise WeightsError(f"{path}: {e}") from e
    if not isinstance(found, dict):
        raise WeightsError(f"{path}: holds no JSON object")
    return found


def _content(token: Any) -> str | None:
    """Special tokens are written as text or as {"content": text, ...}."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


# ------------------------------------------------------------------ how ids become bytes


@dataclass(frozen=True)
class _Coding:
    byte_level: bool  # each character of a piece stands for one byte (GPT-2's alphabet)
    byte_fallback: bool  # pieces <0x00> .. <0xFF> are bytes
    strip_first_blank: bool  # a text begins with a blank that encoding has put there


def _coding(fast: tokenizers.Tokenizer) -> _Coding:
    state: dict[str, Any] = (
        json.loads(fast.decoder.__getstate__()) if fast.decoder is not None else {"type": None}
    )
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {s["type"] for s in steps}
    if "ByteLevel" in kinds:
        return _Coding(byte_level=True, byte_fallback=False, strip_first_blank=False)
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds & {
        "Replace",
        "Metaspace",
    }:
        prepends = any(s["type"] == "Metaspace" and s.get("prepend_scheme") != "never" for s in steps)
        return _Coding(
            byte_level=False,
            byte_fallback="ByteFallback" in kinds,
            strip_first_blank="Strip" in kinds or prepends,
        )
    raise WeightsError(
        f"tokenizer decoder {state['type']} is not known",
        fix="known are ByteLevel and the SentencePiece family",
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
