"""Load a shader, specialize it strictly, and keep one pipeline per specialization.

A kernel is a file `shaders/<stem>.wgsl`, or `<stem>.wgsl.j2` if a template unrolls it or picks its snippets; a
template may import macros from `common/<name>.wgsl.j2`. `// uses: common/<name>.wgsl` appends a shared snippet after
the main file, so line numbers in a driver's message are those of the main file. A snippet's directive (`enable f16;`)
moves to the top of the code, as WGSL requires.
"""

import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
import jinja2.meta

from lorawgpu.errors import DeviceError

SHADERS = Path(__file__).parent.parent / "shaders"
_USES = re.compile(r"^// uses: (common/\w+\.wgsl)$", re.M)
_DIRECTIVE = re.compile(r"^[ \t]*((?:enable|requires|diagnostic)\b[^;\n]*;)", re.M)
_BINDING = re.compile(r"@group\(0\)\s*@binding\((\d+)\)\s*var<([^>]*)>\s*(\w+)")
_OVERRIDE = re.compile(r"^override (\w+)\s*:", re.M)
_PARAMS = re.compile(r"^struct Params \{([^}]*)\}", re.M)
_FIELD = re.compile(r"(\w+)\s*:\s*(u32|i32|f32)\b")
_ENV = jinja2.Environment(
    loader=jinja2.FileSystemLoader(SHADERS), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


@cache
def _read(name: str) -> str:
    return (SHADERS / name).read_text()


@cache
def _wanted(name: str) -> frozenset:
    """The variables that the caller of a template must supply, those of imported templates included."""
    tree = _ENV.parse(_read(name))
    imported = (_wanted(other) for other in jinja2.meta.find_referenced_templates(tree))
    return frozenset(jinja2.meta.find_undeclared_variables(tree)).union(*imported)


def load(stem: str, template: tuple = ()) -> str:
    """WGSL of `stem` with its snippets appended. ValueError if a template value is missing or unused."""
    if (SHADERS / f"{stem}.wgsl").exists():
        if template:
            raise ValueError(f"{stem}.wgsl is not a template, but got template values {dict(template)}")
        code = _read(f"{stem}.wgsl")
    else:
        name = f"{stem}.wgsl.j2"
        if (wanted := _wanted(name)) != (got := {k for k, _ in template}):
            raise ValueError(f"{name} wants {sorted(wanted)}, got {sorted(got)}")
        code = _ENV.get_template(name).render(dict(template))
    seen, queue = set(), _USES.findall(code)
    while queue:
        if (name := queue.pop(0)) not in seen:
            seen.add(name)
            code += "\n" + _read(name)
            queue += _USES.findall(_read(name))
    return _directives_first(code)


def _directives_first(code: str) -> str:
    """Move each directive, once, to the start of the first line, so that no line number changes."""
    found = dict.fromkeys(_DIRECTIVE.findall(code))
    return " ".join([*found, _DIRECTIVE.sub("", code)]) if found else code


@dataclass(frozen=True)
class Kernel:
    """A compiled entry point: its pipeline, the binding index of each buffer name, and how to pack its Params."""

    label: str
    pipeline: object
    bindings: dict
    fields: tuple

    def pack(self, params: dict) -> bytes:
        """Params as the shader lays them out. ValueError if a field is missing or unknown."""
        if params.keys() != {n for n, _ in self.fields}:
            raise ValueError(f"{self.label}: Params has {[n for n, _ in self.fields]}, got {sorted(params)}")
        codes = {"u32": "I", "i32": "i", "f32": "f"}
        return struct.pack("<" + "".join(codes[t] for _, t in self.fields), *(params[n] for n, _ in self.fields))


class KernelCache:
    """Compiles kernels on first use: one shader module per file and template, one pipeline per specialization."""

    def __init__(self, device):
        self.device, self._kernels, self._modules = device, {}, {}

    def get(self, stem: str, entry: str, overrides: dict, template: dict) -> Kernel:
        rendered = tuple(sorted(template.items()))
        key = (stem, entry, tuple(sorted(overrides.items())), rendered)
        if key not in self._kernels:
            self._kernels[key] = self._compile(stem, entry, overrides, rendered)
        return self._kernels[key]

    def _compile(self, stem, entry, overrides, rendered) -> Kernel:
        label = f"{stem}.wgsl:{entry}"
        if (stem, rendered) not in self._modules:
            code = load(stem, rendered)
            try:
                module = self.device.wgpu.create_shader_module(label=f"{stem}.wgsl", code=code)
            except Exception as e:
                raise DeviceError(f"shader {label} does not compile: {e}") from e
            self._modules[stem, rendered] = module, code
        module, code = self._modules[stem, rendered]
        if unknown := overrides.keys() - set(_OVERRIDE.findall(code)):
            raise ValueError(f"{label} has no override {sorted(unknown)}")
        try:
            pipeline = self.device.wgpu.create_compute_pipeline(
                label=label,
                layout="auto",
                compute={
                    "module": module,
                    "entry_point": entry,
                    "constants": {k: float(v) for k, v in overrides.items()},
                },
            )
        except Exception as e:
            raise DeviceError(f"shader {label} {overrides}: {e}") from e
        fields = _PARAMS.search(code)
        return Kernel(
            label,
            pipeline,
            {name: int(i) for i, _, name in _BINDING.findall(code)},
            tuple(_FIELD.findall(re.sub(r"//.*", "", fields[1]))) if fields else (),
        )
