"""The project's own linter: rules that ruff and mypy do not have.

Each rule is a function from a `Source` to findings. The first test runs all rules over
the repository; the others check that they find bad samples, and accept good ones.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("marshal/", "cli/", "simulator/")
PYTHON_FOLDERS = (
    *("marshal", "cli", "simulator", "tests", "integration"),
    *("benchmarks", "examples", "tools"),
)
TEXT_FILES = ("*.md", "*.toml", "Makefile", ".ci/*", "tools/*.sh", "docs/**/*.md")

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 900
COLUMNS_MAX = 88
POSITIONAL_MAX = 2
CONSTRUCTION_MAX = 5
KAFKA_INTERNALS = "marshal/kafka_marshal/kafka_io/patches.py"
KAFKA_ACCESSES_MAX = 20

Function = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[int, str]


@dataclass(frozen=True)
class Source:
    """A file of the repository: its path from the root, and its text."""

    path: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_product(self) -> bool:
        return self.path.startswith(PRODUCT)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[tuple[Function, tuple[ast.AST, ...]]]:
        """Every function with what encloses it, outermost first."""
        return list(_functions(self.tree, ()))


def _functions(
    node: ast.AST, around: tuple[ast.AST, ...]
) -> Iterator[tuple[Function, tuple[ast.AST, ...]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child, around
        is_scope = isinstance(child, Function | ast.ClassDef)
        yield from _functions(child, (*around, child) if is_scope else around)


def _dotted(node: ast.expr) -> str:
    """Write a name as in the source; a call or an index within it is dropped."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _dotted(inner)
        case _:
            return ""


# --- Internals of kafka-python -----------------------------------------------------


def private_accesses(source: Source) -> Iterator[Finding]:
    """Find accesses to private attributes of other objects, `getattr` by name too."""
    for node in source.nodes:
        match node:
            case ast.Attribute(value=owner, attr=str(name)):
                is_own = isinstance(owner, ast.Name) and owner.id in {"self", "cls"}
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                is_own = False
            case _:
                continue
        if name.startswith("_") and not (is_own or _is_dunder(name)):
            yield node.lineno, name


def _imports_kafka(source: Source) -> bool:
    """Return whether a module uses kafka-python."""
    found = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return "kafka" in found


def check_kafka_internals(source: Source) -> Iterator[Finding]:
    """Find uses of kafka-python's internals outside one module, or too many in it."""
    if not source.is_product or not _imports_kafka(source):
        return
    found = list(private_accesses(source))
    if source.path != KAFKA_INTERNALS:
        own = {function.name for function, _ in source.functions}
        for at, name in found:
            if name not in own:
                yield at, f"{name} is internal to kafka-python; see {KAFKA_INTERNALS}"
    elif len(found) > KAFKA_ACCESSES_MAX:
        at = found[-1][0]
        yield at, f"{len(found)} internals are used, at most {KAFKA_ACCESSES_MAX}"


# --- Sizes -------------------------------------------------------------------------


def check_function_length(source: Source) -> Iterator[Finding]:
    for function, _ in source.functions:
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > FUNCTION_LINES_MAX:
            yield (
                function.lineno,
                f"{function.name} has {length} lines, at most {FUNCTION_LINES_MAX}",
            )


def check_module_length(source: Source) -> Iterator[Finding]:
    if len(source.lines) > MODULE_LINES_MAX:
        yield 1, f"{len(source.lines)} lines, at most {MODULE_LINES_MAX}"


def check_columns(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, 1):
        if len(line) > COLUMNS_MAX:
            yield number, f"{len(line)} columns, at most {COLUMNS_MAX}"


# --- Signatures --------------------------------------------------------------------


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_public(function: Function, around: tuple[ast.AST, ...]) -> bool:
    """Return whether a caller from outside may use it: not local, not private."""
    if any(isinstance(scope, Function) for scope in around):
        return False
    if any(isinstance(s, ast.ClassDef) and s.name.startswith("_") for s in around):
        return False
    return not function.name.startswith("_") or _is_dunder(function.name)


def _decorators(function: Function) -> set[str]:
    return {_dotted(node).rpartition(".")[2] for node in function.decorator_list}


def check_no_kwargs(source: Source) -> Iterator[Finding]:
    if not source.is_product:
        return
    for function, around in source.functions:
        if function.args.kwarg is not None and _is_public(function, around):
            yield (
                function.lineno,
                f"{function.name} takes **{function.args.kwarg.arg}; name them",
            )


