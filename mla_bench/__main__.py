"""`python -m mla_bench`."""

from mla_bench.cli import main

if __name__ == "__main__":
    main()
