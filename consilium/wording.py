"""How numbers of things are written."""


def counted(number: int, thing: str, ending: str = "s") -> str:
    """The number and the thing, in the plural unless there is one: "1 case", "2 cases"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{ending}"