def _is_signature_free(function: Function, around: tuple[ast.AST, ...]) -> bool:
    """Return whether the function chooses its own signature.

    Magic methods, methods of a Protocol and overrides do not.
    """
    owner = around[-1] if around else None
    bases = owner.bases if isinstance(owner, ast.ClassDef) else []
    is_port = any(_dotted(b).rpartition(".")[2] == "Protocol" for b in bases)
    is_override = "override" in _decorators(function)
    return not (_is_dunder(function.name) or is_port or is_override)


def check_keyword_only(source: Source) -> Iterator[Finding]:
    if not source.is_product:
        return
    for function, around in source.functions:
        if not _is_public(function, around):
            continue
        if not _is_signature_free(function, around):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args]
        is_method = bool(around) and "staticmethod" not in _decorators(function)
        count = len(arguments) - is_method
        if count > POSITIONAL_MAX:
            yield (
                function.lineno,
                f"{function.name} takes {count} positional, at most {POSITIONAL_MAX}",
            )


def check_constructions(source: Source) -> Iterator[Finding]:
    """Find constructors called with many positional arguments: two may be swapped."""
    if not source.is_product:
        return
    for call in source.nodes:
        if not isinstance(call, ast.Call):
            continue
        name = _dotted(call.func).rpartition(".")[2]
        is_class = name.lstrip("_")[:1].isupper()
        if is_class and len(call.args) > CONSTRUCTION_MAX:
            yield (
                call.lineno,
                f"{name} gets {len(call.args)} positional, at most {CONSTRUCTION_MAX}",
            )


# --- Waits -------------------------------------------------------------------------

# The receiver distinguishes a queue's get() from a context variable's.
QUEUE_LIKE = re.compile(
    r"(queue|inbox|outbox|mailbox|future|thread|worker|pipe|pool|process|result)s?$"
)
# Functions that wait for ever without a timeout; with the position of the timeout
# among the arguments, if it may be positional.
WAITING_FUNCTIONS: dict[str, int | None] = {
    "asyncio.wait": None,
    "asyncio.wait_for": 1,
    "concurrent.futures.wait": 1,
    "futures.wait": 1,
    "multiprocessing.connection.wait": 1,
    "select.select": 3,
    "socket.create_connection": 1,
    "subprocess.call": None,
    "subprocess.check_call": None,
    "subprocess.check_output": None,
    "subprocess.run": None,
    "urllib.request.urlopen": 2,
    "urlopen": 2,
}


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _has_deadline(call: ast.Call, position: int | None) -> bool:
    """Return whether a timeout is given, by name or position, other than None."""
    given = [k.value for k in call.keywords if k.arg in {"timeout", "timeout_s"}]
    # ** may contain one: assume that it does.
    has_unpacked = any(k.arg is None for k in call.keywords)
    if position is not None and len(call.args) > position:
        given.append(call.args[position])
    return has_unpacked or any(not _is_none(value) for value in given)


def _blocks(call: ast.Call) -> bool:
    """Return whether ``block`` or ``blocking`` is left true."""
    flags = [k.value for k in call.keywords if k.arg in {"block", "blocking"}]
    return all(_is_true(flag) for flag in (call.args[:1] or flags))


def _waits_for_ever(call: ast.Call) -> bool:
    name = _dotted(call.func)
    if name in WAITING_FUNCTIONS:
        return not _has_deadline(call, WAITING_FUNCTIONS[name])
    if not isinstance(call.func, ast.Attribute):
        return False
    receiver = _dotted(call.func.value).rpartition(".")[2].lower()
    is_bare = not call.args and not call.keywords
    match call.func.attr:
        case "wait" | "result":
            return not _has_deadline(call, 0)
        case "exception" if QUEUE_LIKE.search(receiver):
            return not _has_deadline(call, 0)
        case "wait_for" | "communicate":
            return not _has_deadline(call, 1)
        case "acquire":
            return _blocks(call) and not _has_deadline(call, 1)
        case "join":
            # With an argument it joins strings or paths, or has its timeout.
            return is_bare or (bool(call.keywords) and not _has_deadline(call, None))
        case "get" if QUEUE_LIKE.search(receiver):
            # A dictionary's get() has a key first, a queue's a flag or nothing.
            has_flag = any(k.arg in {"block", "timeout"} for k in call.keywords)
            is_queue = is_bare or has_flag or _is_true((*call.args, call.func)[0])
            return is_queue and _blocks(call) and not _has_deadline(call, 1)
        case "select" if "select" in receiver or "poll" in receiver:
            return not _has_deadline(call, 0)
        case _:
            return False


