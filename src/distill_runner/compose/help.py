"""Text of ``distill-run --help``, made without composing: Hydra takes more than a second to list the groups."""

import shutil
import textwrap

from distill_runner.compose.folders import choices, groups

TEXT = """\
distill-run: repeat, compare and extend knowledge distillation of Transformers.

Groups (<group>=<name>):

{groups}

Keys (<key>=<value>): task.* teacher.* student.num_layers student.init loss.eta loss.lambda loss.temperature
  optim.lr optim.batch_size optim.epochs optim.max_steps runtime.device runtime.precision runtime.targets
  seed store.dir tracker.project plan; every key: distill-run --cfg job

Examples:
  distill-run experiment=demo                                   with and without a teacher; embedded data, offline
  distill-run task=custom task.dataset=my_folder method=rkd     your own texts and labels
  distill-run task=rte method=alp                               one cell of ALP-KD's Table 1
  distill-run task=rte method=alp plan=true                     what that would train, and what is in the store
  distill-run task=mrpc method=pkd mapping=last loss.lambda=0.5
  distill-run task=rte method=alp teacher=minilm_l6 student.num_layers=3 tracker=wandb
  distill-run -m task=rte method=nkd,rkd,pkd,ckd,alp seed=1,2,3
Also: distill-run-table, -predict, -export, -analyse, -store, -submit and -dashboard, each with --help
Tab completion:  eval "$(distill-run -sc install=bash)"
Configuration:   distill-run <overrides> --cfg job      Errors in full: HYDRA_FULL_ERROR=1
"""


def help_text() -> str:
    """Return the help text with the groups and their names, wrapped to the width of the terminal."""
    columns = shutil.get_terminal_size((120, 24)).columns
    wrapped = textwrap.TextWrapper(columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    lines = [wrapped.fill(f"{group}: {', '.join(choices(group))}") for group in groups()]
    return TEXT.replace("{groups}", "\n".join(lines))
