"""python -m millrace: the command of that name."""

from millrace.cli.main import main

main()
