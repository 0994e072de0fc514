"""Compiles the kernels for a GPU that need not be there: `python -m tests.kernels.compiled`.

Triton decides at its import whether kernels are interpreted, so that this is a program of its own,
which a test runs. Launches compile instead: the first variant of a kernel as far as Triton's code
for GPUs, all others as far as the code before it, on the way to which the errors are that an
interpreter does not see. The last line of stdout is a `Report` in JSON.
"""

from __future__ import annotations

import ast
import gc
import json
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

__all__ = ["Report"]


@dataclass
class Report:
    """What came of the launches."""

    errors: list[str] = field(default_factory=list)
    """A kernel, the call that launched it and what the compiler says."""
    missed: list[str] = field(default_factory=list)
    """Statements of kernels and their functions that no variant holds."""


class Compiler:
    """Stands where launches, the driver and the compiler of Triton do."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.report = Report()
        self.target = GPUTarget("cuda", 90, 32)
        self._call = ""
        self._begun: set[str] = set()
        self._met: set[tuple[Any, int]] = set()

    def run(self, name: str, call: Callable[[], object]) -> None:
        """Compile what a call launches; say which on stderr, where the compiler says more."""
        print(name, file=sys.stderr, flush=True)
        self._call = name
        call()

    def install(self) -> None:
        """Take the places, for the rest of the process."""
        from triton.compiler.code_generator import CodeGenerator
        from triton.runtime import driver, jit

        from simserve_kernels import checks

        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: self.target,
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
            )
        )
        torch.cuda.get_device_capability = lambda device=None: divmod(self.target.arch, 10)
        # Tensors of the CPU pass for those of a GPU, as they do where kernels are interpreted.
        checks.os = SimpleNamespace(environ={"TRITON_INTERPRET": "1"})
        triton.compiler.compile = self._compile
        jit.KernelInterface.__getitem__ = lambda kernel, grid: (
            lambda *args, **options: self._launch(kernel, grid, args, options)
        )
        visit = CodeGenerator.visit

        def noted(generator: Any, node: Any) -> Any:
            if isinstance(node, ast.stmt):  # those that Triton makes of defaults have no line
                self._met.add((generator.jit_fn, getattr(node, "lineno", 0)))
            return visit(generator, node)

        CodeGenerator.visit = noted

    def _launch(
        self, kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        from triton.errors import TritonError

        try:
            kernel.warmup(*args, grid=grid, **options)
        except (TritonError, RuntimeError) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # the innermost function says what is wrong
                cause = cause.__cause__
            self.report.errors.append(f"{kernel.__name__} of {self._call}:\n{cause}")

    def _compile(self, source: Any, target: Any, options: dict[str, Any]) -> str:
        from triton._C.libtriton import ir
        from triton.compiler.compiler import make_backend

        backend = make_backend(target)
        parsed = backend.parse_options(options)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
        code = source.make_ir(target, parsed, functions, modules, context)
        stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        backend.add_stages(stages, parsed, source.language)
        last = "ttir" if source.name in self._begun else "ttgir"
        self._begun.add(source.name)
        metadata: dict[str, Any] = {}
        for name, stage in stages.items():
            code = stage(code, metadata)
            if name == last:
                break
        return last  # what stands for the kernel in the cache of launches

    def find_missed(self) -> None:
        """Report the statements that were in no variant."""
        from triton.runtime.jit import JITFunction

        import simserve_kernels

        for found in pkgutil.iter_modules(simserve_kernels.__path__, "simserve_kernels."):
            for function in vars(import_module(found.name)).values():
                if isinstance(function, JITFunction) and function.__module__ == found.name:
                    self.report.missed += self._missed_of(function)

    def _missed_of(self, function: Any) -> list[str]:
        definition = function.parse().body[0]
        documented = ast.get_docstring(definition) is not None
        return [
            f"{function.__module__}.{function.__name__}: {ast.unparse(node).splitlines()[0]}"
            for statement in definition.body[documented:]
            for node in ast.walk(statement)
            if isinstance(node, ast.stmt) and (function, node.lineno) not in self._met
        ]


def main() -> None:
    """Compile all cases and print the report."""
    gc.disable()  # what is made here lives as long as the process, or nearly
    from tests.kernels.compile_cases import compile_cases

    compiler = Compiler()
    compiler.install()
    for name, call in compile_cases():
        compiler.run(name, call)
    compiler.find_missed()
    print(json.dumps(asdict(compiler.report)))


if __name__ == "__main__":
    main()
