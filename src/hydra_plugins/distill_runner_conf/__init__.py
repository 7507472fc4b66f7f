"""Plugins that add the user's configuration folder; Hydra finds them in the namespace package ``hydra_plugins``."""

from pathlib import PurePosixPath

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from distill_runner.compose.folders import config_folder, own_folder
from distill_runner.compose.hydra_private import FileConfigSource
from distill_runner.compose.renamed import current_file


class OwnFiles(FileConfigSource):
    """Files of the user's configuration folder, read with new names in place of old ones (``compose/renamed.py``)."""

    @staticmethod
    def scheme() -> str:
        return "own"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        group = PurePosixPath(config_path).parent.as_posix().replace("/", ".").strip(".")
        package = (result.header.get("package") or "_group_").replace("_group_", group)
        content = OmegaConf.to_container(result.config, resolve=False)
        current = current_file(content, "" if package == "_global_" else package)
        if current != content:
            result.config = OmegaConf.create(current)
        return result


class OwnConfiguration(SearchPathPlugin):
    """Search path plugin that puts the user's configuration folder before the folder of this package.

    Hydra itself would append the folder of ``--config-dir``, where it could not override a file of this package.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        shipped = str(config_folder())
        is_ours = any(part.path.removeprefix("file://") == shipped for part in search_path.get_path())
        if is_ours and (own := own_folder()):
            search_path.prepend("own", f"{OwnFiles.scheme()}://{own}")
