"""The types of config values with their error messages, and the entries of `datasets`."""

import re
from dataclasses import MISSING, fields
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from lorawgpu.chat.arguments import Arguments, check_arguments
from lorawgpu.data.batch_order import MAX_WEIGHT, MIN_WEIGHT
from lorawgpu.data.configurations import KINDS
from lorawgpu.data.formats import ALIASES, FORMATS, ROLES, check_type
from lorawgpu.data.prompt_format import FIELDS, check_format
from lorawgpu.data.renaming import Renaming
from lorawgpu.data.slices import parse_split
from lorawgpu.families.modules import ALL_MODULES, ENDS
from lorawgpu.lora.ends import check_modules_to_save, check_token_indices
from lorawgpu.weights.options import CHOICES, check_options

_PATTERN = re.compile(r"[\\^$|?*+()]")  # a name, or names written as one string, have none of these
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _number_from_text(value):
    """People write `1e-4`, which is a string in YAML 1.1: that wants `1.0e-4`."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _flag_from_text(value):
    """In other tools' files, and after `--set` of quoted text, true and false may be strings."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _token_indices(value):
    return {module: list(ids) for module, ids in check_token_indices(value).items()}


def _overrides(value):
    """Ids as strings, as a checkpoint has them."""
    if not isinstance(value, dict) or not all(
        str(key).isdecimal() and isinstance(t, str) and t for key, t in value.items()
    ):
        raise ValueError("wanted tokens by their ids, such as `{128002: '<|think|>'}`")
    return {str(int(key)): text for key, text in value.items()}


def _new_tokens(value):
    tokens = as_list(value)
    if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
        raise ValueError("wanted a list of tokens, such as `['<|think|>']`")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{next(t for t in tokens if tokens.count(t) > 1)!r} is listed twice")
    return tokens


def as_list(value):
    return [value] if isinstance(value, str) else value


def off_of_yaml(value):
    """YAML 1.1 reads `off` as false."""
    return "off" if value is False else value


def _split(value):
    parse_split(value)
    return value


def _data_set(value):
    if not isinstance(value, dict | BaseModel):
        raise ValueError(f"wanted `- path: {value if isinstance(value, str) else 'FILE'}`")
    return value


def _data_sets(value):
    if not isinstance(value, list):
        raise ValueError(f"wanted a list, such as `- path: {value if isinstance(value, str) else 'FILE'}`")
    return value


def _targets(value):
    if value == "all-linear":
        return value
    if isinstance(value, str) and _PATTERN.search(value):
        return _pattern(value)
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(
            r"wanted a list of module names, or all-linear, or a pattern of whole module paths such as .*\.q_proj"
        )
    for name in value:
        if name.split(".")[-1] not in (*ALL_MODULES, *ENDS):
            raise ValueError(f"unknown module {name!r}; wanted some of {', '.join((*ALL_MODULES, *ENDS))}")
    return value


def _pattern(value):
    try:
        re.compile(f"(?:{value})")  # inside of a group, as adapters of multimodal models have it
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{value!r} is not a valid regular expression: {error}") from None
    return value


def _not_all(value):
    if isinstance(value, float) and value == 1:
        raise ValueError("that is all samples, or one: wanted a fraction below 1, or 1 without a decimal point")
    return value


def _val_set_size(value):
    if value >= 1 and value != int(value):
        raise ValueError("wanted a whole number of samples, or a fraction below 1")
    return int(value) if value == int(value) else value


def _interval(value):
    if value >= 1 and (value != int(value) or value > MAX_COUNT):
        raise ValueError("wanted a whole number of steps, or a fraction of all steps below 1")
    return int(value) if value >= 1 else value


def _fits_float32(value):
    if value > 1e30:
        raise ValueError("wanted at most 1e30, to fit a float32")
    return value