def _has_timeout(block: ast.AsyncWith) -> bool:
    calls = [item.context_expr for item in block.items]
    return any(
        isinstance(call, ast.Call)
        and _dotted(call.func) == "asyncio.timeout"
        and _has_deadline(call, 0)
        for call in calls
    )


def check_deadlines(source: Source) -> Iterator[Finding]:
    """Find waits without a timeout, as far as names show them."""
    if not source.is_product:
        return
    # asyncio.wait_for(event.wait(), 5): the deadline stands around the wait.
    guarded = {
        id(argument)
        for node in source.nodes
        if isinstance(node, ast.Call)
        and _dotted(node.func) in {"asyncio.wait_for", "wait_for"}
        and _has_deadline(node, 1)
        for argument in node.args[:1]
    }
    # async with asyncio.timeout(5): the same, around the whole block.
    guarded |= {
        id(inner)
        for node in source.nodes
        if isinstance(node, ast.AsyncWith) and _has_timeout(node)
        for inner in ast.walk(node)
    }
    for node in source.nodes:
        if not isinstance(node, ast.Call) or id(node) in guarded:
            continue
        if _waits_for_ever(node):
            yield node.lineno, f"{ast.unparse(node)} waits without a deadline"


# --- Ownership ---------------------------------------------------------------------

CLAIM_MODULE = "marshal/kafka_marshal/protocol/claiming.py"


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Assign(targets=targets):
            found = targets
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            found = [target]
        case _:
            return
    for each in found:
        yield from each.elts if isinstance(each, ast.Tuple | ast.List) else [each]


def check_claims_are_set_by_themselves(source: Source) -> Iterator[Finding]:
    """Find assignments to a claim's attributes outside of the claim's own module."""
    if not source.is_product or source.path == CLAIM_MODULE:
        return
    for node in source.nodes:
        for target in _targets(node):
            if not isinstance(target, ast.Attribute):
                continue
            if _dotted(target.value).rpartition(".")[2] == "claim":
                yield target.lineno, f"{ast.unparse(target)} is set from outside"


# --- Limits of tests ---------------------------------------------------------------


def check_tests_have_no_limit_of_their_own(source: Source) -> Iterator[Finding]:
    """Find time limits of single tests: a busy machine breaks them.

    The one limit, against tests that hang, is `timeout` in pyproject.toml.
    """
    if "mark.timeout" not in source.text:
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and _dotted(node).endswith("mark.timeout"):
            yield node.lineno, f"{_dotted(node)}: the limit is in pyproject.toml"


# --- Words -------------------------------------------------------------------------

# In pieces, so that this file does not find itself.
UNFINISHED = re.compile(
    r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "(?i:for" + " now)"]) + r")\b"
)


def check_unfinished(source: Source) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, 1):
        if found := UNFINISHED.search(line):
            yield number, f"{found[0]!r}: finish it, or write down the decision"


Rule = Callable[[Source], Iterator[Finding]]
PYTHON_RULES: tuple[Rule, ...] = (
    check_function_length,
    check_module_length,
    check_columns,
    check_no_kwargs,
    check_keyword_only,
    check_constructions,
    check_kafka_internals,
    check_deadlines,
    check_claims_are_set_by_themselves,
    check_tests_have_no_limit_of_their_own,
    check_unfinished,
)
TEXT_RULES: tuple[Rule, ...] = (check_unfinished,)


def findings(source: Source) -> list[str]:
    rules = PYTHON_RULES if source.is_python else TEXT_RULES
    return [
        f"{source.path}:{line}: {message}"
        for rule in rules
        for line, message in rule(source)
    ]


def repository() -> list[Source]:
    paths = [p for folder in PYTHON_FOLDERS for p in (ROOT / folder).rglob("*.py")]
    paths += [p for pattern in TEXT_FILES for p in ROOT.glob(pattern) if p.is_file()]
    return [
        Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in sorted(paths)
    ]


# --- The repository ----------------------------------------------------------------


def test_repository_is_tidy():
    sources = repository()
    assert {"marshal/kafka_marshal/__init__.py", "Makefile"} <= {
        s.path for s in sources
    }
    found = []
    while sources:
        # A tree is dropped with its source: the collector would visit all of them.
        found += findings(sources.pop(0))
    assert not found, "\n".join(["untidy:", *found])


