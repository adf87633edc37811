"""Faults for every kernel, made in its source: a changed operator, or a guard, a barrier or an
assignment that is removed."""

import re
import typing
import zlib

from chainer_bspmm.cuda import kernels

# Pairs (pattern, replacement) of regular expressions. Every match in a line is a possible fault.
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
# Comments, and code that is only for the compiler: it notices a fault there, or the fault has no
# effect.
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
    """Mutant of a file of `kernels/`, with a fault in a line."""

    file: str
    line: str  # line without the fault
    fault: str  # line with the fault
    text: str  # whole file with the fault


def mutants(path):
    """Return one mutant each of a sixth of a file's lines; the choice depends only on the lines."""
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
            # Equal lines count as one, and the fault is in one of them.
            mutant = Mutant(path.name, line.strip(), fault.strip(), changed)
            found.setdefault(line, []).append(mutant)
    order = {line: zlib.crc32(line.encode()) for line in found}
    lines = sorted(found, key=order.get)[: max(3, len(found) // 6)]
    return [found[line][order[line] % len(found[line])] for line in lines]


def paths():
    """Return the files of `kernels/` in a fixed order: first the kernels, then the headers."""
    return [*sorted(kernels.paths().values()), *sorted(kernels.directory().glob('*.cuh'))]
