"""python -m millrace: the command of that name."""

from millrace.cli import main

main()
