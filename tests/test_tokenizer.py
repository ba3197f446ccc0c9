"""Tokenizers and chat templates of a checkpoint folder: the ids and texts of transformers, streamed and whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from engines.tokenizer import TextStream, Tokenizer, conversation, read_messages
from exporter.errors import InputError

SPECIAL = ["<s>", "</s>", "<unk>", "<|user|>", "<|answer|>"]
CORPUS = ["the cat sat on the mat, and the dog did not", "  two  spaces\tand\na new line\n\n", "naïve café, señor",
          "注意力机制把键和值压缩成潜在向量", "潜在向量很小",
          "emoji 🙂🙃 and 👩‍👩‍👧‍👦 families", "x = {'a': [1, 2, 3]}"] * 5
TEXTS = [*CORPUS[:7], "", " ", "a", "🙂", "  leading and trailing  ", "unseen: ∮ ẞ ﷽ 𝔘𝔫𝔦 🧿", "\n\n",
         "Ωμέγα 漢字かな交じり文", "e\u0301 combining", "a\u200db", "</s> in the text",
         "<|user|>hello<|answer|>", "\ufffd itself \ufffd"]


def byte_level() -> Library:
    """As DeepSeek-V3's: bytes as characters, nothing unknown."""
    made = Library(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return made


def _byte_fallback(made: Library) -> Library:
    """The same merges with a token for every byte, in front of the trained ones."""
    model = json.loads(made.to_str())["model"]
    words = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    words += [word for word in model["vocab"] if word not in words]
    made.model = models.BPE(dict(zip(words, range(len(words)), strict=True)), [tuple(m) for m in model["merges"]],
                            byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return made


def metaspace() -> Library:
    """As sentencepiece's converted ones: ▁ for a space, bytes for what no token covers, the first space stripped."""
    made = Library(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL,
                                                             show_progress=False))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    return _byte_fallback(made)


def metaspace_component() -> Library:
    """The newer way to write the same: a metaspace pre-tokenizer and decoder."""
    made = Library(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    made.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL,
                                                             show_progress=False))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return _byte_fallback(made)


KINDS = {f.__name__: f for f in (byte_level, metaspace, metaspace_component)}


def write(folder: Path, library: Library, **settings: Any) -> Path:
    """A checkpoint folder's tokenizer files."""
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    known = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **known,
                                                              **settings}))
    return folder


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write(tmp_path_factory.mktemp(kind) / "model", make()) for kind, make in KINDS.items()}


# --- Text to ids and back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    ours, theirs = Tokenizer(folders[kind]), transformers_tokenizer(folders[kind])
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_whole_text(kind: str, folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders[kind])
    for text in TEXTS:
        ids = tokenizer.encode(text)
        pieces = streamed(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids), text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces), text


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_noise_is_the_whole_noise(kind: str, folders: dict[str, Path]) -> None:
    """What an untrained model says: any token after any other, half characters and special tokens among them."""
    tokenizer, draw = Tokenizer(folders[kind]), random.Random(0)
    size = Library.from_file(str(folders[kind] / "tokenizer.json")).get_vocab_size()
    for _ in range(300):
        ids = [draw.randrange(size + 3) for _ in range(draw.randrange(1, 40))]  # a few beyond the vocabulary
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_characters_come_as_soon_as_they_are_whole(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["byte_level"])
    ids = tokenizer.encode("𝔘 a")  # four bytes that were never merged
    assert [piece for piece in streamed(tokenizer, ids) if piece] == ["𝔘", " ", "a"]
    assert streamed(tokenizer, ids)[0] == ""
    tokenizer = Tokenizer(folders["metaspace"])
    assert streamed(tokenizer, tokenizer.encode("the cat"))[0] != ""


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_tokens_are_the_bytes_of_the_text(kind: str, folders: dict[str, Path]) -> None:
    """Whatever the kind of vocabulary, characters in parts included."""
    tokenizer = Tokenizer(folders[kind])
    for text in TEXTS:
        ids = [token for token in tokenizer.encode(text) if not tokenizer.is_silent(token)]
        whole = b"".join(tokenizer.piece(token) or b"" for token in ids).decode()
        assert tokenizer.decode(ids) in (whole, whole.removeprefix(" ")), text  # the first space may be stripped
    assert tokenizer.piece(1) == b"</s>"
    assert tokenizer.piece(9999) is None


