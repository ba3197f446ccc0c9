"""A checkpoint's tokenizer, chat template and stop tokens, read as data: no code of a checkpoint ever runs.

`tokenizer.json` goes through the `tokenizers` library, the template through jinja2's immutable sandbox with nothing
but plain values in reach. Files are opened by fixed names inside one folder; what a file says is never a path.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.errors import InputError
from exporter.manifest import Export

if TYPE_CHECKING:
    import tokenizers

TOKENIZER, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# vocabularies of other libraries: they need conversion, and their readers are not installed here
OTHERS = (("*.tiktoken", "tiktoken"), ("tiktoken.model", "tiktoken"), ("*.model", "sentencepiece"),
          ("vocab.json", "vocabulary and merges"), ("vocab.txt", "word pieces"))
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # sentencepiece spells a byte that no token covers
# byte-level vocabularies spell a byte as itself where it prints in Latin-1, as a character from U+0100 on where not
_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted({*range(0x100)} - {*_PRINTED}))}
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Messages = list[dict[str, Any]]


def read_json(path: Path, kind: type = dict) -> Any:
    """The JSON value of a file, an object unless another `kind` is asked for; InputError in one line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, kind):
        name = "object" if kind is dict else "array"
        raise InputError(f"{path}: expected a JSON {name}, got {type(value).__name__}")
    return value


def _optional(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path) if path.is_file() else {}
    return found


