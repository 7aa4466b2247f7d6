"""`python -m consilium` is the `consilium` command."""

from consilium.cli.main import main

if __name__ == "__main__":
    main()