def test_a_token_that_only_the_settings_mark_is_not_split(tmp_path: Path) -> None:
    library = byte_level()
    extra = library.get_vocab_size()
    folder = write(tmp_path / "model", library, pad_token="<|pad|>",
                   added_tokens_decoder={str(extra): {"content": "<|pad|>", "special": True}})
    ours, theirs = Tokenizer(folder), transformers_tokenizer(folder)
    text = "a<|pad|>b"
    assert ours.encode(text) == theirs.encode(text)
    assert extra in ours.encode(text)
    assert ours.decode(ours.encode(text)) == "ab"
    folder = write(tmp_path / "other", library, added_tokens_decoder={"5000": {"content": "<|pad|>"}})
    with pytest.raises(InputError, match=rf"'<\|pad\|>' the id 5000, which in tokenizer.json would be {extra}"):
        Tokenizer(folder)


def test_truncation_and_padding_of_a_training_run_are_off(tmp_path: Path) -> None:
    library = byte_level()
    library.enable_truncation(4)
    library.enable_padding(length=16)
    assert Tokenizer(write(tmp_path / "model", library)).encode(CORPUS[0]) == byte_level().encode(CORPUS[0]).ids


def with_bos(library: Library) -> Library:
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return library


@pytest.mark.parametrize(("processor", "stated", "expected"), [
    (False, None, 0), (True, None, 1), (False, True, 1), (True, True, 1), (False, False, 0), (True, False, 0)])
def test_bos(tmp_path: Path, processor: bool, stated: bool | None, expected: int) -> None:
    library = with_bos(byte_level()) if processor else byte_level()
    settings = {} if stated is None else {"add_bos_token": stated}
    tokenizer = Tokenizer(write(tmp_path / "model", library, **settings))
    assert tokenizer.encode("the cat").count(0) == expected
    assert tokenizer.encode("the cat")[:1] == [0] * expected or not expected
    assert tokenizer.encode("") == [0] * expected


# --- Chat templates ---------------------------------------------------------------------------------------------------

PLAIN = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}\n"
         "{% elif m['role'] == 'user' %}<|user|>{{ m['content'] | trim }}{% else %}<|answer|>{{ m['content'] }}"
         "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|answer|>{% endif %}")
# what templates of the families use: namespaces, block trimming, loop controls, JSON, marks for training
ELABORATE = """{%- set ns = namespace(first=true, count=0) %}
{%- if tools is defined and tools is not none %}tools{% endif %}
{% if not add_generation_prompt is defined %}
    {% set add_generation_prompt = false %}
{% endif %}
{% for message in messages %}
    {% if message.content is not defined %}{% continue %}{% endif %}
    {% if loop.index > 4 %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if message['role'] == 'assistant' %}
        {% generation %}<|answer|>{{ message.content.split('</think>')[-1].strip() }}{{ eos_token }}{% endgeneration %}
    {% else %}
<|{{ message.role }}|>{{ message.content if message.content is string else message.content | tojson }}
    {% endif %}
    {% set ns.first = false %}
{% endfor %}
{{ {'n': ns.count, 'ü': '<&>'} | tojson }} {{ messages[1:] | tojson(indent=2) }} {{ dict(a=1).items() | list }}
{% if add_generation_prompt %}<|answer|>{% endif %}{{ strftime_now('%Y') }} {{ pad_token is defined }}"""
CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hello 🙂 "},
                {"role": "assistant", "content": "<think>hm</think> Good day.", "tool_calls": None},
                {"role": "user", "content": [{"type": "text", "text": "and 注意?"}]}, {"role": "tool"},
                {"role": "user", "content": "the last is left out"}]


