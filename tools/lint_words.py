"""Reports words that CONTRIBUTING.md asks to avoid.

    python tools/lint_words.py

Reads the word tables of CONTRIBUTING.md. Searches documents, docstrings, comments,
messages, help texts, names, and the subjects of commits since this tool was added.
Any finding is an error.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("marshal", "cli", "simulator")
FOLDERS = (*PRODUCT, *("tests", "integration", "benchmarks", "examples", "tools"))
# Deployed files, which are searched as a whole.
DEPLOYED = ("*.service", "*.toml", "*.yaml", "*.yml")
# Generated from help texts, which are searched in the code.
GENERATED = ("docs/cli.md",)
# Documents whose formulas use the letters.
FORMULAS = ("docs/PROTOCOL.md",)

FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(`{1,2})[^`\n]+(?:\n[^`\n]+)*\1")
LINK_TARGET = re.compile(r"\]\([^)\s]+\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
SUBJECT = re.compile(
    r"[\w.,/ -]+: [^ A-Z].*[^.]|[A-Z][\w./-]+: .*[^.]|Merge .*|Revert .*"
)
SUBJECT_LENGTH_MAX = 80


@dataclass(frozen=True)
class Finding:
    """A word to avoid.

    Attributes:
        path: File, relative to the root, or the id of a commit.
        line: Line in the file; 0 for a module's name and for commits.
        message: The word, and its replacement.
    """

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        """Return the finding in the format of compilers."""
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Words:
    """The word tables; each maps a word or phrase to its replacement."""

    prose: dict[str, str]
    letters: dict[str, str]
    names: dict[str, str]

    @cached_property
    def _phrase(self) -> re.Pattern[str]:
        spaced = (r"\s+".join(map(re.escape, each.split())) for each in self.prose)
        longest_first = sorted(spaced, key=len, reverse=True)
        return re.compile(rf"\b(?:{'|'.join(longest_first)})\b", re.IGNORECASE)

    @cached_property
    def _letter(self) -> re.Pattern[str]:
        # `2H` and `H/3` are found, too; `Ctrl-C`, `C++` and `LC_ALL=C` are not.
        return re.compile(rf"(?<![\w'/.+=-])\d*([{''.join(self.letters)}])(?![\w'+-])")

    def in_prose(self, text: str, *, has_formulas: bool = False) -> Iterator[Finding]:
        """Find words to avoid in prose; lines count from 1."""
        for found in self._phrase.finditer(text):
            word = " ".join(found[0].split())
            yield _at(text, found, word, self.prose[word.lower()])
        if not has_formulas:
            for found in self._letter.finditer(text):
                yield _at(text, found, found[0], self.letters[found[1]])

    def in_name(self, name: str) -> Iterator[str]:
        """Yield a message for each word to avoid in a name."""
        for word in WORD.findall(name):
            if (plain := self.names.get(word.lower())) is not None:
                yield f"{word!r} in the name {name}; use {plain}"


def _at(text: str, found: re.Match[str], word: str, plain: str) -> Finding:
    return Finding("", text.count("\n", 0, found.start()) + 1, f"{word!r}; use {plain}")


def read_words(page: str) -> Words:
    """Read the tables of CONTRIBUTING.md."""
    return Words(*(_table(page, name) for name in ("prose", "letters", "names")))


def _table(page: str, name: str) -> dict[str, str]:
    _, found, rest = page.partition(f"<!-- table: {name} -->\n")
    assert found, f"CONTRIBUTING.md has no table {name}"
    words = {}
    for row in rest.partition("\n\n")[0].splitlines()[2:]:
        avoid, plain = (cell.strip() for cell in row.strip("|").split("|"))
        for word in re.findall(r"`([^`]+)`", avoid):
            assert word not in words, f"{word} is listed twice"
            words[word] = plain
    return words


# --- Texts -------------------------------------------------------------------------


def _blank(found: re.Match[str]) -> str:
    """Return a replacement that keeps line numbers, and separates words."""
    return "\n" * found[0].count("\n") or " | "


def plain_prose(markdown: str) -> str:
    """Return the prose of a document: without code, comments and link targets."""
    for pattern in (FENCE, COMMENT, LINK_TARGET, SPAN):
        markdown = pattern.sub(_blank, markdown)
    return markdown


def in_markdown(words: Words, path: str, text: str) -> Iterator[Finding]:
    """Find words to avoid in a document."""
    has_formulas = path in FORMULAS
    for each in words.in_prose(plain_prose(text), has_formulas=has_formulas):
        yield Finding(path, each.line, each.message)


def in_python(words: Words, path: str, text: str) -> Iterator[Finding]:
    """Find words to avoid in a module: in its own name, prose and other names."""
    stem = path.rpartition("/")[2].removesuffix(".py")
    yield from (Finding(path, 0, message) for message in words.in_name(stem))
    nodes = list(ast.walk(ast.parse(text)))
    comments = _comments(text) if _may_have(words, text) else ()
    for line, prose in (*_strings(nodes, path), *comments):
        for each in words.in_prose(SPAN.sub(_blank, prose)):
            yield Finding(path, line + each.line - 1, each.message)
    for name, line in _names(nodes).items():
        yield from (Finding(path, line, message) for message in words.in_name(name))


def _names(nodes: list[ast.AST]) -> dict[str, int]:
    """Return the names that a module defines, each with its first line."""
    names: dict[str, int] = {}
    for node in nodes:
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                names.setdefault(name, node.lineno)
    return names


def _strings(nodes: list[ast.AST], path: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, and in modules of the product all strings that are prose."""
    is_product = path.startswith(PRODUCT)
    docstrings = set()
    for node in nodes:
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr):
                docstrings.add(id(first.value))
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_prose = is_product and " " in node.value.strip()
            if is_prose or id(node) in docstrings:
                yield node.lineno, node.value


