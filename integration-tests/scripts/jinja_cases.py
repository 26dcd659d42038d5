"""Random templates, and what jinja2 makes of them in the environment of transformers, for the tests of zero's renderer.

Prints lines of JSON: `template`, `values`, and `text` or `error`. Needs jinja2:  python jinja_cases.py SEED COUNT
"""

import json
import random
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


STRINGS = ["", "a", "b", "ab", "abc", "Hello World", " a b ", "\n", "a\nb\n", "x-y", "a,b,c", "é", "漢字", "🦀", "it's", '"', "\\", "{{ a }}", "{% b %}",
           "<&>", "1", "-2", "3.5", "0x1", "none", "True", "user", "assistant", "\t", "a=b=c", "ß", "ǆ", "ΑΣ", "\u00a0", "\u2028", "%s", "100%", "</think>x", "\x1c", "\r\n"]
NUMBERS = [0, 1, 2, 3, -1, -2, 7, 10, 100, 12345678901, -9007199254740993, 18446744073709551615]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.5, 2.5, 0.1, 1e-7, 1e16, 1.5e300, 123456789.125, 1e22, -3.0, 1e-5]
KEYS = ["a", "b", "role", "content", "name", "n", "é", "x y", "type", "items", "get"]


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.locals = []

    def one(self, *choices):
        return self.random.choice(choices)

    def value(self, depth=3):
        kind = self.random.randrange(9 if depth else 6)
        if kind == 0:
            return None
        if kind == 1:
            return self.one(True, False)
        if kind == 2:
            return self.one(*NUMBERS)
        if kind == 3:
            return self.float()
        if kind in (4, 5):
            return self.one(*STRINGS)
        if kind in (6, 7):
            return [self.value(depth - 1) for _ in range(self.random.randrange(4))]
        return {self.one(*KEYS): self.value(depth - 1) for _ in range(self.random.randrange(4))}

    def float(self):
        return self.one(*FLOATS, self.random.uniform(-1e3, 1e3), self.random.random() * 10.0 ** self.random.randrange(-300, 300))

    def values(self):
        return {
            "i": self.one(*NUMBERS), "j": self.one(*NUMBERS), "x": self.float(), "y": self.float(),
            "s": self.one(*STRINGS), "t": self.one(*STRINGS), "b": self.one(True, False), "n": None, "v": self.value(),
            "l": [self.value(2) for _ in range(self.random.randrange(5))],
            "m": [self.one(*NUMBERS[:9]) for _ in range(self.random.randrange(5))],
            "w": [self.one(*STRINGS) for _ in range(self.random.randrange(5))],
            "d": {self.one(*KEYS): self.value(2) for _ in range(self.random.randrange(5))},
            "r": [{"role": self.one("user", "assistant"), "content": self.one(*STRINGS), "n": self.one(*NUMBERS[:8])}
                  for _ in range(self.random.randrange(4))],
        }

    # Expressions. Any kind may stand where another is expected, now and then.
    def any(self, depth=3):
        return self.one(self.number, self.string, self.list, self.boolean, self.thing, self.string, self.dictionary)(depth)

    def thing(self, depth):
        choices = ["v", "n", "b", "d", "l", "u", *self.locals]
        if not depth:
            return self.one(*choices)
        return self.one(
            lambda: self.one(*choices),
            lambda: f"({self.any(depth - 1)} if {self.boolean(depth - 1)} else {self.any(depth - 1)})",
            lambda: f"({self.any(depth - 1)} if {self.boolean(depth - 1)})",
            lambda: f"({self.any(depth - 1)} {self.one('or', 'and')} {self.any(depth - 1)})",
            lambda: f"{self.any(depth - 1)}|default({self.any(depth - 1)}{self.one('', ', true', ', boolean=true')})",
            lambda: f"{self.list(depth - 1)}[{self.number(depth - 1)}]",
            lambda: f"d[{self.string(depth - 1)}]",
            lambda: f"v.{self.one('a', 'b', 'role', 'name', 'n')}",
            lambda: f"d.get({self.string(depth - 1)}{self.one('', ', ' + self.any(depth - 1))})",
            lambda: f"{self.list(depth - 1)}|{self.one('first', 'last', 'min', 'max')}",
            lambda: f"({self.any(depth - 1)}, {self.any(depth - 1)})",
            lambda: "({},)".format(self.any(depth - 1)),
        )()

    def literal(self):
        return json.dumps(self.one(*STRINGS, "a", "b"), ensure_ascii=self.one(True, False)).replace("\\ud83e\\udd80", "🦀")

    def number(self, depth):
        if self.random.random() < 0.04:
            return self.any(depth)
        if not depth:
            return self.one("i", "j", "x", "y", "1", "0", "2", "-3", "0.5", "1e3", "1_000", "b")
        one = lambda: self.number(depth - 1)
        return self.one(
            one,
            lambda: f"({one()} {self.one('+', '-', '*', '/', '//', '%', '+', '-')} {one()})",
            lambda: f"{one()} {self.one('+', '-', '*', '//', '%')} {one()}",
            lambda: f"{self.one('2', '3', 'i', 'x', '-2')} ** {self.one('2', '3', '0', '-1', '0.5', '2 ** 2')}",
            lambda: f"-{one()}",
            lambda: f"+{one()}",
            lambda: f"{self.any(depth - 1)}|length",
            lambda: f"{self.any(depth - 1)}|int{self.one('', '(7)')}",
            lambda: f"{self.any(depth - 1)}|float{self.one('', '(0.5)')}",
            lambda: f"{one()}|abs",
            lambda: f"{one()}|round{self.one('', '(1)', '(2)', '(0)', '(1, method=' + chr(39) + 'ceil' + chr(39) + ')', '(method=' + chr(39) + 'floor' + chr(39) + ')')}",
            lambda: f"m|sum",
            lambda: f"r|sum(attribute='n')",
            lambda: f"{self.string(depth - 1)}.{self.one('find', 'rfind', 'count', 'index')}({self.string(depth - 1)})",
            lambda: f"{self.string(depth - 1)}|wordcount",
            lambda: f"{self.list(depth - 1)}.{self.one('count', 'index')}({self.any(depth - 1)})",
        )()

    def string(self, depth):
        if self.random.random() < 0.04:
            return self.any(depth)
        if not depth:
            return self.one("s", "t", self.literal(), self.literal(), "r[0].role", "w[0]")
        one = lambda: self.string(depth - 1)
        any_ = lambda: self.any(depth - 1)
        return self.one(
            one,
            lambda: f"({any_()} ~ {any_()})",
            lambda: f"{any_()} ~ {any_()} ~ {one()}",
            lambda: f"{one()} + {one()}",
            lambda: f"{one()} * {self.one('2', '0', '-1', 'b')}",
            lambda: f"{any_()}|string",
            lambda: f"{any_()}|tojson{self.json_options()}",
            lambda: f"{any_()}|{self.one('upper', 'lower', 'title', 'capitalize', 'trim', 'urlencode', 'safe')}",
            lambda: f"{any_()}|replace({one()}, {one()}{self.one('', ', 1')})",
            lambda: f"{one()}|trim({one()})",
            lambda: f"{one()}|indent{self.one('', '(2)', '(2, true)', '(first=true)', '(blank=true)', '(width=1)')}",
            lambda: f"{self.list(depth - 1)}|join{self.one('', '(' + one() + ')')}",
            lambda: f"r|join(',', attribute='role')",
            lambda: f"{one()}.{self.one('upper', 'lower', 'title', 'capitalize', 'strip', 'lstrip', 'rstrip')}()",
            lambda: f"{one()}.{self.one('strip', 'lstrip', 'rstrip', 'removeprefix', 'removesuffix')}({one()})",
            lambda: f"{one()}.replace({one()}, {one()})",
            lambda: f"{one()}.{self.one('zfill', 'ljust', 'rjust', 'center')}({self.one('5', '8', '0')})",
            lambda: f"{one()}.{self.one('ljust', 'rjust', 'center')}(6, '*')",
            lambda: f"{one()}.join({self.list(depth - 1)})",
            lambda: f"{one()}.{self.one('split', 'rsplit')}({one()})[{self.one('0', '-1', '1')}]",
            lambda: f"{one()}.{self.one('partition', 'rpartition')}({one()})[{self.one('0', '1', '2', '-1')}]",
            lambda: f"{one()}[{self.slice(depth)}]",
            lambda: f"{one()}[{self.one('0', '1', '-1', 'i')}]",
            lambda: f"'%s-%s' % ({any_()}, {any_()})",
            lambda: f"'%s' % {self.one('s', 'i', 'x', 'l', 'd', 'n')}",
            lambda: f"'%d|%s'|format({self.number(depth - 1)}, {any_()})",
            lambda: f"'{{}}-{{}}'.format({any_()}, {any_()})",
            lambda: f"'{{a}}{{1}}'.format(1, {any_()}, a={any_()})",
            lambda: f"{one()}|center(9)",
            lambda: f"{one()}|reverse",
        )()

    def json_options(self):
        options = []
        if self.random.random() < 0.3:
            options.append(f"indent={self.one('2', '0', 'none', repr('-'))}")
        if self.random.random() < 0.2:
            options.append("ensure_ascii=" + self.one("true", "false"))
        if self.random.random() < 0.2:
            options.append("sort_keys=true")
        if self.random.random() < 0.2:
            options.append("separators=(',', ':')")
        return f"({', '.join(options)})" if options else ""

    def slice(self, depth):
        bound = lambda: self.one("", "0", "1", "2", "-1", "-2", "9", "i" if depth > 2 else "1")
        return f"{bound()}:{bound()}" + self.one("", "", ":", ":1", ":-1", ":2", ":-2")

    def list(self, depth):
        if self.random.random() < 0.04:
            return self.any(depth)
        if not depth:
            return self.one("l", "m", "w", "r", "[]", "[1, 'a', none]", "range(4)|list")
        one = lambda: self.list(depth - 1)
        return self.one(
            one,
            lambda: f"[{self.any(depth - 1)}, {self.any(depth - 1)}]",
            lambda: f"({one()} + {one()})",
            lambda: f"{one()} * {self.one('2', '0', 'b')}",
            lambda: f"{one()}[{self.slice(depth)}]",
            lambda: f"{self.any(depth - 1)}|list",
            lambda: f"{one()}|reverse|list",
            lambda: f"{one()}|sort{self.one('', '(reverse=true)', '(case_sensitive=true)')}",
            lambda: f"r|sort(attribute='{self.one('n', 'role', 'content')}')",
            lambda: f"{one()}|unique|list",
            lambda: f"{one()}|map('{self.one('string', 'upper', 'length', 'trim', 'int')}')|list",
            lambda: f"r|map(attribute='{self.one('role', 'n', 'zzz')}')|list",
            lambda: f"r|map(attribute='zzz', default=1)|list",
            lambda: f"{one()}|{self.one('select', 'reject')}|list",
            lambda: f"{one()}|{self.one('select', 'reject')}('{self.one('string', 'number', 'defined', 'none', 'mapping')}')|list",
            lambda: f"m|{self.one('select', 'reject')}('{self.one('gt', 'lt', 'eq', 'in', 'divisibleby')}', {self.one('1', '2', '[1, 2]')})|list",
            lambda: f"r|{self.one('selectattr', 'rejectattr')}('role', '{self.one('equalto', 'eq', 'ne', 'in')}', {self.string(depth - 1)})|list",
            lambda: f"r|{self.one('selectattr', 'rejectattr')}('n')|list",
            lambda: f"{self.string(depth - 1)}.{self.one('split', 'rsplit')}({self.one('', self.string(depth - 1))})",
            lambda: f"{self.string(depth - 1)}.split({self.string(depth - 1)}, 1)",
            lambda: f"{self.string(depth - 1)}.splitlines({self.one('', 'true')})",
            lambda: f"{self.string(depth - 1)}.partition({self.string(depth - 1)})",
            lambda: f"{self.dictionary(depth - 1)}.{self.one('keys', 'values', 'items')}(){self.one('', '|list')}",
            lambda: f"{self.dictionary(depth - 1)}|dictsort{self.one('', '(reverse=true)')}",
            lambda: f"{self.dictionary(depth - 1)}|items|list",
            lambda: f"range({self.one('3', '1, 4', '5, 0, -2', '0')}){self.one('', '|list')}",
        )()

    def dictionary(self, depth):
        if self.random.random() < 0.04:
            return self.any(depth)
        if not depth:
            return self.one("d", "{}", "{'a': 1}", "v")
        return self.one(
            lambda: self.one("d", "r[0]"),
            lambda: f"{{{self.string(depth - 1)}: {self.any(depth - 1)}, 'b': {self.any(depth - 1)}}}",
            lambda: f"dict(a={self.any(depth - 1)}, b=1)",
        )()

    def boolean(self, depth):
        if self.random.random() < 0.04:
            return self.any(depth)
        if not depth:
            return self.one("b", "true", "False", "n")
        any_ = lambda: self.any(depth - 1)
        return self.one(
            lambda: f"{any_()} {self.one('==', '!=')} {any_()}",
            lambda: f"{self.number(depth - 1)} {self.one('<', '<=', '>', '>=', '==')} {self.number(depth - 1)}",
            lambda: f"{self.string(depth - 1)} {self.one('<', '<=', '>', '>=', '==')} {self.string(depth - 1)}",
            lambda: f"{self.string(depth - 1)} {self.one('in', 'not in')} {self.one(self.string, self.list, self.dictionary)(depth - 1)}",
            lambda: f"{any_()} {self.one('in', 'not in')} {self.list(depth - 1)}",
            lambda: f"not {any_()}",
            lambda: f"({self.boolean(depth - 1)} {self.one('and', 'or')} {self.boolean(depth - 1)})",
            lambda: f"{any_()} is {self.one('', 'not ')}{self.one('defined', 'undefined', 'none', 'string', 'number', 'mapping', 'sequence', 'iterable', 'boolean', 'integer', 'float', 'true', 'false')}",
            lambda: f"{self.number(depth - 1)} is {self.one('odd', 'even', 'divisibleby 3', 'divisibleby(2)')}",
            lambda: f"{self.string(depth - 1)} is {self.one('lower', 'upper')}",
            lambda: f"{any_()} is {self.one('eq', 'ne', 'equalto', 'in')}({any_()})",
            lambda: f"{self.string(depth - 1)}.{self.one('startswith', 'endswith')}({self.string(depth - 1)})",
            lambda: f"{self.string(depth - 1)}.{self.one('isdigit', 'isalpha', 'isspace', 'isupper', 'islower', 'isalnum')}()",
        )()

    # Statements.
    def sign(self):
        return self.one("", "", "-", "-", "+")

    def block(self, inside):
        left, right = self.sign(), self.sign()
        return f"{{%{left} {inside} {right}%}}"

    def text(self):
        return self.one("", "\n", "  ", "\n    ", " x ", "x\n", "{# c #}", "\n  {#- c -#}  \n", "{% raw %}{{ a }}{% endraw %}", "é")

    def printed(self):
        left, right = self.one("", "-"), self.one("", "-")
        return f"{{{{{left} {self.any()} {right}}}}}"

    def body(self, depth):
        out = ""
        for _ in range(self.random.randrange(1, 4)):
            out += self.text() + self.statement(depth) + self.text()
        return out

    def statement(self, depth):
        if not depth:
            return self.printed()
        return self.one(
            self.printed,
            self.printed,
            lambda: self.block(f"if {self.boolean(2)}") + self.body(depth - 1)
            + self.one("", self.block(f"elif {self.boolean(2)}") + self.body(depth - 1))
            + self.one("", self.block("else") + self.body(depth - 1)) + self.block("endif"),
            lambda: self.loop(depth),
            lambda: self.block(f"set {self.one('a', 'a, z')} = {self.one(self.any(2), self.any(1) + ', ' + self.any(1))}") + "{{ a }}",
            lambda: self.block("set c") + self.body(depth - 1) + self.block("endset") + "{{ c|length }}{{ c }}",
            lambda: self.block(f"set ns = namespace(k={self.any(1)}, items=1)") + self.block(f"for e in {self.list(1)}")
            + self.block(f"set ns.k = {self.one('ns.k ~ e', 'e', '[ns.k]', 'loop.index')}") + self.block("endfor") + "{{ ns.k }}{{ ns.items }}",
            lambda: self.block(f"macro f(p, q={self.any(1)})") + "<{{ p }}|{{ q }}>" + self.block("endmacro")
            + f"{{{{ f({self.any(1)}{self.one('', ', ' + self.any(1), ', q=' + self.any(1))}) }}}}",
            lambda: self.block("filter upper") + self.body(depth - 1) + self.block("endfilter"),
        )()

    def loop(self, depth):
        over = self.one(
            lambda: ("e", self.list(2)), lambda: ("e", self.any(1)), lambda: ("k, e", f"{self.dictionary(1)}.items()"),
            lambda: ("e", "r"), lambda: ("e", f"{self.list(1)} if {self.one('e', 'e is string', 'loop is not defined')}"),
        )()
        self.locals.append("e")
        inner = self.one(
            "{{ loop.index }}/{{ loop.length }}", "{{ loop.first }}{{ loop.last }}", "{{ loop.index0 ~ loop.revindex }}",
            "{{ loop.cycle('a', 'b') }}", "{{ loop.previtem }}|{{ loop.nextitem }}", "{{ loop.changed(e) }}", "{{ loop.revindex0 }}{{ loop.depth }}",
            "{% if loop.index > 2 %}{% break %}{% endif %}", "{% if e is none %}{% continue %}{% endif %}", "{{ e }}", "{{ e.role }}", "",
        )
        out = self.block(f"for {over[0]} in {over[1]}") + inner + self.body(depth - 1) + self.one("", self.block("else") + "none") + self.block("endfor")
        self.locals.pop()
        return out


def main():
    seed, count = map(int, sys.argv[1:3])
    made = environment()
    for index in range(count):
        maker = Maker(seed * 1_000_003 + index)
        values = maker.values()
        # Half of the cases are one expression, so that what differs is seen alone.
        template = maker.printed() if maker.random.random() < 0.6 else maker.body(2)
        case = {"template": template, "values": values}
        try:
            case["text"] = made.from_string(template).render(json.loads(json.dumps(values)))
            # The address of an object.
            if " at 0x" in case["text"]:
                case["error"] = "it prints an object: " + case.pop("text")
            json.dumps(case, ensure_ascii=False).encode()
        except Exception as error:
            case.pop("text", None)
            case["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(case))


main()