@pytest.mark.parametrize("template", [PLAIN, ELABORATE], ids=["plain", "elaborate"])
@pytest.mark.parametrize("kept", ["setting", "file", "named"])
def test_chat_is_that_of_transformers(tmp_path: Path, template: str, kept: str) -> None:
    settings: dict[str, Any] = {}
    if kept == "setting":
        settings["chat_template"] = template
    elif kept == "named":
        settings["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    folder = write(tmp_path / "model", with_bos(byte_level()), **settings)
    if kept == "file":
        (folder / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer(folder), transformers_tokenizer(folder)
    assert ours.has_template
    messages = CONVERSATION if template is ELABORATE else CONVERSATION[:3]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages) == text
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(messages) == ids
    assert ids.count(0) == (1 if template is PLAIN else 0)  # no second bos from the post-processor


@pytest.mark.parametrize(("template", "said"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{% for x in %}", "line 1 .TemplateSyntaxError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{{ raise_exception.__globals__.json }}", "unsafe"),
    ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    ("{% set n = namespace(__class__=1) %}", "SecurityError"),
    ("{% set n = namespace() %}{% set n.__call__ = 1 %}", "SecurityError"),
    ("{% include '/etc/hostname' %}", "TypeError|loader"),
    ("{{ lipsum() }}", "lipsum"),
    ("{{ range(1000000) | list }}", "OverflowError"),
    ("{{ messages[9].content.x }}", "UndefinedError"),
    ("{{ 1 // 0 }}", "ZeroDivisionError")])
def test_a_template_fails_in_one_line(tmp_path: Path, template: str, said: str) -> None:
    tokenizer = Tokenizer(write(tmp_path / "model", byte_level(), chat_template=template))
    with pytest.raises(InputError, match=f"the chat template failed (at |.*)({said})"):
        tokenizer.render(conversation(["hello"]))


def test_no_template(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["byte_level"])
    assert not tokenizer.has_template
    with pytest.raises(InputError, match=r"no chat template \(chat_template.jinja, or .*--no-chat"):
        tokenizer.render(conversation(["hello"]))


def test_messages(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"messages": CONVERSATION[1:2]}))
    assert read_messages(path, "Be brief.") == CONVERSATION[:2]
    path.write_text(json.dumps(CONVERSATION))
    assert read_messages(path) == CONVERSATION
    with pytest.raises(InputError, match="begins with a system message, and --system gives another"):
        read_messages(path, "x")


@pytest.mark.parametrize(("text", "said"), [
    ("[", "not valid JSON"), ("\x00", "not valid JSON"), ("[" * 100000, "not valid JSON"),
    ("[]", "at least one message"), ("{}", "at least one message"), ("3", "at least one message"),
    ('["hi"]', 'message 0 is "hi"'), ('[{"role": 1}]', "message 0 is")])
def test_bad_messages(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(InputError, match=said):
        read_messages(tmp_path / "m.json")
    with pytest.raises(InputError, match="no such file"):
        read_messages(tmp_path)


# --- Folders that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "found"), [
    ("tokenizer.model", "tokenizer.model (sentencepiece)"), ("spiece.model", "spiece.model (sentencepiece)"),
    ("tiktoken.model", "tiktoken.model (tiktoken)"), ("qwen.tiktoken", "qwen.tiktoken (tiktoken)"),
    ("vocab.json", "vocab.json (vocabulary and merges)"), ("notes.txt", "no tokenizer file at all")])
def test_another_librarys_tokenizer(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(InputError) as refused:
        Tokenizer(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}: {found}; expected tokenizer.json; ")
    assert "AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])" in str(refused.value)
    assert "--tokens" in str(refused.value)


@pytest.mark.parametrize(("text", "said"), [
    ("{", "not valid JSON"), ("[]", "expected a JSON object, got list"), ("{}", "not a tokenizer"),
    ('{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}', "not a tokenizer"),
    ('{"version": "9.0", "model": {}}', "not a tokenizer")])
def test_damaged_tokenizer(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match=f"tokenizer.json: .*{said}") as refused:
        Tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("settings", "said"), [
    ({"chat_template": 3}, "chat_template holds a int"), ({"chat_template": [3]}, "chat_template holds a list"),
    ({"chat_template": [{"name": "rag", "template": "x"}]}, "templates named rag; expected a text, or one named def"),
    ({"add_bos_token": True, "bos_token": "<nowhere>"}, "bos_token '<nowhere>' is not a token of tokenizer.json")])
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    folder = write(tmp_path / "model", byte_level(), **settings)
    with pytest.raises(InputError, match=f"tokenizer_config.json: .*{said}"):
        Tokenizer(folder).encode("a")


def test_text_that_is_no_unicode(folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="not valid Unicode at character 2; expected UTF-8"):
        Tokenizer(folders["byte_level"]).encode("ab\udc80")


def test_a_template_of_bytes(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", byte_level())
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template.jinja: not UTF-8"):
        Tokenizer(folder)