def test_unit_tests_mirror_the_package():
    """A test is found from its module, and a module from its test."""
    unit = ROOT / "tests" / "unit"
    lost = []
    for test in unit.rglob("test_*.py"):
        folder, name = test.relative_to(unit).parent, test.stem.removeprefix("test_")
        package = ROOT / "marshal" / "kafka_marshal" / folder
        if folder.parts[:1] == ("cli",):
            package = ROOT.joinpath("cli", "kafka_marshal_cli", *folder.parts[1:])
        if folder.parts[:1] == ("simulator",):
            package = ROOT / folder
        # A long test is split: ``test_consumer_seeking`` is of ``consumer``, too.
        words = name.split("_")
        names = ["_".join(words[: n + 1]) for n in range(len(words))] + [name]
        modules = [package / f"{each}.py" for each in names if each]
        if not any(map(Path.is_file, modules)) and not (package / name).is_dir():
            lost.append(str(test.relative_to(ROOT)))
    assert lost == []


# --- The linter itself -------------------------------------------------------------

PLAIN = "marshal/kafka_marshal/sample.py"
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(LONG_FUNCTION, "f has 71 lines", id="function"),
        pytest.param(
            "class A:\n    async def g(self):\n"
            + "        x = 1\n" * FUNCTION_LINES_MAX,
            "g has 71 lines",
            id="async-method",
        ),
        pytest.param(
            "x = 1\n" * (MODULE_LINES_MAX + 1),
            f"{MODULE_LINES_MAX + 1} lines",
            id="module",
        ),
        pytest.param("x = " + "1" * 85 + "\n", "89 columns", id="columns"),
        pytest.param("def f(**options): ...", "takes **options", id="kwargs"),
        pytest.param(
            "class A:\n    def __init__(self, **o): ...", "takes **o", id="kwargs-init"
        ),
        pytest.param("def f(a, b, c): ...", "3 positional", id="positional"),
        pytest.param("def f(a, /, b, c): ...", "3 positional", id="positional-only"),
        pytest.param(
            "class A:\n    def f(self, a, b, c): ...", "3 positional", id="method"
        ),
        pytest.param(
            "class A:\n    @staticmethod\n    def f(a, b, c): ...",
            "3 positional",
            id="static",
        ),
        pytest.param(
            "class A:\n    @classmethod\n    def f(cls, a, b, c): ...",
            "3 positional",
            id="class-method",
        ),
        pytest.param("x = m._A(1, 2, 3, 4, 5, 6)", "_A gets 6", id="construction"),
        pytest.param("claim.phase = x", "claim.phase is set", id="claim"),
        pytest.param("h.claim.epoch, y = x", "h.claim.epoch is set", id="claims"),
        pytest.param("h.claim.lease: L = x", "h.claim.lease is set", id="claim-typed"),
        pytest.param(
            "@pytest.mark.timeout(9)\ndef f(): ...", "the limit is in", id="limit"
        ),
        pytest.param("x = 1  # TO" + "DO: more", "TO" + "DO", id="to-do"),
        pytest.param("x = 1  # FIX" + "ME", "FIX" + "ME", id="fix-me"),
        pytest.param("# Enough for" + " now.", "for" + " now", id="later"),
        pytest.param("# For" + " now, enough.", "For" + " now", id="later-capital"),
    ],
)
def test_bad_source_is_caught(text, message):
    found = findings(Source(PLAIN, text))
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(LONG_FUNCTION.removesuffix("    x = 1\n"), id="function"),
        pytest.param("x = 1\n" * MODULE_LINES_MAX, id="module"),
        pytest.param("x = " + "1" * 84 + "\n", id="columns"),
        pytest.param("def _f(a, b, c, **options): ...", id="private"),
        pytest.param(
            "class _A:\n    def f(self, a, b, c, **o): ...", id="private-class"
        ),
        pytest.param("def f():\n    def g(a, b, c, **o): ...", id="local"),
        pytest.param("def f(a, b, *, c, d): ...", id="keyword-only"),
        pytest.param("def f(a, b, *rest): ...", id="variadic"),
        pytest.param("class A:\n    def f(self, a, b): ...", id="method"),
        pytest.param(
            "class A:\n    @classmethod\n    def f(cls, a, b): ...", id="class"
        ),
        pytest.param("class A:\n    def __exit__(self, a, b, c): ...", id="magic"),
        pytest.param("class A(Protocol):\n    def f(self, a, b, c): ...", id="port"),
        pytest.param(
            "class A(typing.Protocol[T]):\n    def f(self, a, b, c): ...",
            id="generic-port",
        ),
        pytest.param(
            "class A(B):\n    @override\n    def f(self, a, b, c): ...", id="override"
        ),
        pytest.param(
            "@frozen\nclass A:\n    a: int\n    b: int\n    c: int", id="attrs"
        ),
        pytest.param("for now_ms in range(9): ...", id="word-boundary"),
        pytest.param("holding.claim = claim", id="a-claim-as-a-whole"),
    ],
)
def test_sound_source_passes(text):
    assert findings(Source(PLAIN, text)) == []


