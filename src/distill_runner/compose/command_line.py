"""Between the console script and Hydra: the help, and the arguments for Hydra."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser  # private: the only list of Hydra's options and of which take a value
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from distill_runner.common.errors import UserError, command
from distill_runner.common.terminal import wrapped
from distill_runner.compose import folders

HELP = "See distill-run --help."
HELP_TEXT = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
LISTS = (
    r"(?:[\w.]+\.)?(?:columns|train_columns|labels|metrics|probabilities|logits|answers|no_answer"
    r"|teacher_vectors|sources|classes|betas|milestones|prefixes|tags|where)|task\.resize"
)
"""Options that hold a list, which a grid does not vary."""
KEY = re.compile(r"(~|\+{0,2})\w[\w-]*([./@:][\w-]+)*")
UNQUOTED = r"^(choice|range|interval|glob|shuffle|sort|tag|extend_list)\(|(?<!^)[\[\]{}\"]"
"""Values that are no text even if Hydra cannot read them: its functions, and brackets or quotes within."""
OPTUNA = (
    "hydra.sweeper.direction=maximize",
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.max_failure_rate=1.0",  # a failed point is reported, and does not end the study
)
"""Our defaults for the sweeper of Optuna, which would minimize the score."""


def hydra_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra: the overrides with expanded shorthands, then the options.

    Hydra takes no overrides after an option.

    Raises:
        UserError: an argument is no text, there is no such option, no such configuration folder, or several names for
            a group.
    """
    for argument in arguments:
        if re.search("[\ud800-\udfff]", argument):  # bytes that the locale's encoding lacks; no file takes them
            problem = f"is not text in this locale's encoding, {sys.getfilesystemencoding()}"
            raise UserError(argument, None, problem, "Set LC_ALL=C.UTF-8, or use ASCII in names of files.")
        if re.fullmatch(r"[+~]*", argument):  # an empty text too, as of a variable of the shell that is not set
            raise UserError(shlex.quote(argument), None, "is not of the form <key>=<value>", HELP)
    parsed, rest = get_args_parser().parse_known_args(arguments)
    for argument in rest:
        if argument.startswith("-"):
            remedy: str = "What a run does is written <key>=<value>. See " + command("distill-run --help")
            raise UserError(argument, None, "there is no such option", remedy)
    for option in ("config_name", "config_path"):
        if value := getattr(parsed, option):
            problem = "cannot be chosen: the configuration is that of the package, with your files beside it"
            remedy = "Put your files into conf/ here, or name their folder: --config-dir=<folder>"
            raise UserError(f"--{option.replace('_', '-')}", value, problem, remedy)
    overrides, folder, multirun = [*parsed.overrides, *rest], parsed.config_dir, parsed.multirun
    if folder is not None and not Path(folder).is_dir():
        raise UserError("--config-dir", folder, "there is no such folder")
    folders.CONFIG_DIR[:] = [] if folder is None else ["--config-dir", folder]  # Hydra would search it last
    config_dir = ("--config-dir", "-cd", folder, f"--config-dir={folder}", f"-cd={folder}")
    options = [argument for argument in arguments if argument not in (*overrides, *config_dir)]
    if not options and any(override.startswith("sweep=") for override in overrides):
        options, multirun = ["-m"], True  # the file says so too, but Hydra may fail before it reads the file
    overrides = [quoted(expand_shorthand(override)) for override in overrides]
    for override in overrides:
        name, _, value = override.lstrip("+").partition("=")
        if value.startswith("[") and folders.choices(name):  # Hydra would merge them
            remedy = "One run for each name: " + command(f"distill-run -m {name}={value.strip('[]')}")
            raise UserError(name, value, "takes one name of the group, not several", remedy)
    sweeper = next((part.partition("=")[2] for part in overrides if part.startswith("hydra/sweeper=")), None)
    if sweeper:
        typed = {override.partition("=")[0] for override in overrides}
        defaults = [part for part in OPTUNA if sweeper == "optuna" and part.partition("=")[0] not in typed]
        return [*overrides, *defaults, *options]
    return [*(map(_as_axis, overrides) if multirun else overrides), *options]


def expand_shorthand(override: str) -> str:
    """Expand the shorthands in an override.

    ``student.init=random`` stands for ``student.init.layers=random``, and ``task.columns=a,b`` for a list, as all of
    ``LISTS``: zsh reads brackets as a pattern. A value that begins with ``~/`` is a path in the home folder.

    A part of a split, ``train[:90%]``, and a metric with an address get quotes, which Hydra's grammar needs.
    """
    key, _, value = override.partition("=")
    if value.startswith("~/"):
        return f"{key}={os.path.expanduser(value)}"
    override = re.sub(r"^(\+{0,2}[\w.]+)=([\w./:-]+\[[\w~%.]*:[\w~%.]*\])$", r"\1='\2'", override)
    if (metrics := re.fullmatch(r"task\.metrics=\[?(.*?)\]?", override)) and re.search(r"[:/?]", metrics[1]):
        names = (name if name[:1] in "'\"" else f"'{name.strip()}'" for name in metrics[1].split(","))
        return f"task.metrics=[{','.join(names)}]"
    if not override.endswith("=null"):
        override = re.sub(rf"^(\+{{0,2}}{LISTS})=([^][{{}}()'\"]+)$", r"\1=[\2]", override)
    return re.sub(r"^student\.init=([\w,]+)$", r"student.init.layers=\1", override)


def parsed(override: str) -> tuple[str, Any]:
    """Return the key and the value of an override, with the shorthands of a run.

    Raises:
        UserError: it is not of the form ``<key>=<value>``.
    """
    try:
        result = OverridesParser.create().parse_override(quoted(expand_shorthand(override)))
    except HydraException as error:
        raise UserError(override, None, "is not of the form <key>=<value>") from error
    return str(result.key_or_group), result.value()


def quoted(override: str) -> str:
    """Quote the values that Hydra's grammar takes only in quotes: =, #, ~, apostrophes, letters outside ASCII."""
    key, equals, value = override.partition("=")
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        opening, inner, closing = value[:1], value[1:-1], value[-1:]
        is_list = (opening, closing) == ("[", "]")
        is_text = (is_list or opening not in "[{'\"") and not re.search(UNQUOTED, value[:-1])
        if equals and KEY.fullmatch(key) and is_text:
            escaped = (part.strip().replace("'", r"\'") for part in (inner if is_list else value).split(","))
            text = ",".join(f"'{part}'" for part in escaped)
            return f"{key}=[{text}]" if is_list else f"{key}={text}"
    return override


def _as_axis(override: str) -> str:
    """Turn ``a.b=1`` of a sweep into an axis with one value, which is set after the point has chosen ``a``."""
    match = re.fullmatch(r"(?!(?:hydra|sweep|frontier|runtime|store|tracker)\.)(\w+(?:\.\w+)+)=([\w.+-]+)", override)
    if not match:
        return override
    key, value = match.groups()
    return f"{key}=null,null" if value == "null" else f"{key}=choice({value})"  # choice() takes no null


def help_text(subcommands: str) -> str:
    """Return the help text with the subcommands and with the names in each group, wrapped to the terminal's width."""
    lines = [wrapped(f"{group}: {', '.join(folders.choices(group))}") for group in folders.groups()]
    return HELP_TEXT.replace("{groups}", "\n".join(lines)).replace("{subcommands}", subcommands)
