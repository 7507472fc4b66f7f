"""``distill-run claims``: what runs say about the claims of papers, as a page."""

from argparse import Namespace
from difflib import unified_diff
from pathlib import Path

from distill_runner.commands.parser import RUNS, write_file
from distill_runner.common.errors import UserError
from distill_runner.report.claims import CLAIMS, claims_text, outcomes, read_claims, with_records
from distill_runner.report.claims_page import claims_page
from distill_runner.report.collect import read_results, select_results


def show_claims(options: Namespace) -> int:
    """Print or write the page, compare it with a file, or record the numbers of the runs with the claims.

    Returns:
        1 if ``--check`` names a page that differs, otherwise 0.
    Raises:
        UserError: a folder holds no runs, or a file cannot be read or written.
    """
    file = options.claims or CLAIMS
    claims = read_claims(file)
    default = [RUNS] if RUNS.is_dir() else []
    results = select_results(options.folders, {}) if options.folders else read_results(default)
    all_outcomes = outcomes(claims, results)
    if options.record:
        claims = with_records(claims, all_outcomes)
        write_file(file, claims_text(claims))
        all_outcomes = outcomes(claims)
    page = claims_page(claims, all_outcomes)
    if options.check:
        return _print_changes(page, options.check)
    if options.out:
        write_file(options.out, page)
    else:
        print(page, end="")
    return 0


def _print_changes(page: str, file: Path) -> int:
    try:
        committed = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--check", file, "cannot be read as text") from error
    changes = [*unified_diff(committed.splitlines(), page.splitlines(), str(file), "computed", n=0, lineterm="")]
    print("\n".join(changes) if changes else f"{file} is up to date")
    return 1 if changes else 0
