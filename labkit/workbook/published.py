"""What papers and repositories say about the models that this book computes."""

from labkit.data import read_rows


def published(model: str, quantity: str) -> float:
    """Return a figure of `data/published.csv`, in the unit it gives there.

    >>> published("v3-671b", "activated parameters")  # billion
    37.0

    Raises:
        ValueError: the table has no such figure.
    """
    known = {(row["model"], row["quantity"]): row for row in read_rows("published.csv")}
    if (model, quantity) not in known:
        names = ", ".join(f"{owner}: {name}" for owner, name in known)
        raise ValueError(
            f"data/published.csv has no {quantity!r} of {model!r}. Add a row with its "
            f"source, or use one of {names}."
        )
    return float(known[model, quantity]["value"])
