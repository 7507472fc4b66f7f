"""Plugin that adds the user's configuration folder; Hydra finds it in the namespace package ``hydra_plugins``."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from distill_runner.compose.folders import config_folder, own_folder


class OwnConfiguration(SearchPathPlugin):
    """Search path plugin that puts the user's configuration folder before the folder of this package.

    Hydra itself would append the folder of ``--config-dir``, where it could not override a file of this package.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        shipped = str(config_folder())
        is_ours = any(part.path.removeprefix("file://") == shipped for part in search_path.get_path())
        if is_ours and (own := own_folder()):
            search_path.prepend("own", f"file://{own}")
