"""The storage formats of frozen matrices, and what each means to the kernels that read it. Nothing else tests its name.

To add one: a record here, its snippets in shaders/common, a host matrix with a packer (weights.device.lines_of), and a
generator of random matrices (doctor.matmul.MATRICES), which every check and test of stores uses.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Store:
    """A line of the stored array holds `rows` rows of the matrix; every `block` columns take `elements` of `dtype`.

    `common/weight_<name>.wgsl` reads 4 x 4 weights as floats, from `params.ldb4` = columns of the matrix / 4.
    """

    name: str
    dtype: str
    rows: int = 1
    block: int = 1
    elements: int = 1
    int8_snippet: str | None = None  # weight_<..>.wgsl reads codes for products of int8 rows (BitLinear)
    row_snippet: str | None = None  # row_<..>.wgsl reads four columns of a row: embeddings may come in this store
    scaled: bool = False  # each of the stacked matrices has a scale of its own
    decoded: bool = False  # decoding costs so much that a taller tile pays, which decodes less often
    adapter_in_transposed: bool = True  # dx = dy W has registers to spare for + dh A in its epilogue
    random: int | None = None  # `kind` of random.wgsl, which fills it for benchmarks

    @property
    def int8_input(self) -> bool:
        """Whether the input of a linear layer is quantized to int8 per token."""
        return self.int8_snippet is not None

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Lines and elements of a line. ValueError unless they hold whole blocks of the matrix."""
        if rows % self.rows or columns % self.block:
            raise ValueError(
                f"{self.name} stores blocks of {self.rows} x {self.block} weights; a matrix of {rows} x {columns} "
                "is not made of whole ones"
            )
        return rows // self.rows, columns // self.block * self.elements

    def columns(self, elements: int) -> int:
        """Columns of the matrix in a line of so many elements."""
        return elements // self.elements * self.block


F32 = Store("f32", "f32", row_snippet="f32", random=2)
BF16 = Store("bf16", "bf16", row_snippet="bf16", random=1)
F16 = Store("f16", "f16", row_snippet="f16")
TERNARY = Store(
    "ternary",
    "u32",
    rows=4,
    block=4,
    int8_snippet="ternary_int8",
    scaled=True,
    decoded=True,
    adapter_in_transposed=False,  # the loop ran at 38 for 45 TFLOP/s
    random=0,
)
STORES = {store.name: store for store in (F32, BF16, F16, TERNARY)}
