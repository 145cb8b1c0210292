"""Columns of Parquet files, of types that Python has no value for: times to the nanosecond, dates beyond year 9999.

They become text, as ISO 8601 spells them, also inside lists and structs. Nothing is trained from them unless a data set
names such a column as its text.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow


def plain_column(column: "pyarrow.Array") -> "pyarrow.Array":
    """The column with times as text; nulls, if Arrow has no text for them."""
    import pyarrow

    wanted = _plain(column.type)
    if wanted == column.type:
        return column
    try:
        return column.cast(wanted)
    except pyarrow.ArrowException:  # a time zone that this system does not know, nested types that cannot be cast
        return pyarrow.nulls(len(column))


def _plain(kind: "pyarrow.DataType") -> "pyarrow.DataType":
    import pyarrow
    from pyarrow import types

    if types.is_duration(kind):
        return pyarrow.int64()
    if types.is_temporal(kind):
        return pyarrow.string()
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_large_list(kind):
        return pyarrow.large_list(_plain(kind.value_type))
    if types.is_list(kind):
        return pyarrow.list_(_plain(kind.value_type))
    return kind
