"""Faults for every kernel, made from its source: an operator is another one, a guard, a barrier or
an assignment is missing."""

import re
import typing
import zlib

from chainer_bspmm.cuda import kernels

# What a line may hold, and what then stands there.
RULES = [
    (r' ([<>]) ', r' \1= '),
    (r' ([<>])= ', r' \1 '),
    (r' == ', ' != '),
    (r' != ', ' == '),
    (r' && ', ' || '),
    (r' \|\| ', ' && '),
    (r' [+-] 1\b(?!\.)', ''),
    (r' \+ (?!1\b)', ' - '),
    (r' - (?!1\b)', ' + '),
    (r' \* ', ' + '),
    (r' / ', ' * '),
    (r' % ', ' / '),
    (r' [-+*|&]= ', ' = '),
    (r' \? ', ' || true ? '),
    (r' \? ', ' && false ? '),
    (r'\b(?:thread|block)Idx\.[xyz]\b', '0u'),
    (r'\bif \((?=.*\) (?:return|continue|break);)', 'if (false && '),  # a guard
    (r'(?m)^( +)[\w.\[\]>-]+ [-+*/|&]?= [^;{]*;$', r'\1;'),
    (r'__sync(?:threads|warp)\(\);', ';'),
    (r'atomicAdd\(', '[](auto *to, auto value) { *to += value; }('),
]
# Comments and what only the compiler reads: a fault there is noticed by it, or has no effect.
LEFT_ALONE = [
    r'//.*',
    r'(?m)^#if.*__CUDA_ARCH__[^#]*',
    r'(?m)^#.*(?:\\\n.*)*',
    r'(?:static_assert|asm volatile)\([^;]*;',
    r'template <.*?>(?=\s)',
    r'(?m)^(?:\[\[maybe_unused\]\] )?const(?:expr)? [^;]*;',
    r'(?m)^ +constexpr [^;]*;',
    r'(?m)^struct .*',
    r'\b[A-Z_]+ [!=]= [A-Z_]+\b',
    r'(?<=for \()[^;\n]*; \w+ <=? [A-Z_][A-Z_0-9 /+]*; [^;\n]*(?=\))',
]


class Mutant(typing.NamedTuple):
    """A file of `kernels/` with a fault in a line."""

    file: str
    line: str  # as it is without the fault
    fault: str  # as it is
    text: str  # of the file


def mutants(path):
    """Return a sixth of a file's lines, each with a fault: the same until they change."""
    text = path.read_text()
    found = {}
    code = text
    for pattern in LEFT_ALONE:
        code = re.sub(pattern, lambda match: re.sub(r'.', ' ', match[0]), code)
    for pattern, new in RULES:
        for match in re.finditer(pattern, code):
            begin = text.rindex('\n', 0, match.start() + 1) + 1
            line = text[begin : text.index('\n', begin)]
            changed = text[: match.start()] + match.expand(new) + text[match.end() :]
            fault = changed[begin : changed.index('\n', begin)]
            # A line that is there twice has one fault, in one place.
            mutant = Mutant(path.name, line.strip(), fault.strip(), changed)
            found.setdefault(line, []).append(mutant)
    order = {line: zlib.crc32(line.encode()) for line in found}
    lines = sorted(found, key=order.get)[: max(3, len(found) // 6)]
    return [found[line][order[line] % len(found[line])] for line in lines]


def paths():
    """Return the files of `kernels/` in a fixed order: the kernels, then the headers."""
    return [*sorted(kernels.paths().values()), *sorted(kernels.directory().glob('*.cuh'))]
