"""For `python -m fourfold.cli`, as torchrun starts ranks."""

from fourfold.cli import main

main()