def _may_have(words: Words, text: str) -> bool:
    """Return whether comments may have words to avoid, without the slow tokenizer."""
    lines = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    rough = "\n".join(line.lstrip("# ") for line in lines)
    is_unclear = any("#" in line for line in lines)
    return is_unclear or next(words.in_prose(rough), None) is not None


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments; consecutive lines are one comment, because phrases wrap."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, comment = token.start[0], token.string.lstrip("# ")
        if block and line != last + 1:
            yield first, "\n".join(block)
            block = []
        if not block:
            first = line
        block.append(comment)
        last = line
    if block:
        yield first, "\n".join(block)


def in_subject(words: Words, commit: str, subject: str) -> Iterator[Finding]:
    """Find words to avoid, and a wrong form, in the subject of a commit."""
    for each in words.in_prose(SPAN.sub(_blank, subject)):
        yield Finding(commit, 0, each.message)
    if SUBJECT.fullmatch(subject) is None:
        yield Finding(commit, 0, f"{subject!r} is not `component: verb object`")
    elif len(subject) > SUBJECT_LENGTH_MAX:
        yield Finding(commit, 0, f"more than {SUBJECT_LENGTH_MAX} characters")


# --- The repository ----------------------------------------------------------------


def documents(root: Path) -> list[Path]:
    """Return the documents that are not generated."""
    found = [*root.glob("*.md"), *root.glob("docs/*.md")]
    return sorted(p for p in found if str(p.relative_to(root)) not in GENERATED)


def in_repository(words: Words, root: Path = ROOT) -> Iterator[Finding]:
    """Find words to avoid in documents, modules, deployed files and commits."""
    for path in documents(root):
        yield from in_markdown(words, str(path.relative_to(root)), path.read_text())
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            yield from in_python(words, str(path.relative_to(root)), path.read_text())
    for pattern in DEPLOYED:
        for path in sorted((root / "deploy").rglob(pattern)):
            for each in words.in_prose(path.read_text()):
                yield Finding(str(path.relative_to(root)), each.line, each.message)
    for commit, subject in commits(root):
        yield from in_subject(words, commit, subject)


def commits(root: Path) -> list[tuple[str, str]]:
    """Return id and subject of the commits since this tool was added.

    Returns none in a source distribution, which has no history.
    """
    if not (root / ".git").exists():
        return []
    added = ("--diff-filter=A", "--format=%H", "--", "tools/lint_words.py")
    first = _git(root, "log", *added).split()
    if not first:
        return []
    since = ("--no-merges", "--format=%h%x09%s", f"{first[-1]}..HEAD")
    lines = _git(root, "log", *since).splitlines()
    return [(line.partition("\t")[0], line.partition("\t")[2]) for line in lines]


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout if done.returncode == 0 else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the findings; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args(arguments)
    words = read_words((ROOT / "CONTRIBUTING.md").read_text())
    findings = list(in_repository(words))
    for each in findings:
        print(each)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