def _content(value: Any) -> str | None:
    """A special token as it is written: a string, or an object with its `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


class Tokenizer:
    """Text to token ids and back, as the checkpoint in `folder` says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _require(folder)
        settings = _optional(folder / SETTINGS)
        named = {**_optional(folder / "special_tokens_map.json"), **settings}
        self.special = {role: text for role in ROLES if (text := _content(named.get(role))) is not None}
        self._library, self._byte_level = _load(folder / TOKENIZER)
        self._add_tokens(settings.get("added_tokens_decoder"))
        added = self._library.get_added_tokens_decoder()
        self._skipped = {number for number, token in added.items() if token.special}
        self._template = _template_text(folder, settings.get("chat_template"))
        self._add_bos = settings.get("add_bos_token")

    def _add_tokens(self, listed: Any) -> None:
        """Tokens that only tokenizer_config.json declares; a special token that is not marked would be split."""
        from tokenizers import AddedToken

        added = {token.content for token in self._library.get_added_tokens_decoder().values()}
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        entries = listed.items() if isinstance(listed, dict) else ()
        for number, entry in sorted(entries, key=lambda e: (len(e[0]), e[0])):
            content = _content(entry)
            if content is None or content in added:
                continue
            marks = {flag: bool(entry[flag]) for flag in flags if isinstance(entry, dict) and flag in entry}
            self._library.add_tokens([AddedToken(content, **marks)])
            added.add(content)
            if (given := self._library.token_to_id(content)) != (int(number) if number.isdecimal() else None):
                raise InputError(f"{self.folder / SETTINGS}: added_tokens_decoder gives {content!r} the id {number}, "
                                 f"which in {TOKENIZER} would be {given}; expected the two files of one tokenizer")
        known = [text for text in self.special.values() if self._library.token_to_id(text) is not None]
        self._library.add_special_tokens([AddedToken(text, special=True) for text in known if text not in added])

    @property
    def has_template(self) -> bool:
        """Whether the checkpoint brings a chat template."""
        return self._template is not None

    def token_id(self, text: str) -> int | None:
        """The id of one token as it is written, or None."""
        return self._library.token_to_id(text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that starts a sequence. `add_bos_token` decides on the first token; where it is not stated, the
        post-processor in tokenizer.json does."""
        ids = self._encode(text, self._add_bos is not False)
        bos = self.special.get("bos_token")
        if self._add_bos is not True or bos is None:
            return ids
        first = self.token_id(bos)
        if first is None:
            raise InputError(f"{self.folder / SETTINGS}: bos_token {bos!r} is not a token of {TOKENIZER}; expected the "
                             "two files of one tokenizer")
        return ids if ids[:1] == [first] else [first, *ids]

    def encode_chat(self, messages: Messages) -> list[int]:
        """Ids of a conversation up to where the answer begins."""
        return self._encode(self.render(messages), False)  # the template writes its own special tokens

    def render(self, messages: Messages) -> str:
        """The chat template's text for a conversation, with the prompt for an answer at its end."""
        if self._template is None:
            raise InputError(f"{self.folder}: no chat template ({TEMPLATE}, or chat_template in {SETTINGS}); give "
                             "plain text with --prompt and --no-chat, or a folder that has one with --tokenizer FOLDER")
        return render_template(self._template, messages, self.special, self.folder)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            text.encode()  # a lone surrogate: bytes on the command line, or an escape in JSON, that are no character
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode at character {error.start}; expected UTF-8") from None
        return list(self._library.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._library.decode(list(ids), skip_special_tokens=True)

    def piece(self, token: int) -> bytes | None:
        """What a token adds to a text in the midst of it, in UTF-8; perhaps a part of a character. A special token is
        as it is written. None for an id that has no token (a model's padded vocabulary)."""
        written = self._library.id_to_token(token)
        if written is None:
            return None
        if self._byte_level:
            spelled = [_BYTE_OF.get(character) for character in written]
            return written.encode() if None in spelled else bytes(b for b in spelled if b is not None)
        if self.is_byte(token):
            return bytes.fromhex(written[3:5])
        once, twice = self.decode([token]), self.decode([token, token])
        inside = twice[len(once):] if twice.startswith(once) else once  # some decoders strip the first token's space
        return (inside or once or written).encode()

    def is_silent(self, token: int) -> bool:
        """Whether `decode` passes over a token: special ones, and ids that have none (a model's padded vocabulary)."""
        return token in self._skipped or self._library.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether a token spells one byte of a character (sentencepiece's byte fallback)."""
        return bool(_BYTE.fullmatch(self._library.id_to_token(token) or ""))


class TextStream:
    """Token by token to text that never has to be taken back; all of it together is `decode` of all tokens.

    Text is held back while it ends inside a character, and while tokens spell bytes: one wrong byte more and the
    decoder replaces the whole run. Decoding starts at the last piece shown, not at the beginning; the difference of two
    decodes from one place is right for decoders that treat their first token differently (metaspace).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._ids = tokenizer, list[int]()
        self._start = self._shown = 0  # tokens from where is decoded, tokens whose text is out

    def push(self, token: int) -> str:
        """The text that this token makes certain, often empty."""
        if self._tokenizer.is_silent(token):
            return ""  # not kept at all: the bytes on either side of it are one run
        self._ids.append(token)
        if self._tokenizer.is_byte(token):
            return ""
        old, new = self._window()
        if new.endswith(_INCOMPLETE) or len(new) <= len(old) or not new.startswith(old):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return new[len(old):]

    def flush(self) -> str:
        """What is still held back, at the end of the sequence."""
        old, new = self._window()
        self._start = self._shown = len(self._ids)
        return new[len(old):]

    def _window(self) -> tuple[str, str]:
        decode, ids = self._tokenizer.decode, self._ids
        return decode(ids[self._start:self._shown]), decode(ids[self._start:])


def read_text(path: Path) -> str:
    """A text file's content; one that cannot be read is an InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; expected a text file in UTF-8") from None


def open_tokenizer(export: Export, chosen: Path | None, required: bool) -> Tokenizer | None:
    """The tokenizer to an export: the folder `chosen`, else files in the export itself, else its checkpoint's.

    None, or an InputError where it is `required`, if there is none.
    """
    if chosen is not None:
        return Tokenizer(chosen)
    source = checkpoint_folder(export)
    for folder in (export.folder, source):
        if folder is not None and (folder / TOKENIZER).is_file():
            return Tokenizer(folder)
    if not required:
        return None
    if source is None:
        raise InputError(f"{export.folder}: made from {export.data.get('model', 'a preset')}, which has no tokenizer; "
                         "name one with --tokenizer FOLDER, or give token ids with --tokens")
    if not source.is_dir():
        raise InputError(f"{export.folder}: its tokenizer was in {source}, which is not there any more; name the "
                         "checkpoint's folder with --tokenizer FOLDER, or give token ids with --tokens")
    return Tokenizer(source)  # says what is there instead


def checkpoint_folder(export: Export) -> Path | None:
    """The checkpoint that an export was made from, wherever it is now; None for presets."""
    source = export.data.get("source")
    if not isinstance(source, dict) or source.get("kind") != "checkpoint" or not isinstance(source.get("path"), str):
        return None
    return Path(source["path"])


def stop_tokens(export: Export, chosen: Path | None, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Tokens that end an answer: generation_config.json's, else config.json's `eos_token_id`, and the tokenizer's eos.

    The first of the tokenizer's folder, the export and its checkpoint that states an `eos_token_id` is believed.
    """
    stops: list[int] = []
    for folder in (chosen, export.folder, checkpoint_folder(export)):
        if folder is not None and (stops := _stated_stops(folder)):
            break
    if tokenizer is not None and "eos_token" in tokenizer.special:
        eos = tokenizer.token_id(tokenizer.special["eos_token"])
        stops += [eos] if eos is not None else []
    return tuple(dict.fromkeys(stops))


def _stated_stops(folder: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        data = _optional(folder / name)
        text = data.get("text_config")  # a vision-language wrapper keeps the language model's there
        value = data.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        stops = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(stop, bool) or not isinstance(stop, int) or stop < 0 for stop in stops):
            raise InputError(f"{folder / name}: eos_token_id is {value!r}; expected a token id or a list of them")
        if stops:
            return stops
    return []


def _require(folder: Path) -> None:
    """InputError unless the folder has a tokenizer.json, naming what it has instead."""
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder; expected one with {TOKENIZER}")
    if (folder / TOKENIZER).is_file():
        return
    found = next((f"{path.name} ({library})" for pattern, library in OTHERS for path in sorted(folder.glob(pattern))),
                 "no tokenizer file at all")
    quoted = shlex.quote(str(folder))
    raise InputError(f"{folder}: {found}; expected {TOKENIZER}; where transformers can read this tokenizer, convert it "
                     "with: python -c 'import sys; from transformers import AutoTokenizer; "
                     f"AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])' {quoted}; or give "
                     "token ids with --tokens")


def _load(path: Path) -> tuple[tokenizers.Tokenizer, bool]:
    """The library's tokenizer, and whether its vocabulary spells bytes by characters (byte-level BPE)."""
    from tokenizers import Tokenizer as Library

    decoder = read_json(path).get("decoder")  # its errors say where
    try:
        library = Library.from_file(str(path))
    except BaseException as error:
        # a panic of the library is no Exception, and is not to pass as a crash
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{path}: not a tokenizer that the tokenizers library reads "
                         f"({(str(error) or type(error).__name__).splitlines()[0]})") from None
    library.no_truncation()  # a file may carry the settings of somebody's training run
    library.no_padding()
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    return library, any(step.get("type") == "ByteLevel" for step in steps)


def _template_text(folder: Path, setting: Any) -> str | None:
    """The chat template: the file of its own first, else tokenizer_config.json's, which may be a list of named ones."""
    if (folder / TEMPLATE).is_file():
        try:
            return (folder / TEMPLATE).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{folder / TEMPLATE}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if setting is None or isinstance(setting, str):
        return setting
    named: dict[str, Any] = {}
    if isinstance(setting, dict):
        named = setting
    elif isinstance(setting, list) and all(isinstance(entry, dict) for entry in setting):
        named = {str(entry.get("name")): entry.get("template") for entry in setting}
    default = named.get("default")
    if not isinstance(default, str):
        have = f"templates named {', '.join(named)}" if named else f"a {type(setting).__name__}"
        raise InputError(f"{folder / SETTINGS}: chat_template holds {have}; expected a text, or one named default")
    return default


def render_template(template: str, messages: Messages, special: dict[str, str], where: Path) -> str:
    """A chat template over plain values in the sandbox; whatever goes wrong in it is an InputError."""
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        made = _environment().from_string(template)
        text: str = made.render(messages=plain, tools=None, documents=None, add_generation_prompt=True, **special)
        return text
    except Exception as error:  # a template is a program: it can fail in any way
        line = getattr(error, "lineno", None)
        raise InputError(f"{where}: the chat template failed{f' at line {line}' if line else ''} "
                         f"({type(error).__name__}: {error}); check the messages, or give plain text with --prompt and "
                         "--no-chat") from None


def _environment() -> Any:
    """The names and rules that chat templates are written for, in a sandbox that lets nothing be changed or reached."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks an answer for training; here it is its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Attributes(Namespace):
        """A namespace without underscore names, which Python itself would look up."""

        def __init__(*args: Any, **values: Any) -> None:
            for name in dict(*args[1:], **values):
                _public(name)
            Namespace.__init__(*args, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            _public(name)
            super().__setitem__(name, value)

    def _public(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"namespace attribute {name!r}: names may not begin with an underscore")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
               separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        # unlike jinja2's own filter, no HTML escapes
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def mapping(*args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, dict=mapping, namespace=Attributes)
    made.globals.pop("lipsum", None)
    return made


def read_messages(path: Path, system: str | None = None) -> Messages:
    """A conversation from a JSON file: a list of messages, or an object with `messages`; `system` goes in front."""
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected JSON, a list of messages with role and content")
    data = read_json(path, object)
    messages = checked_messages(data.get("messages") if isinstance(data, dict) else data, str(path))
    if system is not None and messages[0]["role"] == "system":
        raise InputError(f"{path}: begins with a system message, and --system gives another; leave one of them out")
    return [*conversation((), system), *messages]


def checked_messages(messages: Any, where: str) -> Messages:
    """A conversation out of JSON, or an InputError that begins with `where`."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: expected a list of at least one message, or an object with one as `messages`")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f'{where}: message {i} is {json.dumps(message)[:60]}; expected an object such as '
                             '{"role": "user", "content": "…"}')
    return messages


def conversation(turns: Iterable[str], system: str | None = None) -> Messages:
    """User messages behind an optional system message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *({"role": "user", "content": text} for text in turns)]
