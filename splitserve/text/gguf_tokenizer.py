"""Builds a `tokenizers.Tokenizer` from what a GGUF file says about its vocabulary.

GGUF keeps tokens, their types, merges or scores, and only the *name* of the rule that cuts text before merging
(`tokenizer.ggml.pre`). The rules here are those of the checkpoints that carry the name; a name that is not here is an
error, for a wrong cut gives a model that answers almost well.

    model gpt2   byte-level BPE, merges listed        pre: smollm, gpt-2, llama-bpe, qwen2 and their other names
    model llama  SentencePiece BPE, scores listed     merges follow from the scores
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from splitserve.errors import WeightsError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"

_SAME_RULE = {
    "smollm": "smollm",
    "starcoder": "smollm",
    "gpt-2": "gpt-2",
    "gpt2": "gpt-2",
    "olmo": "gpt-2",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}


def build(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of one GGUF file, without its beginning-of-text rule. WeightsError names what is not known."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not model or not tokens:
        raise WeightsError(f"{path}: holds no tokenizer", fix="use a GGUF file with its vocabulary in it")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise WeightsError(f"{path}: {len(tokens)} tokens but {len(types)} token types")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens, path)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types=types, path=path)
    else:
        raise WeightsError(f"{path}: tokenizer model {model!r} is not known", fix="known are gpt2 and llama")
    # Matched as they stand, before the text is cut. Only control tokens are skipped when output is decoded.
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    return tokenizer


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    special = kind == _CONTROL
    return [
        AddedToken(t, special=special, normalized=False)
        for t, k in zip(tokens, types, strict=True)
        if k == kind
    ]


def _byte_level(metadata: dict[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    given = metadata.get("tokenizer.ggml.pre")
    rule = _SAME_RULE.get(given or "")
    if rule is None:
        raise WeightsError(
            f"{path}: pre-tokenizer {given!r} is not known" if given else f"{path}: names no pre-tokenizer",
            field="tokenizer.ggml.pre",
            fix=f"known are {', '.join(sorted(_SAME_RULE))}; a checkpoint directory with tokenizer.json always works",
        )
    merges = [_pair(m, path) for m in metadata.get("tokenizer.ggml.merges") or ()]
    vocab = {t: i for i, t in enumerate(tokens)}
    _check_merges(merges, vocab, path)
    # Llama 3 lists whole words that its merges never reach; they are taken as they are.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cut(rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _cut(rule: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before bytes are merged inside each word."""
    if rule == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = pre_tokenizers.Split(Regex(_LLAMA3 if rule == "llama-bpe" else _QWEN2), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, gap, right = merge.partition(" ")
    if not gap or not left or not right:
        raise WeightsError(f"{path}: merge {merge!r} is not two pieces with a blank between them")
    return left, right


def _check_merges(merges: list[tuple[str, str]], vocab: dict[str, int], path: Path) -> None:
    """The Rust library panics or answers vaguely on these; say which merge it is."""
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise WeightsError(f"{path}: merge {left!r} + {right!r} uses a token that the vocabulary lacks")


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], *, types: list[int], path: Path) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise WeightsError(f"{path}: a SentencePiece vocabulary of {len(tokens)} tokens needs as many scores")
    vocab = {t: i for i, t in enumerate(tokens)}
    unknown = next((t for t, k in zip(tokens, types, strict=True) if k == _UNKNOWN), None)
    model = models.BPE(
        vocab=vocab,
        merges=_merges_of_scores(tokens, types, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer = Tokenizer(model)
    blanks = normalizers.Replace(" ", "▁")
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefixed else blanks
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_of_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores best: as ranks, all splits of each token by its score."""
    normal = {t for t, k in zip(tokens, types, strict=True) if k in (_NORMAL, _USER_DEFINED)}
    found: list[tuple[float, int, str, str]] = []
    for token_id, token in enumerate(tokens):
        if token not in normal:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                found.append((-scores[token_id], token_id, left, right))
    found.sort(key=lambda m: (m[0], m[1]))  # stable: equal tokens keep the order of their splits
    return [(left, right) for _, _, left, right in found]
