"""Translates a kernel's source into a Python function that calls an interpreter for operators and calls.

`x = a + b` becomes `x = $.assign("x", $.binary("__add__", a, b))`, `if c:` becomes `if $.truth(c):`. Control flow and
names stay Python's. The code object keeps the kernel's file name and lines, so tracebacks and reports point at the
kernel. Compiled code avoids an AST walk at every step. Syntax that Triton's frontend rejects is rejected here too. What
it rejects by types and scopes (a loop that changes a variable's type, a name from one branch) is not.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

from triton import language as tl
from triton.compiler.code_generator import CodeGenerator
from triton.language.core import constexpr
from triton.language.extra import libdevice as _libdevice
from triton.language.extra.cuda import libdevice as _cuda_libdevice
from triton.runtime.jit import JITCallable

from .carried import Branch
from .machine import KERNEL_CODE
from .untaken import Untaken, uses

INTERPRETER = "$"  # not an identifier, so no kernel can use it
_BUILTINS = CodeGenerator.builtin_namespace
# Python's operator class -> the method that Triton's frontend calls
_BINARY = dict(
    Add="__add__",
    Sub="__sub__",
    Mult="__mul__",
    Div="__truediv__",
    FloorDiv="__floordiv__",
    Mod="__mod__",
    Pow="__pow__",
    LShift="__lshift__",
    RShift="__rshift__",
    BitAnd="__and__",
    BitOr="__or__",
    BitXor="__xor__",
)
_COMPARE = dict(Eq="__eq__", NotEq="__ne__", Lt="__lt__", LtE="__le__", Gt="__gt__", GtE="__ge__")
_UNARY = dict(USub="__neg__", UAdd="__pos__", Not="__not__", Invert="__invert__")
# since Triton 3.7 a device function may return a constant
RETURNS_CONSTANTS = hasattr(CodeGenerator, "decide_return_type")
_LOGICAL = {"And": "logical_and", "Or": "logical_or"}


def file_line(fn: Any) -> tuple[str, int]:
    """Where a jit function is defined: (file, line of its `def`)."""
    while not isinstance(fn, JITCallable):  # a wrapper, such as heuristics
        fn = fn.fn
    decorators = next(i for i, line in enumerate(fn.raw_src) if line.lstrip().startswith("def "))
    return fn.fn.__code__.co_filename, fn.starting_line_number + decorators


_TRANSLATED: dict[int, tuple[JITCallable, Callable]] = {}  # by id, since hashing a jit function reads its whole source


def translated(fn: JITCallable) -> Callable:
    """The Python function for a jit function. Its first parameter is the interpreter."""
    if id(fn) not in _TRANSLATED:
        _TRANSLATED[id(fn)] = fn, _translate(fn)
    return _TRANSLATED[id(fn)][1]


def _translate(fn: Any) -> Callable:
    file_name, line = file_line(fn)
    tree = fn.parse()
    ast.increment_lineno(tree, line - 1)
    definition = tree.body[0]
    scope = fn.get_capture_scope()
    translator = Translator(fn, scope, _local_names(definition))
    module = ast.Module([translator.function(definition)], [])
    code = compile(ast.fix_missing_locations(module), file_name, "exec")
    body = next(part for part in code.co_consts if isinstance(part, CodeType))
    KERNEL_CODE[id(body)] = body
    return FunctionType(body, translator.namespace, definition.name)


def _local_names(definition: ast.FunctionDef) -> set[str]:
    stored = {
        node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return stored | {argument.arg for argument in _arguments(definition)}


def _arguments(definition: ast.FunctionDef) -> list[ast.arg]:
    extra = [definition.args.vararg] if definition.args.vararg else []
    return [*definition.args.posonlyargs, *definition.args.args, *extra, *definition.args.kwonlyargs]


class Translator(ast.NodeTransformer):
    def __init__(self, fn: JITCallable, scope: dict[str, object], local: set[str]):
        self.fn, self.local = fn, local
        self.scope = {name: _of_the_target(value) for name, value in scope.items()}
        self.namespace: dict[str, Any] = {"__builtins__": {}}
        self.loops: list[dict[str, list[Branch]]] = []  # loops around the statement: name -> branches that assign it
        self.fixed: frozenset[str] = frozenset()  # parameters that are never assigned
        self.returns = 0  # return statements of the function

    def function(self, definition: ast.FunctionDef) -> ast.FunctionDef:
        names = [INTERPRETER, *(argument.arg for argument in _arguments(definition))]
        parameters = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
        stored = {part.id for part in ast.walk(definition) if _is_stored(part)}
        self.returns = sum(isinstance(part, ast.Return) for part in ast.walk(definition))
        self.fixed = frozenset(argument.arg for argument in _arguments(definition)) - stored
        body = [self.visit(statement) for statement in definition.body]
        body = [statement for statement in body if statement is not None] or [ast.Pass()]
        return ast.copy_location(ast.FunctionDef(definition.name, parameters, body, [], None), definition)

    def ask(self, node: ast.AST, method: str, *arguments: ast.expr) -> ast.Call:
        """The expression `$.method(*arguments)` at the position of `node`."""
        target = ast.Attribute(ast.Name(INTERPRETER, ast.Load()), method, ast.Load())
        return ast.copy_location(ast.Call(target, list(arguments), []), node)

    def constant(self, value: object, node: ast.AST) -> ast.expr:
        """A Python object that is created now, bound to a name in the function's globals."""
        name = f"${len(self.namespace)}"
        self.namespace[name] = value
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def refuse(self, node: ast.AST, message: str) -> Any:
        """Code that raises in place of `node`, so that only executing this line fails. A static branch may skip it."""
        refusal = self.ask(node, "refused", ast.Constant(message))
        return ast.copy_location(ast.Expr(refusal), node) if isinstance(node, ast.stmt) else refusal

    def generic_visit(self, node: ast.AST) -> Any:
        return self.refuse(node, f"unsupported AST node type: {type(node).__name__}")

    # ---- names and constants

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Store):
            return node
        if node.id in self.local:
            return node
        try:
            return self.constant(self._global(node.id), node)
        except NameError as error:  # raised only if this line executes: a static branch may skip it
            return self.ask(node, "undefined", ast.Constant(str(error)))

    def _global(self, name: str) -> object:
        """A global name of the kernel. As in Triton, only constants, modules and device functions are visible."""
        if name not in self.scope:
            if name in _BUILTINS:
                return _BUILTINS[name]
            raise NameError(f"{name} is not defined in {self.fn.__name__} ({file_line(self.fn)[0]})")
        value = self.scope[name]
        if self._visible(name, value):
            return value
        raise NameError(
            f"Cannot access global variable {name} from within the kernel function {self.fn.__name__}: it is neither a "
            "constexpr nor a module, a device function or a type"
        )

    @staticmethod
    def _visible(name: str, value: object) -> bool:
        module = getattr(value, "__module__", "") or ""
        return (name in _BUILTINS or isinstance(value, (ModuleType, JITCallable, constexpr, tl.dtype)) or value is None
                or getattr(value, "__triton_builtin__", False) or getattr(value, "__triton_aggregate__", False)
                or module.startswith(("triton.language", "triton.experimental.gluon.language"))
                or (isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")))  # fmt: skip

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self.constant(constexpr(node.value), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        parts: list[ast.expr] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                template = "{}" if part.conversion < 0 else "{!" + chr(part.conversion) + "}"
                parts.append(self.ask(part, "format", ast.Constant(template), self.visit(part.value)))
            else:
                parts.append(part)
        return self.ask(node, "concatenated", *parts)

    # ---- expressions

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self._binary(node, _BINARY, node.op, node.left, node.right)

    def _binary(
        self, node: ast.AST, names: dict[str, str], operator: ast.AST, left: ast.expr, right: ast.expr
    ) -> ast.expr:
        method = names.get(type(operator).__name__)
        if method is None:
            return self.refuse(node, f"operator {type(operator).__name__} is not implemented")
        return self.ask(node, "binary", ast.Constant(method), self.visit(left), self.visit(right))

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if len(node.ops) != 1:
            return self.refuse(node, "simultaneous multiple comparison is not supported")
        left, operator, right = node.left, node.ops[0], node.comparators[0]
        if isinstance(operator, (ast.Is, ast.IsNot)):
            return self.ask(
                node, "same", self.visit(left), self.visit(right), ast.Constant(isinstance(operator, ast.Is))
            )
        return self._binary(node, _COMPARE, operator, left, right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        return self.ask(node, "unary", ast.Constant(_UNARY[type(node.op).__name__]), self.visit(node.operand))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        later = [self._later(value) for value in node.values]
        return self.ask(node, "logical", ast.Constant(_LOGICAL[type(node.op).__name__]), *later)

    def _later(self, value: ast.expr) -> ast.expr:
        nothing = ast.arguments([], [], None, [], [], None, [])
        return ast.copy_location(ast.Lambda(nothing, self.visit(value)), value)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        sides = self._later(node.body), self._later(node.orelse)
        untaken = self._untaken(node, [node.body], [node.orelse])
        return self.ask(node, "choose", self.visit(node.test), *sides, *untaken)

    def _untaken(self, node: ast.AST, then: Sequence[ast.AST], otherwise: Sequence[ast.AST]) -> list[ast.expr]:
        """Arguments for `Untaken.check`: what may not be None on either side, and the parameters. Mostly empty."""
        untaken = Untaken(uses(then, self.fixed), uses(otherwise, self.fixed))
        names: list[ast.expr] = [ast.Name(name, ast.Load()) for name in untaken.names]
        return [self.constant(untaken, node), *names] if untaken else []

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        if isinstance(node.ctx, ast.Store):
            return ast.copy_location(ast.Tuple([self.visit(element) for element in node.elts], ast.Store()), node)
        return self.ask(node, "tuple", *(self.visit(element) for element in node.elts))

    def visit_List(self, node: ast.List) -> ast.expr:
        return self.ask(node, "tuple", *(self.visit(element) for element in node.elts))

    def visit_ListComp(self, node: ast.ListComp) -> ast.expr:
        if len(node.generators) != 1 or node.generators[0].ifs:
            return self.refuse(node, "nested or conditional comprehensions are not supported")
        loop = node.generators[0]
        source = ast.comprehension(loop.target, self.ask(node, "elements", self.visit(loop.iter)), [], 0)
        plain = ast.copy_location(ast.ListComp(self.visit(node.elt), [source]), node)
        return self.ask(node, "tuple", ast.Starred(plain, ast.Load()))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return self.ask(node, "subscript", self.visit(node.value), self.visit(node.slice))

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        ends = [self.visit(end) if end else ast.Constant(None) for end in (node.lower, node.upper, node.step)]
        return self.ask(node, "slice", *ends)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        module = self._module(node.value)
        if module is not None and hasattr(module, node.attr):
            return self.constant(_of_the_target(getattr(module, node.attr)), node)
        return self.ask(node, "attribute", self.visit(node.value), ast.Constant(node.attr))

    def _module(self, node: ast.expr) -> ModuleType | None:
        """The module that an expression such as `gl` or `tl.math` names."""
        found = self._object(node)
        return found if isinstance(found, ModuleType) else None

    def _object(self, node: ast.expr) -> object:
        """The object that a dotted global name refers to; None for any other expression."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            return self.scope.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := self._object(node.value)) is not None:
            return _of_the_target(getattr(owner, node.attr, None))
        return None

    def visit_Call(self, node: ast.Call) -> ast.Call:
        arguments = [self._argument(argument) for argument in node.args]
        keys: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in node.keywords]
        keywords = ast.Dict(keys, [self.visit(keyword.value) for keyword in node.keywords])
        return self.ask(node, "call", self.visit(node.func), ast.List(arguments, ast.Load()), keywords)

    def _argument(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Starred):
            return ast.Starred(self.ask(node, "elements", self.visit(node.value)), ast.Load())
        return self.visit(node)

    # ---- statements

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return None
        return ast.copy_location(ast.Expr(self.visit(node.value)), node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        if len(node.targets) != 1:
            return self.refuse(node, "chained assignment is not supported")
        return self._store(node, node.targets[0], self.visit(node.value))

    def _store(self, node: ast.AST, target: ast.expr, value: ast.expr) -> ast.stmt:
        refused = next(
            (part for part in ast.walk(target) if isinstance(part, (ast.Subscript, ast.Attribute, ast.Starred))), None
        )
        if refused is not None:
            return self.refuse(node, f"assignment to {ast.unparse(refused)} is not supported in triton")
        name = target.id if isinstance(target, ast.Name) else None
        stored = self.ask(node, "assign", ast.Constant(name), value)
        return ast.copy_location(ast.Assign([self.visit(target)], stored), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            return self.refuse(node, "only a name can be the target of an augmented assignment")
        left = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        return self._store(node, node.target, self._binary(node, _BINARY, node.op, left, node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name) or node.value is None:
            return self.refuse(node, "an annotated assignment needs a name and a value")
        annotation = self._object(node.annotation)
        if annotation is constexpr:
            static = self.ask(node, "static", self.visit(node.value))
            return ast.copy_location(ast.Assign([node.target], static), node)
        return self._store(node, node.target, self.visit(node.value))

    def visit_If(self, node: ast.If) -> ast.stmt:
        branch = Branch()
        for name in {part.id for one in (*node.body, *node.orelse) for part in ast.walk(one) if _is_stored(part)}:
            for loop in self.loops:
                loop.setdefault(name, []).append(branch)
        untaken = self._untaken(node.test, node.body, node.orelse)
        test = self.ask(node.test, "truth", self.visit(node.test), self.constant(branch, node.test), *untaken)
        return ast.copy_location(
            ast.If(test, self._block(node.body), self._block(node.orelse) if node.orelse else []), node
        )

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        visited = [self.visit(statement) for statement in statements]
        return [statement for statement in visited if statement is not None] or [
            ast.copy_location(ast.Pass(), statements[0])
        ]

    def visit_While(self, node: ast.While) -> ast.stmt:
        untaken = self._untaken(node, node.body, [])
        ends = ast.UnaryOp(ast.Not(), self.ask(node.test, "while_condition", self.visit(node.test), *untaken))
        leave = ast.copy_location(ast.If(ends, [ast.Break()], []), node.test)
        body, branches = self._loop_body(node)
        iterations = self.ask(node, "while_iterations", branches)
        return ast.copy_location(ast.For(ast.Name("_iteration", ast.Store()), iterations, [leave, *body], []), node)

    def _loop_body(self, node: ast.For | ast.While) -> tuple[list[ast.stmt], ast.expr]:
        """A loop's body, and the branches in it as a constant."""
        branches: dict[str, list[Branch]] = {}
        self.loops.append(branches)
        body = self._block(node.body)
        self.loops.pop()
        return body, self.constant(branches, node)

    def visit_For(self, node: ast.For) -> ast.stmt:
        if not isinstance(node.iter, ast.Call) or node.orelse:
            return self.refuse(node, "a for loop needs range, tl.range or static_range, and no else")
        call = self.visit_Call(node.iter)
        untaken = self._untaken(node, node.body, [])
        body, branches = self._loop_body(node)
        iterator = self.ask(node.iter, "loop", branches, *call.args, *untaken)
        return ast.copy_location(ast.For(self.visit(node.target), iterator, body, []), node)

    def visit_With(self, node: ast.With) -> ast.stmt:
        items = []
        for item in node.items:
            call = self.visit(item.context_expr)
            entered = ast.withitem(
                self.ask(node, "context", *call.args), self.visit(item.optional_vars) if item.optional_vars else None
            )
            items.append(entered)
        return ast.copy_location(ast.With(items, self._block(node.body)), node)

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Return(ast.Constant(None)), node)
        value = self.visit(node.value)
        if self.returns > 1 or not RETURNS_CONSTANTS:
            value = self.ask(node, "returned", value)
        return ast.copy_location(ast.Return(value), node)

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        message = self.visit(node.msg) if node.msg else ast.Constant("")
        return ast.copy_location(ast.Expr(self.ask(node, "device_assert", self.visit(node.test), message)), node)

    def visit_Pass(self, node: ast.Pass) -> ast.stmt:
        return node


def _of_the_target(value: object) -> object:
    """The CUDA library's module or function in place of the placeholder that is the same for all targets."""
    if value is _libdevice:
        return _cuda_libdevice
    if getattr(value, "__module__", None) == _libdevice.__name__:
        return getattr(_cuda_libdevice, getattr(value, "__name__", ""))
    return value


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def signature(fn: JITCallable) -> inspect.Signature:
    return _signature(fn.fn)


_signature = functools.lru_cache(None)(inspect.signature)
