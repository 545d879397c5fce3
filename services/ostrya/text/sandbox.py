"""jinja2 for templates out of model files: what they may say, and how much a rendering may cost. Used by chat.py.

jinja2's own sandbox keeps a template from Python. It does not keep it from taking for ever, or all memory, and a thread
that is in C code cannot be stopped. So nothing is begun here that is not known to be small:

- loading: at most so many characters and tokens, and no constant is folded, so nothing is computed;
- syntax, filters, tests, functions, methods: those listed here and in operations.py; anything else is refused;
- memory: whatever is made or printed is charged to a budget (meter.py), and before it is made if it may be larger than
  its parts. The budget grows with the request, and nothing is given back;
- time: each turn of a loop, call and operator is charged too, and the thread's CPU time is looked at every 64 charges;
- depth: of calls by Python's recursion limit, of values in values by MAX_DEPTH.
"""

import warnings
from collections.abc import Mapping
from types import BuiltinMethodType, CodeType, MethodType

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from ostrya.text import operations
from ostrya.text.meter import STEP_BYTES, Meter, check_bits

_MAX_CHARS = 1 << 18
_MAX_TOKENS = 20_000
"""Some three times the longest known; so many compile in a second or two, in less than 100 MB."""

_CALLABLE = (Macro, LoopContext, Cycler, Joiner, Undefined)
"""Besides globals and methods; an undefined one says so itself."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates render within the budget of its meter, started by whoever renders."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, globals: Mapping[str, object]) -> None:
        self.meter = Meter()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[LoopControlExtension, _Generation],
            finalize=self.meter.printed,
        )
        self.code_generator_class = _Generator
        self.filters = operations.filters(self.meter)
        self.tests = operations.tests(self.meter)  # type: ignore[assignment]  # jinja2 means any callable
        own = {"range": safe_range, "dict": dict, "namespace": Namespace, "cycler": Cycler, "joiner": Joiner}
        self.globals = {**own, **globals}
        self._functions = tuple(self.globals.values())
        # What _Guards has put into templates calls these.
        self.tick, self.made, self.weighed = self.meter.charge, self.meter.made, self.meter.weighed

    def load(self, source: str) -> jinja2.Template:
        """The template. Raises whatever parsers and compilers fail with."""
        if len(source) > _MAX_CHARS:
            raise ValueError(f"it has {len(source)} characters; the limit is {_MAX_CHARS}")
        num_tokens = sum(1 for _ in self.lex(source))
        if num_tokens > _MAX_TOKENS:
            raise ValueError(f"it has {num_tokens} tokens; the limit is {_MAX_TOKENS}")
        return self.from_string(source)

    def joined(self, *values: object) -> str:
        """The operator ~."""
        return operations.joined(self.meter, "", [self.meter.text(value) for value in values])

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        return super()._generate(_Guards().visit(source), name, filename, defer_init)

    def _compile(self, source: str, filename: str) -> CodeType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the template's code; what is wrong with it shows in use
            return super()._compile(source, filename)

    def call(self, context: Context, function: object, /, *args: object, **named: object) -> object:
        """A call in a template. SecurityError if it is not of what templates may call."""
        for name in ("_block_vars", "_loop_vars"):  # for functions that take the context, which none of these does
            named.pop(name, None)
        if isinstance(function, BuiltinMethodType) and not any(function is one for one in self._functions):
            return operations.call_method(self.meter, function, args, named)
        self.meter.charge(STEP_BYTES * (len(args) + len(named)))
        owner = function.__self__ if isinstance(function, MethodType) else function
        if not isinstance(owner, _CALLABLE) and not any(function is one for one in self._functions):
            raise SecurityError(f"a {type(function).__name__} cannot be called in a chat template")
        if not isinstance(owner, Macro):
            for value in (*args, *named.values()):
                self.meter.weighed(value)
        return super().call(context, function, *args, **named)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """An operator between two values."""
        if operator == "+":
            self.meter.reserve(4 * (left.__sizeof__() + right.__sizeof__()))
        elif operator == "%" and isinstance(left, str):
            return operations.formatted(self.meter, left, right)
        elif operator == "*":
            self._reserve_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * max(right, 0))
        return self.meter.made(self.binop_table[operator](left, right))

    def _reserve_product(self, left: object, right: object) -> None:
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(value, str | list | tuple):
                self.meter.reserve(value.__sizeof__() * max(times, 0))

    def getitem(self, obj: object, argument: object) -> object:
        """obj[argument]; it is hashed for that, or written into the error."""
        if not isinstance(argument, str | int):
            self.meter.weighed(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: object) -> None:
        """str.format is a method like others, and not among those that may be called."""


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}: where training finds what the assistant says. Here its body, no more."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        """The body in a scope of its own, as in transformers."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Guards(NodeTransformer):
    """Refuses syntax that no chat needs, and puts the environment's guards around what costs something."""

    _ALLOWED = (
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock),
        *(nodes.FilterBlock, nodes.With, nodes.Assign, nodes.AssignBlock, nodes.Scope, nodes.Break, nodes.Continue),
        *(nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword),
        *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
        *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv),
        *(nodes.Mod, nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos),
    )

    def generic_visit(self, node: nodes.Node, *args: object, **named: object) -> nodes.Node:
        """Every node comes by here, its children first."""
        if type(node) not in self._ALLOWED:
            what = type(node).__name__.lower()
            raise jinja2.TemplateSyntaxError(f"{what} is not for chat templates", node.lineno)
        return super().generic_visit(node, *args, **named)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick(node.body, node.lineno), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.Or(_tick([], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick(node.body, node.lineno), lineno=node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick(node.body, node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _guard("joined", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _guard("made", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = _weighed(pair.key)
        return _guard("made", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _guard("made", node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _guard("made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        # Equality with a constant, which is short, takes no time worth counting, and is what templates do most.
        if not all(operand.op in ("eq", "ne") and isinstance(operand.expr, nodes.Const) for operand in node.ops):
            node.expr = _weighed(node.expr)
            for operand in node.ops:
                operand.expr = _weighed(operand.expr)
        return node


def _guard(name: str, *args: nodes.Expr) -> nodes.Call:
    """A call of the environment's own method; no template can write one."""
    lineno = args[0].lineno
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None, lineno=lineno)


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _guard("weighed", node)


def _tick(body: list[nodes.Node], lineno: int) -> nodes.Call:
    """Charges what the template's own text in `body` is long."""
    num_chars = sum(len(data.data) for part in body for data in part.find_all(nodes.TemplateData))
    return _guard("tick", nodes.Const(num_chars, lineno=lineno))


class _Generator(CodeGenerator):
    """Computes nothing while it compiles, and calls guards directly."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        """A guard takes plain arguments."""
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)
