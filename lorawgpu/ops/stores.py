"""The storage formats of frozen matrices, and what kernels need to know about each. No other file tests a store's name.

To add one: a record here, its snippets in shaders/common, a host matrix with a packer (weights.device.lines_of), and a
generator of random matrices (doctor.matmul.MATRICES), which all checks and tests of stores use.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Store:
    """How a matrix is stored: a line holds `rows` matrix rows, and each `block` columns take `elements` of `dtype`.

    `common/weight_<name>.wgsl` reads 4 x 4 weights as floats; `params.ldb4` is the matrix's columns / 4.
    """

    name: str
    dtype: str
    rows: int = 1
    block: int = 1
    elements: int = 1
    int8_snippet: str | None = None  # weight_<..>.wgsl, which reads codes for products with int8 rows (BitLinear)
    lookup: str | None = None  # embeddings read it through "row"_<name>.wgsl, four columns of a row, or "weight"_<name>
    f16_parts: int = 2  # in how many f16 a value splits, after a power of two; the rest is below float32's rounding
    scaled: bool = False  # each of the stacked matrices has its own scale
    decoded: bool = False  # decoding is expensive, so a taller tile, which decodes less often, pays
    adapter_in_transposed: bool = True  # dx = dy W has registers to spare for + dh A in its epilogue
    random: int | None = None  # `kind` in random_weights.wgsl, which fills synthetic weights
    scales: str = "f16"  # dtype of the scales that end a record, for blocks
    int8_codes: bool = False  # its codes are integers, which weight_words gives as int8
    unit: tuple[float, ...] = ()  # values of these scales with which random codes have a standard deviation of about 1

    @property
    def int8_input(self) -> bool:
        """Whether a linear layer with this store quantizes its input to int8 per token."""
        return self.int8_snippet is not None

    @property
    def affine(self) -> bool:
        """Whether blocks have an offset next to their scale."""
        return len(self.unit) == 2

    @property
    def scale_words(self) -> int:
        """Words of the scales that end a record, four of each kind."""
        return (4 if self.scales == "f32" else 2) * len(self.unit)

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return {"f32": 32, "u32": 32}.get(self.dtype, 16) * self.elements / (self.rows * self.block)

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Number of lines, and elements per line. ValueError unless the matrix consists of whole blocks."""
        if rows % self.rows or columns % self.block:
            raise ValueError(
                f"{self.name} stores blocks of {self.rows} x {self.block} weights; a matrix of {rows} x {columns} "
                "does not consist of whole blocks"
            )
        return rows // self.rows, columns // self.block * self.elements

    def columns(self, elements: int) -> int:
        """Matrix columns in a line of `elements` elements."""
        return elements // self.elements * self.block


def blocks(name: str, block: int, words: int, *unit: float, scales: str = "f16") -> Store:
    """A store of records of 4 x `block` weights, `words` long (shaders/common/blocks.wgsl, weights/blocks.py)."""
    return Store(
        name,
        "u32",
        rows=4,
        block=block,
        elements=words,
        lookup="weight",
        decoded=True,
        adapter_in_transposed=False,  # as for ternary: decoding takes the registers
        random=4,
        scales=scales,
        int8_codes=scales == "f16",
        unit=unit,
    )


F32 = Store("f32", "f32", lookup="row", random=2)
BF16 = Store("bf16", "bf16", lookup="row", f16_parts=1, random=1)
F16 = Store("f16", "f16", lookup="row", f16_parts=1)
TERNARY = Store(
    "ternary",
    "u32",
    rows=4,
    block=4,
    int8_snippet="ternary_int8",
    f16_parts=1,
    scaled=True,
    decoded=True,
    adapter_in_transposed=False,  # with the adapter's term, the loop ran at 38 TFLOP/s instead of 45
    random=0,
)
# GGML's block types, by their names in lower case.
GGML = (
    blocks("q8_0", 32, 34, 1 / 74),
    blocks("q4_0", 32, 18, 1 / 4.6),
    blocks("q4_1", 32, 20, 1 / 4.6, -7.5 / 4.6),
    blocks("q5_0", 32, 22, 1 / 9.2),
    blocks("q5_1", 32, 24, 1 / 9.2, -15.5 / 9.2),
    blocks("q2_k", 256, 84, 1 / 13.9, 1.5 / 13.9),
    blocks("q3_k", 256, 114, 1 / 173),
    blocks("q4_k", 256, 148, 1 / 1037, 7.5 / 1037),
    blocks("q5_k", 256, 180, 1 / 2116, 15.5 / 2116),
    blocks("q6_k", 256, 210, 1 / 1370),
    blocks("iq4_nl", 32, 18, 1 / 67),
    blocks("iq4_xs", 256, 138, 1 / 4980),
)
NF4 = blocks("nf4", 64, 36, 1 / 0.53, scales="f32")  # bitsandbytes' 4-bit type
# Codes with a scale and an offset for each group of columns: MLX, GPTQ, AWQ, compressed-tensors. Offsets are products
# of scales and zero points, so both are in f32, which keeps every value.
AFFINE = (
    *(blocks(f"affine4_{n}", n, n // 2 + 8, 1 / 4.6, 7.5 / 4.6, scales="f32") for n in (32, 64, 128)),
    *(blocks(f"affine8_{n}", n, n + 8, 1 / 74, 127.5 / 74, scales="f32") for n in (32, 64, 128)),
)
STORES = {store.name: store for store in (F32, BF16, F16, TERNARY, *GGML, NF4, *AFFINE)}
