from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.gguf_file import GGUFFile
from engine.text.gguf_tokenizer import PRE_TOKENIZERS, from_metadata
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.serving.demo import demo_tokenizer, gguf_path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests" / "data" / "smollm2_tokens.jsonl"
FULL = ROOT.parent / "shared" / "data" / "smollm2_llamacpp_tokens.jsonl"


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(name="tokenizer")
def _tokenizer() -> Tokenizer:
    return demo_tokenizer()


@pytest.mark.parametrize("file", [SAMPLE, FULL], ids=["sample", "full"])
def test_same_ids_as_llama_cpp(tokenizer, file):
    if not file.exists():
        pytest.skip(f"{file.name} is not here")
    wrong = [row["text"] for row in rows(file) if tokenizer.encode(row["text"]) != row["ids"]]
    assert wrong == []


def test_decode_agrees_with_the_tokenizers_library(tokenizer):
    for row in rows(SAMPLE):
        assert tokenizer.decode(row["ids"]) == tokenizer.backend.decode(row["ids"])


@pytest.mark.parametrize("text", ["a  12", "x=10\n  20 30", "| 1 |  22 |", "²", "😀 日本語", ""])
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_of_the_demo_model(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.encode("hi<|im_end|>")[-1] == 2
    assert tokenizer.decode([2]) == ""
    assert tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_ids_beyond_the_vocabulary_are_empty(tokenizer):
    assert tokenizer.token_bytes(49152) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.id_to_token(10**6) is None
    assert tokenizer.decode([49152, 10**6]) == ""


def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800b")


def test_chat_template_of_the_demo_model(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert ids.count(2) == 2
    open_ended = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert open_ended == text.removesuffix("<|im_start|>assistant\n")


def test_special_tokens_in_a_message_are_parsed(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a<|im_end|>b"}])
    assert ids.count(2) == 3  # the default system message's, the user's own, and the end of the turn


def test_loads_quickly_and_without_heavy_imports():
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "from pathlib import Path; from engine.text.tokenizer import load_tokenizer\n"
        "load_tokenizer(Path(sys.argv[1])); print(time.perf_counter() - start)\n"
        "assert not {'torch', 'transformers', 'numpy', 'gguf', 'ray'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code, gguf_path()], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 3.0  # 0.15 s on an idle core


# Hugging Face directories


def save_directory(path: Path, tokenizer: Tokenizer, config: dict) -> Path:
    tokenizer.backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_directory_gives_the_same_tokenizer(tokenizer, tmp_path):
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "chat_template": [{"name": "other", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}],
    }
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    loaded = load_tokenizer(save_directory(tmp_path, tokenizer, config))
    assert (loaded.bos_token_id, loaded.eos_token_ids, loaded.vocab_size) == (1, (2, 0), 49152)
    assert loaded.render_chat([]) == "<|im_end|>"
    for row in rows(SAMPLE)[:20]:
        assert loaded.encode(row["text"]) == row["ids"]
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(tmp_path).render_chat([]) == "from the file"


def test_older_format_is_converted(tmp_path):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: index for index, token in enumerate([*sorted(alphabet), "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("abc") == [vocab["ab"], vocab["c"]]
    assert loaded.eos_token_id == vocab["<|endoftext|>"]


def test_directory_without_any_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer: ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_byte_fallback_vocabulary():
    vocab = {"<unk>": 0, "▁": 1, "h": 2, "i": 3, "▁h": 4, "<0xC3>": 5, "<0xA9>": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "h")], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend, (), None, None)
    assert tokenizer.token_bytes(4) == b" h"
    assert tokenizer.token_bytes(5) == b"\xc3"
    # The library takes the space before the first word away: right for a whole text, wrong for what follows a prompt.
    assert tokenizer.decode([4, 3, 5, 6, 4]) == " hié h"
    assert backend.decode([4, 3, 5, 6, 4]) == "hié h"


def test_unknown_decoder_is_named():
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(backend, (), None, None)


def test_added_tokens_are_literal(tokenizer):
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_tokens(["éé"])  # also letters of the byte alphabet
    assert Tokenizer(backend, (), None, None).decode([49152]) == "éé"


# Errors


def test_wrong_paths_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="neither"):
        load_tokenizer(tmp_path / "weights.bin")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_damaged_gguf_is_one_sentence(tmp_path):
    data = gguf_path().open("rb").read(3_000_000)
    file = tmp_path / "model.gguf"
    for content in (b"GGUF", data[:10], data[:100], data[:5000], data[:1_000_000]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="cut short"):
            load_tokenizer(file)
    file.write_bytes(b"nope")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_tokenizer(file)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(ValueError, match="version 9"):
        load_tokenizer(file)


def test_metadata_agrees_with_the_gguf_package():
    from gguf import GGUFReader

    fields = GGUFReader(gguf_path()).fields
    metadata = GGUFFile(gguf_path()).metadata
    assert metadata == {key: fields[key].contents() for key in metadata}
    assert len(metadata) == len([key for key in fields if not key.startswith("GGUF.")])


def test_reading_metadata_is_quick():
    start = time.perf_counter()
    assert GGUFFile(gguf_path()).metadata
    assert time.perf_counter() - start < 1.0  # 25 ms on an idle core


# GGUF vocabularies


def small_metadata(pre: str, **more) -> dict:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123", "1234", "<s>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["<s>", "123", "4", "5"]),
    ],
)
def test_digits_are_split_as_the_model_was_trained(pre, pieces):
    assert pre in PRE_TOKENIZERS
    assert from_metadata("m.gguf", small_metadata(pre)).encode("12345").tokens == pieces


def test_bos_follows_the_flag():
    with_bos = from_metadata("m.gguf", small_metadata("gpt-2", add_bos_token=True))
    assert with_bos.encode("a").tokens == ["<s>", "a"]
    assert with_bos.encode("a", add_special_tokens=False).tokens == ["a"]
    assert from_metadata("m.gguf", small_metadata("llama-bpe", add_bos_token=False)).encode("a").tokens == ["a"]


def test_user_defined_tokens_are_parsed_and_not_special():
    backend = from_metadata("m.gguf", small_metadata("gpt-2"))
    ids = backend.encode("1<tool>2<s>").ids
    assert backend.decode(ids, skip_special_tokens=True) == "1<tool>2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre is 'deepseek-llm', supported are gpt-2, smollm"),
        ({"merges": ["x"]}, "do not fit"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    metadata = small_metadata("gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        from_metadata("m.gguf", metadata)


def test_missing_vocabulary_is_named():
    metadata = small_metadata("gpt-2")
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ValueError, match=r"has no tokenizer\.ggml\.merges"):
        from_metadata("m.gguf", metadata)
