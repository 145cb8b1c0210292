"""What was said about a model when an adapter was trained, from the config of its run."""

from pathlib import Path

from lorawgpu.config.source import read_yaml
from lorawgpu.errors import UserError
from lorawgpu.files.run_folder import RUN_CONFIG_FILE
from lorawgpu.weights.options import ModelOptions, check_options


def kept_options(adapter: str | Path | None) -> ModelOptions:
    """The `overrides_of_model_config` of the run that an adapter, or checkpoint, comes from; {} if there is none.

    UserError if they are not valid.
    """
    if adapter is None:
        return {}
    for folder in (Path(adapter), Path(adapter).parent):
        if (path := folder / RUN_CONFIG_FILE).is_file():
            found = read_yaml(path).data.get("overrides_of_model_config")
            try:
                return check_options(found)
            except ValueError as error:
                raise UserError(f"{path}: overrides_of_model_config: {error}") from None
    return {}