@pytest.mark.parametrize(
    "text", ["x._client", "f(x)._client.y", "x._net = 1", 'getattr(x, "_net", None)']
)
def test_internals_of_kafka_python_are_used_by_one_module_only(text):
    using = f"from kafka.errors import KafkaError\n{text}\n"
    (found,) = findings(Source(PLAIN, using))
    assert "internal to kafka-python" in found
    assert findings(Source(PLAIN, text)) == []
    assert findings(Source(KAFKA_INTERNALS, using)) == []
    (found,) = findings(Source(KAFKA_INTERNALS, using * (KAFKA_ACCESSES_MAX + 1)))
    assert f"{KAFKA_ACCESSES_MAX + 1} internals are used" in found


def test_private_names_of_the_module_itself_are_allowed():
    text = "import kafka\nclass A(B):\n    def _f(self):\n        "
    assert findings(Source(PLAIN, text + "self._x = super()._f()")) == []


def test_signatures_and_waits_of_tests_are_not_checked():
    text = "def f(a, b, c, **o):\n    event.wait()"
    assert findings(Source("tests/unit/test_sample.py", text)) == []


def test_prose_is_searched_for_unfinished_work_only():
    text = "x" * 200 + "\nTO" + "DO\n"
    assert len(findings(Source("docs/PAGE.md", text))) == 1


@pytest.mark.parametrize(
    "call",
    [
        "event.wait()",
        "event.wait(None)",
        "self.stopped.wait(timeout=None)",
        "process.wait()",
        "condition.wait_for(is_ready)",
        "condition.wait_for(is_ready, None)",
        "future.result()",
        "pool.submit(f).result(None)",
        "future.exception()",
        "lock.acquire()",
        "lock.acquire(True)",
        "lock.acquire(blocking=True)",
        "thread.join()",
        "self._thread.join()",
        "queue.join()",
        "worker.join(timeout=None)",
        "queue.get()",
        "self.inbox.get(True)",
        "self.queues[3].get(block=True)",
        "queue.get(timeout=None)",
        "process.communicate()",
        "process.communicate(b'x')",
        "subprocess.run(['java'], check=True)",
        "subprocess.check_output(command)",
        "concurrent.futures.wait(futures)",
        "asyncio.wait(tasks)",
        "asyncio.wait_for(event.wait(), None)",
        "asyncio.wait_for(task, timeout=None)",
        "async def f():\n async with asyncio.timeout(None):\n  await event.wait()",
        "async def f():\n async with opened(5):\n  await event.wait()",
        "selector.select()",
        "select.select(r, w, x)",
        "socket.create_connection(address)",
        "urlopen(address)",
    ],
)
def test_wait_without_deadline_is_caught(call):
    found = findings(Source(PLAIN, call))
    assert found
    assert all("waits without a deadline" in finding for finding in found)


@pytest.mark.parametrize(
    "call",
    [
        "event.wait(1.5)",
        "async def f():\n async with asyncio.timeout(5):\n  await event.wait()",
        "event.wait(timeout=left_s)",
        "process.wait(timeout=5)",
        "condition.wait_for(is_ready, 5)",
        "condition.wait_for(is_ready, timeout=left_s)",
        "future.result(timeout=0)",
        "future.result(5)",
        "logger.exception('failed')",
        "lock.acquire(timeout=5)",
        "lock.acquire(True, 5)",
        "lock.acquire(blocking=False)",
        "lock.acquire(False)",
        "thread.join(5)",
        "thread.join(timeout=5)",
        "', '.join(words)",
        "os.path.join(a, b)",
        "queue.get(timeout=5)",
        "queue.get(True, 5)",
        "queue.get(block=False)",
        "queue.get(False)",
        "queues.get(name)",
        "results.get('key', None)",
        "context.get()",
        "environ.get('HOME')",
        "process.communicate(timeout=5)",
        "subprocess.run(command, timeout=60, check=True)",
        "subprocess.run(command, **limits)",
        "concurrent.futures.wait(futures, 5)",
        "asyncio.wait_for(event.wait(), 5)",
        "selector.select(5)",
        "select.select(r, w, x, 0)",
        "socket.create_connection(address, 5)",
        "urlopen(address, timeout=5)",
    ],
)
def test_wait_with_deadline_passes(call):
    assert findings(Source(PLAIN, call)) == []
