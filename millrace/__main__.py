"""`python -m millrace`: the `millrace` command."""

from millrace.cli.main import main

main()