Number = Annotated[float, BeforeValidator(_number_from_text), Field(allow_inf_nan=False), AfterValidator(_fits_float32)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
MAX_COUNT = 2**31 - 1  # more than any count that makes sense; larger ones would overflow in later computations
Flag = Annotated[bool, BeforeValidator(_flag_from_text)]
Share = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Interval = Annotated[Positive, AfterValidator(_interval)]
HeldOut = Annotated[NotNegative, AfterValidator(_val_set_size), BeforeValidator(_not_all)]
Targets = Annotated[Literal["all-linear"] | str | list[str], BeforeValidator(_targets)]
WholeModules = Annotated[list[str], BeforeValidator(lambda value: list(check_modules_to_save(value)))]
NewTokens = Annotated[list[str], BeforeValidator(_new_tokens)]
TokenOverrides = Annotated[dict[str, str], BeforeValidator(_overrides)]
TokenIndices = Annotated[
    dict[str, list[int]], BeforeValidator(_token_indices, json_schema_input_type=list[int] | dict[str, list[int]])
]
Format = Annotated[str, AfterValidator(check_type), Field(json_schema_extra={"enum": [*FORMATS, *ALIASES]})]
TemplateArguments = Annotated[Arguments, AfterValidator(check_arguments)]
ModelOverrides = Annotated[
    dict[str, str],
    BeforeValidator(check_options),
    Field(json_schema_extra={"properties": {key: {"enum": list(values)} for key, values in CHOICES.items()}}),
]
Roles = Annotated[list[Literal[ROLES]], BeforeValidator(as_list)]
Split = Annotated[str, Field(min_length=1), AfterValidator(_split)]
Names = Annotated[list[str], BeforeValidator(as_list)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class SpecialTokens(Section):
    bos_token: str | None = None
    """The token that begins a text."""
    eos_token: str | None = None
    """The token that ends one."""

    def chosen(self) -> dict[str, str]:
        """The tokens by name, without those that stay as they are."""
        return self.model_dump(exclude_none=True)


class _DataSet(Section):
    path: str = Field(min_length=1)
    """A file, a folder, a glob, `builtin:NAME` or a Hugging Face data set name."""
    type: Format | None = None
    """The format; by default detected from the keys of the records."""
    split: Split | None = None
    """Of a folder or hub data set, by the names of its files; by default `train`, and for `test_datasets` `validation`,
    else `test`. Also slices and sums, as `train[:500]`, `train[10%:20%]`, `train[-100:]+test`."""
    name: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list)] | None = None
    """The configuration of a folder or hub data set, or several: of `configs` in its README.md, or folders of that
    name; by default the README.md's own default, if it has one."""
    revision: Annotated[str, Field(min_length=1)] | None = None
    """The branch, tag or commit of a hub data set; by default `main`."""
    data_files: Names = []
    """Files of a folder or hub data set, by name or glob; all are read unless `split` says otherwise."""
    ds_type: Literal[tuple(KINDS)] | None = None
    """The kind of its files, `json` (also .jsonl), `csv` or `parquet`; other files of a folder are not read."""
    shards: Count | None = None
    """Use one of so many parts of the data set, shuffled by `seed` before it is cut."""
    shards_idx: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """Which of `shards`, from 0."""
    roles_to_train: Roles | None = None
    """As the key of this name for all data sets."""
    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    """Which ends of turns carry loss: of the turns to train, of all, of the last one, or none."""
    weight: Annotated[Number, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    """How many times per epoch each sample is used."""

    @model_validator(mode="after")
    def _check_shard(self):
        if self.shards_idx >= (self.shards or 1):
            wanted = f"below shards, which is {self.shards}" if self.shards else "shards next to it"
            raise ValueError(f"shards_idx: got {self.shards_idx}; wanted {wanted}")
        return self

    @model_validator(mode="after")
    def _check_formats(self):
        alone = [key for key in ("no_input_format", "system_format", "system_prompt") if getattr(self, key) is not None]
        if alone and self.format is None:
            raise ValueError(f"{alone[0]}: only next to `format`, which has the prompt of a question")
        if self.format is not None and self.type not in (None, "alpaca"):
            raise ValueError(f"format: writes the prompts of a question and its answer; remove type: {self.type}")
        for key in FIELDS:
            if (text := getattr(self, key)) is not None:
                try:
                    check_format(key, text)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None
        return self

    def renaming(self) -> Renaming | None:
        """The names of the keys in the data, None if they are ours."""
        values = {f.name: value for f in fields(Renaming) if (value := getattr(self, f.name))}
        return Renaming(**values) if values else None


def _renaming_keys() -> dict:
    """The keys of Renaming, as fields of a section."""
    keys = {}
    for f in fields(Renaming):
        default = {} if f.default is MISSING else f.default
        keys[f.name] = (Flag if f.type is bool else f.type, Field(default, description=f.metadata["meaning"]))
    return keys


DataSet = create_model("DataSet", __base__=_DataSet, **_renaming_keys())
DataSets = Annotated[list[Annotated[DataSet, BeforeValidator(_data_set)]], BeforeValidator(_data_sets)]
