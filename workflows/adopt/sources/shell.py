"""Reads a shell script as the commands that it would start, without running anything.

1. Read are words with quotes, comments, continued lines, assignments (``A=b``, ``export A=b``, arrays), and in them
   ``$A``, ``${A}``, ``${A[@]}``, ``${A:-b}`` and sums of whole numbers ``$((A + 1))``. A script has no arguments of its
   own here.
2. What the shell would compute otherwise, such as ``$(command)`` or a variable that is not set, stays in the word as it
   is written, and `is_open` finds it.
3. An assignment inside a condition or a loop is taken as if it were made; a command that uses its variable says so in
   its notes.

``shlex`` of the standard library does not do: its words do not say which part of them was quoted.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from transferqueue.errors import UsageError

WORDS_MAX: Final = 20_000
EXPANDED_CHARS_MAX: Final = 4 << 20
"""Characters that variables of one script expand to, all together."""
_INSIDE_MAX: Final = 8
"""Defaults inside each other, as in ``${A:-${B:-c}}``."""
_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BRACED: Final = re.compile(r"([A-Za-z_]\w*|\d+)(\[[@*]\])?(?::?-(.*))?", re.ASCII | re.DOTALL)
_SUM: Final = re.compile(r"\d+|[A-Za-z_]\w*|[-+*/()]|\S", re.ASCII)
_OPEN: Final = re.compile(r"\$(?:[A-Za-z_({]|[0-9@*#?])|`")
_PLAIN: Final = re.compile(r"[^\s'\"\\$`;&|()]+")
_REDIRECTION: Final = re.compile(r"\d*(?:>>|>&|&>|>|<)\s*&?")
_HEREDOC: Final = re.compile(r"(?<!<)<<(?!<)-?\s*(['\"]?)(\w+)\1")
_DEEPER: Final = frozenset({"if", "for", "while", "until", "case", "{"})
_SHALLOWER: Final = frozenset({"fi", "done", "esac", "}"})
_BEFORE_COMMAND: Final = frozenset({"then", "else", "elif", "do", "!", "time", "exec", *_DEEPER})
_ENDS: Final = frozenset(";&|\n")


@dataclass(frozen=True)
class ShellCommand:
    """The words of one command. notes: what its words were read with a reservation from."""

    words: list[str]
    notes: tuple[str, ...] = ()


@dataclass
class Script:
    """What a script says. notes: files that it names and that were not read."""

    commands: list[ShellCommand] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def is_open(text: str) -> bool:
    """Whether a word still has something that the shell would compute.

    >>> is_open("$HOME/data"), is_open("a-$5"), is_open("cost: 5$")
    (True, True, False)
    """
    return _OPEN.search(text) is not None


def read_script(text: str, variables: Mapping[str, str]) -> Script:
    r"""Return the commands of a script. variables: those of its environment, such as HOME.

    >>> read_script('N=4\npython train.py --rows $N --name "a b"  # so', {}).commands[0].words
    ['python', 'train.py', '--rows', '4', '--name', 'a b']
    """
    return _Reader(_without_heredocs(text), variables).read()


def _without_heredocs(text: str) -> str:
    lines, until = [], ""
    for line in text.replace("\r\n", "\n").split("\n"):
        if until:
            until = "" if line.strip() == until else until
            continue
        found = _HEREDOC.search(line)
        if found and not line.lstrip().startswith("#"):
            until = found[2]
            line = line[: found.start()]
        lines.append(line)
    return "\n".join(lines).replace("\\\n", " ")


@dataclass(frozen=True)
class _Piece:
    """A part of a word. quoted: it is not split at spaces."""

    text: str
    quoted: bool


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, str], *, inside: int = 0) -> None:
        self._text, self._at, self._inside = text, 0, inside
        self._variables: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        self._arrays: set[str] = set()
        self._reservations: dict[str, set[str]] = {}
        self._used: set[str] = set()
        self._script = Script()
        self._depth = 0
        self._words = 0
        self._expanded = 0

    def read(self) -> Script:
        while self._at < len(self._text):
            self._command()
        return self._script

    # ------------------------------------------------------------ commands

    def _command(self) -> None:
        """Read one command up to its end: assignments before its words change variables."""
        words: list[str] = []
        self._used = set()
        while self._skip_to_word():
            start = self._at
            if self._text[start] in "()" or self._redirection() or self._text.startswith('"$@"', start):
                self._at = max(self._at, start + (4 if self._text[start] == '"' else 1))
                continue
            assigned = _ASSIGNED.match(self._text, start)
            if assigned and (not words or words in (["export"], ["local"], ["declare"], ["readonly"])):
                self._assign(assigned)
                continue
            words += self._word()
            self._words += 1
            if self._words > WORDS_MAX:
                raise UsageError(f"the script has over {WORDS_MAX:,} words; give the command line of the job alone")
            if len(words) == 1 and words[0] in _BEFORE_COMMAND | _SHALLOWER:
                self._depth += (words[0] in _DEEPER) - (words[0] in _SHALLOWER)
                words = []
        if words and words[0] == "source":
            self._script.notes.append(f"not read: {words[1] if len(words) > 1 else 'a file'}, which the script sources")
        elif words and words[0] not in ("export", "set", "local", "declare", "readonly"):
            self._script.commands.append(ShellCommand(words, tuple(sorted(self._used))))

    def _skip_to_word(self) -> bool:
        """Go to the next word of the command. False: the command ends here."""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif char in _ENDS:
                self._at += 1
                return False
            elif char.isspace():
                self._at += 1
            else:
                return True
        return False

    def _redirection(self) -> bool:
        """Skip ``> file``, ``2>&1`` and the like."""
        found = _REDIRECTION.match(self._text, self._at)
        if not found:
            return False
        self._at = found.end()
        if self._at < len(self._text) and self._text[self._at] not in _ENDS:
            self._word()
        return True

    def _assign(self, assigned: re.Match[str]) -> None:
        name, adds = assigned[1], bool(assigned[2])
        used, self._used = self._used, set()
        self._at = assigned.end()
        if self._at < len(self._text) and self._text[self._at] == "(":
            self._at += 1
            values = self._array()
            self._arrays.add(name)
        else:
            values = ["".join(piece.text for piece in self._pieces())]
        before = self._variables.get(name, [])
        reservations, self._used = self._used, used
        if self._depth and before and before != values:
            reservations.add(f"{name} is set in a condition: taken as {' '.join(values)!r}")
        self._reservations[name] = reservations | (self._reservations.get(name, set()) if adds else set())
        if adds and name in self._arrays:
            values = before + values
        elif adds:
            values = ["".join(before + values)]
        self._variables[name] = values

    def _array(self) -> list[str]:
        words: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == ")":
                self._at += 1
                break
            if char == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif char.isspace() or char in _ENDS or char == "(":
                self._at += 1
            else:
                words += self._word(")")
        return words

    # ------------------------------------------------------------ words

    def _word(self, ends: str = "") -> list[str]:
        """Return the words that one word of the text becomes: unquoted values are split at spaces."""
        words, current, begun = [], "", False
        for piece in self._pieces(ends):
            if piece.quoted:
                current, begun = current + piece.text, True
                continue
            parts = re.split(r"\s+", piece.text)
            for place, part in enumerate(parts):
                if place and begun:
                    words.append(current)
                    current, begun = "", False
                current, begun = current + part, begun or bool(part)
        return [*words, current] if begun else words

    def _pieces(self, ends: str = "") -> Iterator[_Piece]:
        while self._at < len(self._text):
            char = self._text[self._at]
            if char.isspace() or char in _ENDS or char in ends or char in "()":
                return
            if char == "'":
                end = self._text.find("'", self._at + 1)
                end = len(self._text) if end < 0 else end
                yield _Piece(self._text[self._at + 1 : end], quoted=True)
                self._at = end + 1
            elif char == '"':
                yield from self._double_quoted()
            elif char == "\\":
                yield _Piece(self._text[self._at + 1 : self._at + 2], quoted=True)
                self._at += 2
            elif char in "$`":
                yield from self._expansion(quoted=False)
            else:
                plain = _PLAIN.match(self._text, self._at)
                end = plain.end() if plain else self._at + 1
                yield _Piece(self._text[self._at : end], quoted=True)
                self._at = end

    def _double_quoted(self) -> Iterator[_Piece]:
        self._at += 1
        text = ""
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                text += self._text[self._at + 1]
                self._at += 2
            elif char in "$`":
                yield _Piece(text, quoted=True)
                text = ""
                yield from self._expansion(quoted=True)
            else:
                text += char
                self._at += 1
        self._at += 1
        yield _Piece(text, quoted=True)

    def _expansion(self, *, quoted: bool) -> Iterator[_Piece]:
        """Expand what begins with a dollar sign or a backtick; what cannot be expanded stays as it is written."""
        start = self._at
        if self._text[start] == "`":
            end = self._text.find("`", start + 1)
            self._at = len(self._text) if end < 0 else end + 1
            yield _Piece(self._text[start : self._at], quoted=True)
            return
        following = self._text[start + 1 : start + 2]
        if following in ("(", "{"):
            self._at = _closing(self._text, start + 1)
            inner = self._text[start + 2 : self._at - 1]
            if following == "(":
                is_sum = inner.startswith("(") and inner.endswith(")")
                value = self._sum(inner[1:-1]) if is_sum else None
            else:
                braced = _BRACED.fullmatch(inner)
                if braced and braced[2] and braced[1] in self._variables:
                    yield from self._all_of(braced[1], quoted=quoted)
                    return
                value = self._braced(braced) if braced else None
        else:
            name = _NAME.match(self._text, start + 1)
            self._at = name.end() if name else min(start + 2, len(self._text))
            value = self._value(name[0]) if name else None
            if self._text[start : self._at] in ("$@", "$*"):
                return  # the arguments of the script: it is read as if it had none
        if value is None:
            yield _Piece(self._text[start : self._at], quoted=True)
        else:
            yield self._piece(value, quoted=quoted)

    def _all_of(self, name: str, *, quoted: bool) -> Iterator[_Piece]:
        self._used |= self._reservations.get(name, set())
        for place, value in enumerate(self._variables[name]):
            if place:
                yield _Piece(" ", quoted=False)
            yield self._piece(value, quoted=quoted)

    def _piece(self, value: str, *, quoted: bool) -> _Piece:
        self._expanded += len(value)
        if self._expanded > EXPANDED_CHARS_MAX:
            raise UsageError(f"the variables of the script expand to over {EXPANDED_CHARS_MAX:,} characters")
        return _Piece(value, quoted=quoted or is_open(value))

    def _value(self, name: str) -> str | None:
        values = self._variables.get(name)
        self._used |= self._reservations.get(name, set())
        return None if values is None else (values[0] if values else "")

    def _braced(self, braced: re.Match[str]) -> str | None:
        value = self._value(braced[1])
        if braced[3] is None:
            return value
        if value or self._inside >= _INSIDE_MAX:
            return value
        variables = {name: " ".join(values) for name, values in self._variables.items()}
        return _Reader(braced[3], variables, inside=self._inside + 1).one_word()

    def one_word(self) -> str:
        """Return the whole text as one expanded word."""
        return "".join(piece.text for piece in self._double_quoted_of(self._text))

    def _double_quoted_of(self, text: str) -> Iterator[_Piece]:
        self._text, self._at = f'"{text.strip(chr(34))}"', 0
        return self._double_quoted()

    def _sum(self, text: str) -> str | None:
        """Compute a sum of whole numbers and variables; None where it has something else."""
        words = [self._value(word) or word if _NAME.fullmatch(word) else word for word in _SUM.findall(text)]
        try:
            return str(_Sum([word for word in words if word != "$"]).value())
        except (ValueError, IndexError, ZeroDivisionError, RecursionError):
            return None


class _Sum:
    """Arithmetic of whole numbers: + - * / and brackets."""

    _OPERATORS: Final = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def value(self) -> int:
        value = self._chain(("+", "-"))
        if self._words:
            raise ValueError(self._words[0])
        return value

    def _chain(self, operators: tuple[str, ...]) -> int:
        value = self._operand(operators)
        while self._words and self._words[0] in operators:
            value = self._OPERATORS[self._words.pop(0)](value, self._operand(operators))
        return value

    def _operand(self, operators: tuple[str, ...]) -> int:
        if "+" in operators:
            return self._chain(("*", "/"))
        word = self._words.pop(0)
        if word != "(":
            return int(word)
        value = self._chain(("+", "-"))
        if self._words.pop(0) != ")":
            raise ValueError("brackets")
        return value


def _closing(text: str, start: int) -> int:
    """Return the place after the bracket that closes the one at `start`, quotes in between skipped."""
    opening, closing = text[start], {"(": ")", "{": "}"}[text[start]]
    depth, at, quote = 0, start, ""
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return len(text)
